"""`stream`: the states on the host pass through the device bucket by bucket, arriving, updated and leaving at once.

Adam needs the norm of the whole gradient, so nothing can be updated before backward has ended; but what an update needs can be there
by then. `prefetch` begins to copy buckets while backward still runs, into memory that is free at that moment. They leave during the next
forward, and their memory goes back to the allocator as each has left: activations and states then need not fit side by side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from train.offload.layout import BUFFERS as ROTATING
from train.offload.layout import MASTER, MOMENTS, Bucket
from train.offload.memory import Lane, span
from train.offload.parameters import with_gradient
from train.offload.places import Buffer, Place, copy_bucket
from train.offload.traffic import Traffic, Updater


class Streamed:
    """The buckets of one optimiser that are on the host; a few buffers in rotation, and more while there is room."""

    def __init__(self, traffic: Traffic, updater: Updater) -> None:
        self._traffic, self._updater = traffic, updater
        layout = traffic.layout
        self._masters = layout.host_masters_end > layout.cut
        self.buffers = [self._buffer(layout.widest) for _ in range(min(ROTATING, len(layout.offloaded)))]
        self._ahead: dict[int, Buffer] = {}

    def _buffer(self, width: int) -> Buffer:
        return Buffer(width, self._masters, self._traffic.device)

    def _fetch(self, number: int, buffer: Buffer) -> None:
        """Begin to copy a bucket to the device."""
        traffic = self._traffic
        with span("offload.h2d", traffic.device), traffic.up.after(buffer.free, traffic.settled[number]):
            copy_bucket(traffic.layout.offloaded[number], traffic.hosted, self._place(number, buffer))
        buffer.arrived = traffic.up.record()

    def _place(self, number: int, buffer: Buffer) -> Place:
        return buffer.holding(self._traffic.layout.offloaded[number], self._traffic.layout.host_masters_end)

    def prefetch(self, room: int) -> int:
        """Begin to copy the next buckets, in memory of their own, as many as fit into `room` bytes; returns how many that were."""
        begun = 0
        buckets = self._traffic.layout.offloaded
        while len(self._ahead) < len(buckets):
            number = len(self._ahead)
            size = self._size(buckets[number])
            if size > room:
                break
            try:
                buffer = self._buffer(buckets[number].end - buckets[number].start)
            except torch.OutOfMemoryError:  # free, but in pieces: the bucket comes in its turn, as without room
                break
            # The memory may be what earlier work on the caller's stream has just stopped using.
            buffer.free = Lane.current(self._traffic.device).record()
            self._fetch(number, buffer)
            self._ahead[number] = buffer
            room -= size
            begun += 1
        return begun

    @property
    def complete(self) -> bool:
        """Whether all buckets are on the device or on their way there."""
        return len(self._ahead) == len(self._traffic.layout.offloaded)

    def _size(self, bucket: Bucket) -> int:
        return (bucket.end - bucket.start) * (MOMENTS + (MASTER if self._masters else 0))

    def drop(self) -> None:
        """Give back what came ahead and was not used; the host's states are the ones that count."""
        for number in list(self._ahead):
            self._give_back(self._ahead.pop(number))

    def _give_back(self, buffer: Buffer) -> None:
        for lane in (self._traffic.up, self._traffic.down):
            if lane.stream is not None:
                buffer.used_by(lane.stream)

    def step(self, moving: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Update the buckets `moving`, those that have gradients."""
        traffic, compute = self._traffic, Lane.current(self._traffic.device)
        turn = 0
        for number in moving:
            ahead = self._ahead.pop(number, None)
            if ahead is None:
                buffer = self.buffers[turn % len(self.buffers)]
                turn += 1
                self._fetch(number, buffer)
            else:
                buffer = ahead
            compute.wait(buffer.arrived)
            bucket, place = traffic.layout.offloaded[number], self._place(number, buffer)
            with traffic.exposure.busy():
                self._updater.on_device(with_gradient(bucket, gradients), place, gradients)
            with span("offload.d2h", traffic.device), traffic.down.after(compute.record()):
                copy_bucket(bucket, place, traffic.hosted)
            buffer.free = traffic.settled[number] = traffic.down.record()
            if ahead is not None:
                self._give_back(ahead)
        self.drop()
