"""States of a range of the flat space: master, first and second moment side by side, on the device, on the host, or in a bucket buffer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from train.offload.layout import Bucket, Piece

NAMES = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class Place:
    """fp32 states of the flat space from `start` on: moments up to `end`, masters up to `masters_end`."""

    start: int
    end: int
    masters_end: int
    tensors: dict[str, Tensor]

    @classmethod
    def make(cls, start: int, end: int, masters_end: int, allocate: Callable[[int], Tensor]) -> "Place":
        """A place whose memory comes from `allocate(elements)`."""
        masters = max(0, masters_end - start)
        sizes = dict(zip(NAMES, (masters, end - start, end - start), strict=True))
        return cls(start, end, start + masters, {name: allocate(size) for name, size in sizes.items()})

    def of(self, name: str, start: int, end: int) -> Tensor | None:
        """A view of one state from `start` to `end` of the flat space; None where there are no masters."""
        if name == "master" and end > self.masters_end:
            return None
        return self.tensors[name][start - self.start : end - self.start]

    def of_piece(self, name: str, piece: Piece) -> Tensor | None:
        """A view of one state of a piece; None where it has no master."""
        return self.of(name, piece.at, piece.at + piece.end - piece.begin)


class Buffer:
    """Device memory that buckets pass through, one after another.

    `free`: the event after which it may be filled again. `arrived`: the event after which what it was last filled with is there.
    """

    def __init__(self, width: int, masters: bool, device: torch.device) -> None:
        sizes = (width if masters else 0, width, width)
        self._tensors = {name: torch.empty(size, device=device) for name, size in zip(NAMES, sizes, strict=True)}
        self.free: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """The memory goes back to the allocator, once the last reference is gone, only after the work that `stream` has now."""
        for tensor in self._tensors.values():
            tensor.record_stream(stream)

    def holding(self, bucket: Bucket, masters_end: int) -> Place:
        """This buffer as the place of `bucket`."""
        return Place(bucket.start, bucket.end, min(masters_end, bucket.end), self._tensors)


def copy_bucket(bucket: Bucket, source: Place, target: Place) -> None:
    """Copy the states of `bucket`, in the current stream, without waiting."""
    for name in NAMES:
        end = min(bucket.end, source.masters_end) if name == "master" else bucket.end
        if end > bucket.start:
            taken, put = source.of(name, bucket.start, end), target.of(name, bucket.start, end)
            assert taken is not None and put is not None
            put.copy_(taken, non_blocking=True)
