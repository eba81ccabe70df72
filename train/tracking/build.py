"""The trackers of a run as one: every line goes to each, and one that fails is reported once, counted, and does not stop the run."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from train.config.schema import Config
from train.tracking.console import ConsoleTracker
from train.tracking.jsonl import JsonlTracker
from train.tracking.protocol import Metrics, Tracker, TrackerStartError
from train.tracking.starting import PATIENCE, StartingTracker
from train.tracking.tensorboard_tracker import TensorboardTracker
from train.tracking.wandb_tracker import WandbTracker


class CompositeTracker:
    """Passes every line to each of the named trackers.

    A tracker's exception costs its line of figures, not the run: the first one of each tracker is told in one line on `stream`,
    all are counted in `failures`, the later lines carry the total as `tracker_failures`, and the end tells the counts.
    """

    def __init__(self, trackers: Sequence[tuple[str, Tracker]], attempt: int, stream: TextIO | None = None) -> None:
        self._trackers = list(trackers)
        self._attempt = attempt
        self._stream = stream
        self.failures: dict[str, int] = {}

    def add(self, name: str, tracker: Tracker) -> None:
        """Let `tracker` have the lines from now on."""
        self._trackers.append((name, tracker))

    def report_start(self, name: str, error: Exception) -> None:
        """Say and count that a tracker did not start."""
        self.failures[name] = self.failures.get(name, 0) + 1
        self._say(f"tracking: {error}; the run goes on without {name}, metrics.jsonl has every figure")

    def log(self, metrics: Metrics) -> None:
        """Pass one line on, with `attempt`, `time` (seconds since 1970) and `tracker_failures` (when there are any) added."""
        line = {**metrics}
        line.setdefault("attempt", self._attempt)
        line.setdefault("time", time.time())
        if self.failures:
            line["tracker_failures"] = sum(self.failures.values())
        for name, tracker in self._trackers:
            try:
                tracker.log(line)
            except Exception as error:
                self._failed(name, f"a line of step {metrics.get('step')}", error)

    def finish(self, status: str) -> None:
        for name, tracker in self._trackers:
            try:
                tracker.finish(status)
            except Exception as error:
                self._failed(name, "its end", error)
        for name, count in self.failures.items():
            self._say(f"tracking: {name} failed {count} times in this run")

    def _failed(self, name: str, what: str, error: Exception) -> None:
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] == 1:
            reason = " ".join(str(error).split())
            self._say(f"tracking: {name} failed at {what} ({type(error).__name__}: {reason}); the run goes on, more of it is counted")

    def _say(self, line: str) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        print(line, file=stream, flush=True)


def build_trackers(config: Config, run_dir: Path, attempt: int) -> CompositeTracker:
    """The trackers that `config.tracking` asks for, writing under `run_dir`; only the first rank calls it, before its first collective.

    `metrics.jsonl` must be writable (OSError otherwise). A tracker that does not start (wandb within
    `tracking.start_timeout`) is left out and said so in one line; the run waits for it a few seconds only, and then goes on.
    """
    trackers: list[tuple[str, Tracker]] = [("metrics.jsonl", JsonlTracker(run_dir / "metrics.jsonl"))]
    composite = CompositeTracker(trackers, attempt)
    kind = config.tracking.kind
    try:
        if kind == "wandb":
            composite.add(kind, _starting_wandb(config, run_dir, attempt, lambda error: composite.report_start(kind, error)))
        elif kind == "tensorboard":
            board = TensorboardTracker(run_dir)
            composite.add(kind, board)
            print(f"tracking: `tensorboard --logdir {board.folder}`", flush=True)
    except TrackerStartError as error:
        composite.report_start(kind, error)
    composite.add("console", ConsoleTracker(config.train.steps))
    return composite


def _starting_wandb(config: Config, run_dir: Path, attempt: int, failed: Callable[[Exception], None]) -> Tracker:
    def start() -> WandbTracker:
        tracker = WandbTracker.start(config, run_dir, attempt)
        print(f"tracking: wandb {config.tracking.mode} in {tracker.folder}", flush=True)
        return tracker

    # A start that is over sooner than our patience is known before the first line.
    return StartingTracker(start, failed, min(PATIENCE, config.tracking.start_timeout + 1.0))
