"""A hang becomes an error: each rank's watchdog thread notices when training stands still, says where and who, and ends the job.

Every rank keeps `logs/heartbeat_<rank>.json` in the run's directory: the place it is at (phase and step) and since when. A rank
whose main thread has been at one place for `train.hang_timeout` seconds writes the stacks of all its threads to
`logs/rank_<n>.stacks.txt`, looks at the others' heartbeats, names the ranks that have none any more (stopped, frozen, on a dead
host) or that are elsewhere than the rest, and ends. A C thread of the interpreter does the same, without the names, when even
the watchdog cannot run (a library that holds Python's lock).
"""

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Ended = Callable[[str], None]
START_SECONDS = 300.0
"""Least time that the start may take, whatever the limit of a step: imports, data, the model, the other ranks."""


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    """Where a rank says that it is alive and where it is."""
    return run_dir / "logs" / f"heartbeat_{rank}.json"


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Where the stacks of a rank that hangs go."""
    return run_dir / "logs" / f"rank_{rank}.stacks.txt"


class Watchdog:
    """Watches this process's main thread. `at` says where that is; `also` when other work began that must not take for ever."""

    def __init__(self, run_dir: Path, rank: int, world: int, timeout: float, end: Ended) -> None:
        """`timeout` in seconds, 0: never; `end` is called from the watchdog's thread with one line, and must end the process."""
        self._run_dir, self._rank, self._world, self._timeout, self._end = run_dir, rank, world, timeout, end
        self._place: tuple[str, int, float] = ("start", 0, time.monotonic())
        self._interval = min(5.0, timeout / 5)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: TextIO | None = None
        self.also: Callable[[], tuple[str, float] | None] = lambda: None
        """What else is under way and its `time.monotonic()` of start, or None; looked at from the watchdog's thread."""

    def at(self, phase: str, step: int) -> None:
        """The main thread has got somewhere: to `phase` of `step`."""
        self._place = (phase, step, time.monotonic())

    def start(self) -> None:
        """Begin to watch."""
        if not self._timeout:
            return
        stacks_path(self._run_dir, self._rank).unlink(missing_ok=True)
        self._stacks = open(stacks_path(self._run_dir, self._rank), "w")  # noqa: SIM115 - open as long as the process may hang
        self.at("start", 0)
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        if self._thread is None or self._stacks is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        for path in (heartbeat_path(self._run_dir, self._rank), stacks_path(self._run_dir, self._rank)):
            path.unlink(missing_ok=True)

    def _beat(self) -> None:
        assert self._stacks is not None
        phase, step, since = self._place
        beat = {
            "rank": self._rank, "pid": os.getpid(), "host": socket.gethostname(), "phase": phase, "step": step,
            "seconds": time.monotonic() - since, "interval": self._interval,
        }  # fmt: skip
        try:
            path = heartbeat_path(self._run_dir, self._rank)
            path.with_suffix(".part").write_text(json.dumps(beat), encoding="utf-8")
            path.with_suffix(".part").replace(path)
        except OSError:  # a full or absent disk is not a hang; whoever needs it will say so
            pass
        faulthandler.dump_traceback_later(2 * self._limit(phase) + self._interval, exit=True, file=self._stacks)

    def _limit(self, phase: str) -> float:
        return max(self._timeout, START_SECONDS) if phase == "start" else self._timeout

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._beat()
            now = time.monotonic()
            phase, step, since = self._place
            work = self.also()
            if work is not None and now - work[1] > self._timeout:
                phase, since = work
            if now - since > self._limit(phase):
                self._report(phase, step, now - since)

    def _report(self, phase: str, step: int, seconds: float) -> None:
        path = stacks_path(self._run_dir, self._rank)
        assert self._stacks is not None
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        # The others notice at about the same time: let them write their stacks before the first one ends the job.
        self._stop.wait(2 * self._interval)
        suspects = "; ".join(self._suspects()) or "the other ranks stand at the same place"
        self._end(
            f"hang: rank {self._rank} has made no progress for {seconds:.0f} s (train.hang_timeout={self._timeout:g}) "
            f"at {phase} of step {step}; {suspects}; stacks: {path}"
        )

    def _suspects(self) -> list[str]:
        """What is known of the ranks that are not heard of, or else of those that stand elsewhere."""
        silent, elsewhere = [], []
        own = self._place[:2]
        for rank in range(self._world):
            if rank == self._rank:
                continue
            try:
                path = heartbeat_path(self._run_dir, rank)
                beat: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                quiet = time.time() - path.stat().st_mtime
            except (OSError, ValueError):
                silent.append(f"rank {rank} has no heartbeat")
                continue
            where = f"rank {rank} (process {beat['pid']} on {beat['host']})"
            if quiet > 3 * beat["interval"] + 1:
                silent.append(f"{where} has not been heard of for {quiet:.0f} s, last at {beat['phase']} of step {beat['step']}")
            elif (beat["phase"], beat["step"]) != own:
                elsewhere.append(f"{where} is at {beat['phase']} of step {beat['step']}")
        return silent or elsewhere


class NoWatchdog(Watchdog):
    """Watches nothing: for runs inside tests."""

    def __init__(self) -> None:
        super().__init__(Path(), 0, 1, 0.0, lambda _: None)
