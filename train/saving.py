"""The checkpoints of a run: when one is written, in the background or not, which are kept, and what follows when one fails."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train.checkpoint.directory import CHECKPOINTS, newest_complete, prune, tidy
from train.config.compose import write_atomic
from train.config.schema import Config
from train.engine import checkpoint
from train.engine.outer_state import OuterState
from train.engine.parallel import Ranks
from train.worker import pace_path


class Checkpoints:
    """A run's checkpoints, seen from one rank. All methods but `ended` are collective."""

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks) -> None:
        self._config, self._ranks = config.checkpoint, ranks
        self.directory = run_dir / CHECKPOINTS
        self._run_dir = run_dir
        self._paces: dict[str, float] = {}
        self._saver = checkpoint.BackgroundSaver(self.directory) if self._config.async_save else None
        self._begun = 0.0
        self.failures = 0
        """Checkpoints that could not be written."""
        self.saved_step = -1
        """Step of the last checkpoint that is written or under way."""

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same on every rank; those that are passed over are named."""
        found: list[str | None] = [None]
        if self._ranks.is_first:
            tidy(self.directory)
            path, skipped = newest_complete(self.directory)
            for line in skipped:
                print(line, flush=True)
            found[0] = str(path) if path is not None else None
        dist.broadcast_object_list(found)
        return Path(found[0]) if found[0] is not None else None

    def save(
        self, step: int, chunks: list[Any], optimizer: Any, stored: dict[str, Any], *, last: bool, outer: OuterState | None = None
    ) -> None:
        """Write the checkpoint of `step`, or begin to. `last`: return when it is complete, or raise CheckpointNotWritten.

        `outer`: the outer step's state of a site of several.
        """
        self.finish()
        self._begun, self.saved_step = time.monotonic(), step
        if self._saver is None:
            self._judge(lambda: self._save_now(step, chunks, optimizer, stored, outer), last)
            return
        saver = self._saver
        self._judge(lambda: saver.start(step, chunks, optimizer, stored, self._prune, outer), last)
        if last:
            self.finish(last=True)

    @property
    def ended(self) -> bool:
        """Whether the write in the background is over, as this rank knows it: then all ranks call `finish`."""
        if self._saver is None:
            return False
        return self._saver.state == "failed" or (self._ranks.is_first and self._saver.state == "written")

    @property
    def under_way(self) -> tuple[str, float] | None:
        """What is being written and its `time.monotonic()` of start, for the watchdog."""
        started = self._saver.started if self._saver is not None else None
        return ("the write in the background", started) if started is not None else None

    def note(self, name: str, seconds: float) -> None:
        """Have rank 0 write down what a save, a step or a validation takes: whoever stops the run waits accordingly."""
        if not self._ranks.is_first:
            return
        pace_path(self._run_dir).parent.mkdir(parents=True, exist_ok=True)
        known, self._paces = self._paces, {**self._paces, name: seconds}
        if known.keys() != self._paces.keys() or seconds > 2 * known[name]:
            with contextlib.suppress(OSError):
                write_atomic(pace_path(self._run_dir), json.dumps(self._paces))

    def finish(self, *, last: bool = False) -> None:
        """Wait for the write in the background, if there is one, and say how it ended."""
        if self._saver is not None and self._saver.state != "idle":
            self._judge(self._saver.finish, last)

    def _save_now(self, step: int, chunks: list[Any], optimizer: Any, stored: dict[str, Any], outer: OuterState | None) -> Path:
        path = checkpoint.save(self.directory, step, chunks, optimizer, stored, outer)
        if self._ranks.is_first:
            self._prune()
        return path

    def _prune(self) -> None:
        prune(self.directory, self._config.keep, self._config.keep_every)

    def _judge(self, work: Callable[[], Path | None], last: bool) -> None:
        """Do `work`, which raises on every rank or on none, and take its failure as configured."""
        try:
            path = work()
        except checkpoint.CheckpointNotWritten as error:
            self.failures += 1
            # Not Hopeless: a rank that died during the save looks the same from here, and then a restart helps.
            if last or self._config.on_failure == "stop":
                raise
            if self._ranks.is_first:
                print(f"{error}; checkpoint.on_failure=continue: the run goes on", flush=True)
            return
        if path is not None and self._ranks.is_first:
            self.note("save_seconds", time.monotonic() - self._begun)
            print(f"checkpoint {path}", flush=True)
