"""Pictures of who attends to whom: the block mask of every distinct layer, head by head, and what its heads reach together."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from s2.pattern import DENSE, S2Pattern
from train.config.check import attention_pattern
from train.config.schema import Config
from train.report.curves import Picture
from train.report.style import BLACK, BLUE, GREY, ORANGE, PALE, figure, save

MOST_BLOCKS = 128  # the pattern repeats: the first blocks of a long sequence show it, all of them would not be told apart
MOST_HEADS = 8
FUTURE, LEFT_OUT, WINDOW, STRIPE = range(4)
_COLOURS = ListedColormap(["white", PALE, BLUE, ORANGE])


def number_ranges(numbers: list[int]) -> str:
    """`0, 2-4` for [0, 2, 3, 4]."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shown_blocks(pattern: S2Pattern, seq_len: int) -> int:
    """Blocks of a row that a picture shows."""
    return min(-(-seq_len // pattern.block_size), MOST_BLOCKS)


def kinds(pattern: S2Pattern, blocks: int) -> np.ndarray:
    """(heads, blocks, blocks) of FUTURE, LEFT_OUT, WINDOW or STRIPE: the pattern's block mask, the local window told from the stripes.

    A dense head has no stripes: all of its past is WINDOW.
    """
    mask = np.asarray(pattern.block_mask(blocks))
    q, k = np.indices((blocks, blocks))
    kind = np.where(k > q, FUTURE, LEFT_OUT)[None].repeat(len(mask), axis=0)
    dense = mask[:, np.tril_indices(blocks)[0], np.tril_indices(blocks)[1]].all(axis=1)
    local = (q - k < pattern.local_blocks)[None] | dense[:, None, None]
    kind[mask & local] = WINDOW
    kind[mask & ~local] = STRIPE
    return kind


def distinct_layers(pattern: S2Pattern, layers: int) -> dict[tuple[int, ...], list[int]]:
    """The residues of a layer's heads to the layers that have them, in the order of their first layer."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for layer in range(layers):
        groups.setdefault(pattern.for_layer(layer).residues(), []).append(layer)
    return groups


def _panel(axes: Axes, kind: np.ndarray, title: str, labelled: bool) -> None:
    blocks = kind.shape[-1]
    axes.imshow(kind, cmap=_COLOURS, vmin=0, vmax=3, interpolation="nearest", extent=(0, blocks, blocks, 0))
    if blocks <= 40:  # lines between blocks help while they can be counted
        axes.set_xticks(np.arange(blocks + 1), minor=True)
        axes.set_yticks(np.arange(blocks + 1), minor=True)
        axes.grid(True, which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    ticks = [0, blocks // 2, blocks]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(labelsize=8, color=GREY)
    axes.set_title(title, fontsize=9, color=BLACK)
    axes.set_xlabel("key block", fontsize=8.5)
    if labelled:
        axes.set_ylabel("query block", fontsize=8.5)
    for spine in axes.spines.values():
        spine.set_color(GREY)


def _heads_by_kind(residues: tuple[int, ...]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for head, residue in enumerate(residues):
        groups.setdefault(residue, []).append(head)
    return groups


def _picture(config: Config, pattern: S2Pattern, layers: list[int], folder: Path) -> Picture:
    view = pattern.for_layer(layers[0])
    seq_len = config.train.seq_len
    blocks, kind = shown_blocks(view, seq_len), kinds(view, shown_blocks(view, seq_len))
    groups = list(_heads_by_kind(view.residues()).values())
    shown = groups[:MOST_HEADS]
    panels = [(kind[heads[0]], f"head{'s' if len(heads) > 1 else ''} {number_ranges(heads)}") for heads in shown]
    sparse = [head for head, residue in enumerate(view.residues()) if residue != DENSE]
    if len(groups) > 1:
        title = "all heads together" if len(sparse) == len(kind) else "sparse heads together"
        panels.append((kind[sparse].max(axis=0), title))
    columns = min(len(panels), 5)
    rows = -(-len(panels) // columns)
    drawn = figure(max(4.6, 2.0 * columns + 0.5), 2.15 * rows + 0.85)
    for number, (image, title) in enumerate(panels):
        _panel(drawn.add_subplot(rows, columns, number + 1), image, title, labelled=number % columns == 0)
    name = f"Layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)}"
    what = "dense causal attention" if view.is_dense else f"S2, {view.density(seq_len):.1%} of the causal pairs"
    drawn.suptitle(f"{name}: {what}", fontsize=11, color=BLACK, x=0.01, ha="left")
    if view.is_dense:
        entries = [Patch(color=BLUE, label="attended to")]
    else:
        window = "local window, or a dense head's past" if view.dense_heads else "local window"
        entries = [Patch(color=BLUE, label=window), Patch(color=ORANGE, label="stripe"), Patch(color=PALE, label="left out")]
    drawn.legend(handles=entries, loc="outside lower left", ncols=len(entries), fontsize=8.5, frameon=False)
    total = -(-seq_len // view.block_size)
    part = f"the first {blocks} of {total} blocks" if blocks < total else f"all {total} blocks"
    caption = f"{name}: {part} of {view.block_size} tokens; one panel for each kind of head."
    if len(groups) > len(shown):
        caption += f" {len(groups) - len(shown)} further kinds of heads are not drawn."
    return Picture(path=save(drawn, folder / f"pattern_layer_{layers[0]:03d}.png"), caption=caption)


def pattern_pictures(config: Config, folder: Path) -> list[Picture]:
    """One picture for each distinct layer of the configured model."""
    pattern = attention_pattern(config)
    groups = distinct_layers(pattern, config.model.layers)
    return [_picture(config, pattern, layers, folder) for layers in groups.values()]
