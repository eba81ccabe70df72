"""Bytes that a run's sites counted, beside the formula with the parameters of its checkpoint's index. Free of torch but for the index.

The counts come from the collectives and the sizes from what is stored, so neither is made from the other.
"""

import math
import re
from pathlib import Path

from moe.cost import Sizes
from train.checkpoint.directory import CHECKPOINTS, newest_complete

_MODEL = ("embedding.", "decoder.", "output_layer.")
_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.w_(?:in|out)")
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")
_STATISTICS = re.compile(r"\.router\.(?:expert_bias|local_tokens_per_expert)$")


def sizes_from_index(path: Path) -> Sizes:
    """Parameters by class, whole model, from the index of the checkpoint directory `path`.

    Weights of experts are stacked along their first dim, and so are router rows, whatever part of the experts the site has. Padding of
    the vocabulary counts, as it is trained and exchanged. Raises ValueError on an index that cannot be read, or has no weights.
    """
    from train.checkpoint.safety import read_index

    shapes = {name: shape for name, shape in read_index(path / ".metadata").items() if name.startswith(_MODEL)}
    if not shapes:
        raise ValueError(f"checkpoint {path}: its index names no weights of a model; use a checkpoint of a training run")
    dense, expert, router_row = 0, dict[int, int](), dict[int, int]()
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            expert[int(match[1])] = expert.get(int(match[1]), 0) + math.prod(shape[1:])
        elif match := _ROUTER.fullmatch(name):
            router_row[int(match[1])] = math.prod(shape[1:])
        elif not _STATISTICS.search(name):
            dense += math.prod(shape)
    return Sizes(dense=dense, expert=expert, router_row=router_row)


def sizes_from_run(run_dir: Path) -> tuple[Sizes, Path] | None:
    """`sizes_from_index` of the newest complete checkpoint of a run, and that checkpoint; None when there is none."""
    path, _ = newest_complete(run_dir / CHECKPOINTS)
    return None if path is None else (sizes_from_index(path), path)
