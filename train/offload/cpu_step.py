"""`cpu_step`: gradients go down, the host's cores update, weights come up; the three overlap between buckets.

Casts happen on the device, in the lanes: a copy across dtypes between host and device is far slower than one of equal dtypes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from train.offload.host_adam import Update
from train.offload.layout import BUFFERS
from train.offload.memory import Lane, span
from train.offload.parameters import given, part, with_gradient
from train.offload.traffic import Traffic, Updater


class OnHost:
    """The buckets of one optimiser that the host updates. `threads`: of its Adam; None: as torch is set."""

    def __init__(self, traffic: Traffic, updater: Updater, update: Update, threads: int | None, allocate: Callable[[int], Tensor]) -> None:
        self._traffic, self._updater, self._update, self._threads = traffic, updater, update, threads
        count = min(BUFFERS, len(traffic.layout.offloaded))
        self.rising = [torch.empty(traffic.layout.widest, device=traffic.device) for _ in range(count)]
        self.falling = [allocate(traffic.layout.widest) for _ in range(count)]
        self._risen: list[torch.cuda.Event | None] = [None] * count

    def step(self, moving: Sequence[int], gradients: Sequence[Tensor | None], ready: torch.cuda.Event | None) -> None:
        """Update the buckets `moving`, whose gradients are there after `ready`."""
        traffic, slots = self._traffic, len(self.rising)
        arrivals: list[torch.cuda.Event | None] = [None] * slots

        def send(turn: int) -> None:
            if turn < len(moving):
                arrivals[turn % slots] = self._send(moving[turn], self.falling[turn % slots], gradients, ready)

        for turn in range(slots):
            send(turn)
        with _threads(self._threads):
            for turn, number in enumerate(moving):
                slot = turn % slots
                pieces = with_gradient(traffic.layout.offloaded[number], gradients)
                for event in (arrivals[slot], traffic.settled[number]):
                    if event is not None:
                        event.synchronize()
                start = traffic.layout.offloaded[number].start
                with span("offload.host_adam", traffic.device):
                    arrived = [self.falling[slot][piece.at - start :][: piece.end - piece.begin] for piece in pieces]
                    self._updater.on_host(pieces, traffic.hosted, arrived, self._update)
                send(turn + slots)
                self._raise(number, slot, gradients)

    def _send(
        self, number: int, landing: Tensor, gradients: Sequence[Tensor | None], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy a bucket's gradients to `landing` on the host, in fp32; returns the event of their arrival."""
        traffic, bucket = self._traffic, self._traffic.layout.offloaded[number]
        with span("offload.d2h", traffic.device), traffic.down.after(ready):
            for piece in with_gradient(bucket, gradients):
                target = landing[piece.at - bucket.start :][: piece.end - piece.begin]
                target.copy_(part(gradients, piece), non_blocking=True)
        return traffic.down.record()

    def _raise(self, number: int, slot: int, gradients: Sequence[Tensor | None]) -> None:
        """Copy a bucket's masters to the device and cast them to the weights."""
        traffic, bucket, compute = self._traffic, self._traffic.layout.offloaded[number], Lane.current(self._traffic.device)
        rising = self.rising[slot][: bucket.end - bucket.start]
        with span("offload.h2d", traffic.device), traffic.up.after(self._risen[slot]):
            rising.copy_(given(traffic.hosted.of("master", bucket.start, bucket.end)), non_blocking=True)
        traffic.settled[number] = traffic.up.record()
        compute.wait(traffic.settled[number])
        pieces = with_gradient(bucket, gradients)
        sources = [rising[piece.at - bucket.start :][: piece.end - piece.begin] for piece in pieces]
        with traffic.exposure.busy():
            torch._foreach_copy_([self._updater.weight(piece) for piece in pieces], sources)
        self._risen[slot] = compute.record()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
