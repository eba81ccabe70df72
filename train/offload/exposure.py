"""What a step waits for the host: the part of moving and updating the optimiser's states that nothing hides.

From the moment that gradients are ready to the last update of a weight, less the time in which the device itself updates. On a GPU
both are measured between events of the caller's stream, so that waiting for a copy counts and a copy under other work does not; on
the CPU, where nothing runs beside, by the wall clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Exposure:
    """Collects steps; `take` gives their mean and starts again. Keeps at most the events of steps that have not ended on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Mark = 0.0
        self._busy: list[tuple[Mark, Mark]] = []
        self._steps: list[tuple[Mark, Mark, list[tuple[Mark, Mark]]]] = []
        self._seconds, self._count = 0.0, 0

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self) -> None:
        """The gradients of a step are ready, once the work before this has been done."""
        self._began, self._busy = self._mark(), []

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The device has work of its own in the block."""
        start = self._mark()
        yield
        self._busy.append((start, self._mark()))

    def end(self) -> None:
        """All updates of the step are on their way."""
        self._steps.append((self._began, self._mark(), self._busy))
        self._settle_ended()

    def take(self, wait: bool = False) -> float | None:
        """Mean seconds of the steps since the last call, None when there was none.

        On a GPU a step counts once the device has ended it; with `wait` the host waits for the last one.
        """
        if wait and self._steps and not isinstance(self._steps[-1][1], float):
            self._steps[-1][1].synchronize()
        self._settle_ended()
        mean = self._seconds / self._count if self._count else None
        self._seconds, self._count = 0.0, 0
        return mean

    def _settle_ended(self) -> None:
        while self._steps and _happened(self._steps[0][1]):
            start, end, busy = self._steps.pop(0)
            # Events are as coarse as half a microsecond: many short ones may add up to a little more than the whole.
            self._seconds += max(0.0, _seconds(start, end) - sum(_seconds(first, last) for first, last in busy))
            self._count += 1


def _happened(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1e3
