"""What the optimiser accepts, and its parameters' gradients by the pieces of buckets."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from train.offload.layout import Bucket, Piece

_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")


def given(value: Tensor | None) -> Tensor:
    """The tensor that must be there."""
    assert value is not None
    return value


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for settings that are not AdamW's and parameters whose states cannot be kept."""
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name}={group[name]}: OffloadedAdam does not do that; leave it out")
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("decoupled_weight_decay=False: OffloadedAdam is AdamW; leave it out")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a parameter of dtype {parameter.dtype}: states are kept for bfloat16 and float32; convert the model")
        if not parameter.is_contiguous():
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous; make it so before the optimiser")


def one_device(weights: Sequence[Tensor]) -> torch.device:
    """The device that all parameters share, or ValueError, also when one is listed twice."""
    if len({id(weight) for weight in weights}) < len(weights):
        raise ValueError("a parameter is listed twice; give each one once, as model.parameters() does for shared ones")
    devices = {weight.device for weight in weights}
    if not devices:  # a rank whose shard of these groups is empty
        return torch.device("cpu")
    if len(devices) > 1:
        raise ValueError(f"parameters on {sorted(map(str, devices))}: they must share one device; make one optimiser for each")
    (device,) = devices
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"parameters on {device}: states can be offloaded from cuda or cpu; move the model")
    return device


def gradient_of(weight: Tensor) -> Tensor | None:
    """The flat gradient of a parameter, main gradient first; None when it has none."""
    gradient = getattr(weight, "decoupled_grad", None)
    gradient = weight.grad if gradient is None else gradient
    if gradient is None:
        return None
    if gradient.is_sparse:
        raise ValueError("a sparse gradient: OffloadedAdam needs dense ones; make the embedding with sparse=False")
    return gradient.detach().reshape(-1)


def part(gradients: Sequence[Tensor | None], piece: Piece) -> Tensor:
    """The gradient of a piece in fp32."""
    return given(gradients[piece.slot.index])[piece.begin : piece.end].float()


def with_gradient(bucket: Bucket, gradients: Sequence[Tensor | None]) -> list[Piece]:
    """The pieces of a bucket whose parameters have gradients."""
    return [piece for piece in bucket.pieces if gradients[piece.slot.index] is not None]


def by_group(pieces: Sequence[Piece]) -> Iterator[tuple[int, list[Piece]]]:
    """Pieces by their parameter group's number."""
    groups: dict[int, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.slot.group, []).append(piece)
    yield from groups.items()
