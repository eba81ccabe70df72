"""What travels between sites: how tensors are cut into buckets and parts, and encoded as bytes.

| transfer | bytes an element | rounding |
|---|---|---|
| fp32 | 4 | none |
| bf16 | 2 | every site's part and the sum, to 8 bits |
| int8 | 1, and 4 for up to 256 | the same, to 1/254 of the largest magnitude among up to 256 neighbours of one tensor |

How values are rounded depends on their tensor alone, not on its neighbours, on buckets, or on which site owns which part.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

TRANSFERS = ("fp32", "bf16", "int8")
CHUNK = 256
"""Neighbours that share a scale in int8."""


def buckets(tensors: Sequence[Tensor], size: int, grain: int) -> Iterator[list[Tensor]]:
    """The elements of contiguous `tensors` in order, as lists of one-dim views of `size` elements or a few less.

    A tensor is cut only at multiples of `grain`; where `size` is below it a bucket is one grain.
    """
    views: list[Tensor] = []
    room = size
    for flat in (tensor.view(-1) for tensor in tensors):
        start = 0
        while start < flat.numel():
            take = min(flat.numel() - start, room)
            if start + take < flat.numel():
                take -= take % grain
            if take == 0 and not views:
                take = min(grain, flat.numel() - start)
            if take:
                views.append(flat[start : start + take])
                start, room = start + take, room - take
            if take == 0 or room <= 0:
                yield views
                views, room = [], size
    if views:
        yield views


def chunks(views: Sequence[Tensor], sites: int, transfer: str) -> list[list[int]]:
    """Each site's part of a bucket as the lengths of the runs of elements that are encoded together; the parts are about alike."""
    if transfer != "int8":
        elements = sum(view.numel() for view in views)
        return [[elements // sites + (site < elements % sites)] for site in range(sites)]
    lengths = [min(CHUNK, view.numel() - start) for view in views for start in range(0, view.numel(), CHUNK)]
    cuts = [site * len(lengths) // sites for site in range(sites + 1)]
    return [lengths[start:end] for start, end in pairwise(cuts)]


def encode(part: Tensor, lengths: Sequence[int], transfer: str) -> Tensor:
    """fp32 elements (n,) as bytes: in int8 the scales of the runs come first."""
    if transfer == "fp32":
        return part.contiguous().view(torch.uint8)
    if transfer == "bf16":
        return part.to(torch.bfloat16).view(torch.uint8)
    if not lengths:
        return torch.empty(0, dtype=torch.uint8)
    runs = torch.tensor(lengths)
    scale = torch.segment_reduce(part.abs(), "max", lengths=runs) / 127
    # A run of zeros has scale 0 and is sent as zeros.
    steps = part / torch.where(scale == 0, 1.0, scale).repeat_interleave(runs)
    return torch.cat([scale.view(torch.uint8), steps.round_().to(torch.int8).view(torch.uint8)])


def decode(raw: Tensor, lengths: Sequence[int], transfer: str) -> Tensor:
    """The elements of `encode`, in fp32; a new tensor."""
    if transfer == "fp32":
        return raw.view(torch.float32).clone()
    if transfer == "bf16":
        return raw.view(torch.bfloat16).to(torch.float32)
    split = 4 * len(lengths)
    scale, steps = raw[:split].view(torch.float32), raw[split:].view(torch.int8)
    return steps.to(torch.float32).mul_(scale.repeat_interleave(torch.tensor(lengths, dtype=torch.long)))


def unpack(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Put a bucket `flat` (n,) back into the `views` of n elements that it was joined from."""
    for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
        view.copy_(part)
