"""Pictures of several sites together: their losses, the merged and the sliced models, and who routes what to which expert."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from moe.residency import ResidencyPlan
from train.report.curves import Picture, draw_line
from train.report.experts import layer_loads
from train.report.style import BLACK, BLUE, GREY, ORANGE, PURPLE, VERMILLION, figure, save, tidy
from train.tracking.readers import RunMetrics

COLOURS = (BLUE, ORANGE, PURPLE, GREY)
MOST_ROWS = 48  # more rows than these cannot be told apart
_LATE = 0.25  # the share of a run's end over which loads are averaged


def sites_loss_picture(
    metrics: Mapping[int, RunMetrics], folder: Path, bigram: float | None, evaluation: Mapping[str, Any]
) -> Picture | None:
    """Training and validation loss of every site, the merged model's validation and the bigram entropy, in bits per byte."""
    if not any(each.series("bits_per_byte")[0] for each in metrics.values()):
        return None
    drawn = figure(9.0, 4.2)
    axes = drawn.add_subplot()
    for site, each in metrics.items():
        colour = COLOURS[site % len(COLOURS)]
        draw_line(axes, *each.series("bits_per_byte"), colour, f"site {site}, training")
        steps, values = each.series("val_bits_per_byte", validation=True)
        if steps:
            axes.plot(steps, values, color=colour, marker="D", markersize=4.5, linewidth=0, label=f"site {site}, validation")
    if evaluation:
        place, value = [evaluation["step"]], [evaluation["val_bits_per_byte"]]
        axes.plot(place, value, color=VERMILLION, marker="*", markersize=13, linewidth=0, label=f"merged, validation: {value[0]:.3f}")
    if bigram is not None:
        axes.axhline(bigram, color=BLACK, linestyle="--", linewidth=1.2, label=f"bigram entropy of the data, {bigram:.3f}")
    tidy(axes, "Loss, bits per byte", y="bits per byte")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    caption = "Loss of each site over its steps, with its own experts; the star is the merged model with all of them."
    return Picture(path=save(drawn, folder / "loss.png"), caption=caption)


def evaluation_picture(evaluation: Mapping[str, Any], folder: Path, bigram: float | None) -> Picture:
    """A bar for the merged model and one for each site's sliced model."""
    names = ["merged", *(f"site {each['site']}" for each in evaluation["sites"])]
    values = [evaluation["val_bits_per_byte"], *(each["val_bits_per_byte"] for each in evaluation["sites"])]
    drawn = figure(6.4, max(2.4, 0.5 * len(names) + 1.4))
    axes = drawn.add_subplot()
    colours = [VERMILLION, *(COLOURS[each["site"] % len(COLOURS)] for each in evaluation["sites"])]
    bars = axes.barh(names, values, color=colours, height=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=9, padding=-38, color="white")
    if bigram is not None:
        axes.axvline(bigram, color=BLACK, linestyle=":", linewidth=1.2)
    tidy(axes, "Merged and sliced models", x="validation loss, bits per byte")
    axes.set_xlim(0, 1.12 * max(*values, bigram or 0.0))
    axes.invert_yaxis()
    caption = "Validation loss of the merged model and of each site's share of it." + (" Dotted: the bigram entropy." if bigram else "")
    return Picture(path=save(drawn, folder / "evaluation.png"), caption=caption)


def load_picture(metrics: Mapping[int, RunMetrics], plan: ResidencyPlan | None, folder: Path) -> Picture | None:
    """A heat map with a row for each site in each layer and a column for each expert; the experts that a site holds are framed."""
    found = {site: layer_loads(each) for site, each in metrics.items()}
    layers = sorted({int(layer) for loads in found.values() for layer in loads})
    rows = [(layer, site) for layer in layers for site in found if str(layer) in found[site]]
    if not rows:
        return None
    shown = rows[:MOST_ROWS]
    table = np.array([_late(found[site][str(layer)][1]) for layer, site in shown])
    drawn = figure(max(5.2, min(11.0, 0.42 * table.shape[1] + 3.0)), max(2.6, 0.34 * len(shown) + 1.6))
    axes = drawn.add_subplot()
    image = axes.imshow(table, cmap="Blues", vmin=0.0, vmax=max(2.0, float(table.max())), aspect="auto")
    for row, (layer, site) in enumerate(shown):
        turned = next((int(line["residency_round"]) for line in reversed(metrics[site].training) if "residency_round" in line), 0)
        held = plan.resident(site, layer, turned) if plan is not None else range(table.shape[1])
        for expert in held:
            frame = Rectangle((expert - 0.46, row - 0.44), 0.92, 0.88, fill=False, edgecolor=VERMILLION, linewidth=1.6)
            axes.add_patch(frame)
    tidy(axes, "Share of an even load, by site", x="expert")
    axes.grid(False)
    axes.set_yticks(range(len(shown)), [f"layer {layer}, site {site}" for layer, site in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(table.shape[1], 16)))
    drawn.colorbar(image, ax=axes, pad=0.02, aspect=30).ax.tick_params(labelsize=8.5)
    caption = "What each site's router chose over the last quarter of its steps, before skipping; framed: the experts that the site holds."
    if len(shown) < len(rows):
        caption += f" {len(rows) - len(shown)} further rows are not drawn."
    return Picture(path=save(drawn, folder / "load_by_site.png"), caption=caption)


def _late(loads: np.ndarray) -> np.ndarray:
    """(lines, experts) -> (experts,): the mean over the last lines."""
    mean: np.ndarray = loads[-max(1, round(_LATE * len(loads))) :].mean(axis=0)
    return mean
