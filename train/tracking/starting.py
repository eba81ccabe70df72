"""A tracker that takes its time to start: the run waits for it a moment, then goes on, and its lines are kept until it is there."""

import threading
from collections import deque
from collections.abc import Callable

from train.tracking.protocol import Metrics, Tracker

PATIENCE = 5.0
"""Seconds that a run waits for a tracker before its first step."""


class StartingTracker:
    """Stands in for the tracker that `start` returns, called in a thread; `start` bounds its own time."""

    def __init__(self, start: Callable[[], Tracker], failed: Callable[[Exception], None], patience: float = PATIENCE) -> None:
        """`failed` is called with what `start` raised, once, by the thread that logs."""
        self._failed = failed
        self._lines: deque[Metrics] = deque()
        self._started: Tracker | None = None
        self._error: Exception | None = None
        self._tracker: Tracker | None = None
        self._open = True

        def begin() -> None:
            try:
                self._started = start()
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=begin, name="tracker-start", daemon=True)
        self._thread.start()
        self._thread.join(patience)
        self._look()

    def _look(self) -> None:
        """Take notice of the start's outcome, and pass on what has waited for it."""
        if self._thread.is_alive() or not self._open or self._tracker is not None:
            return
        if self._started is None:
            self._open = False
            self._lines.clear()
            assert self._error is not None
            self._failed(self._error)
            return
        self._tracker = self._started
        while self._lines:
            self._tracker.log(self._lines.popleft())

    def log(self, metrics: Metrics) -> None:
        self._look()
        if self._tracker is not None:
            self._tracker.log(metrics)
        elif self._open:
            self._lines.append(metrics)

    def finish(self, status: str) -> None:
        self._thread.join()
        self._look()
        if self._tracker is not None:
            self._tracker.finish(status)
