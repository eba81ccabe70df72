"""Real runs of a model that steps in milliseconds, started by forking (`fork_server.py`), signalled, killed and read back."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from train.config.place import claim, read_status
from train.config.plan import make_plan
from train.config.publish import prepare
from train.data.indexed import IndexedWriter
from train.tracking import read_metrics

_SUPPORT = Path(__file__).resolve().parent
_ROOT = _SUPPORT.parents[1]
TINY = (
    *("model.layers=2", "model.width=32", "model.heads=2", "model.ffn_width=64", "attention=dense", "moe=none", "tracking=none"),
    *("train.precision=fp32", "train.seq_len=32", "train.micro_batch=1", "train.global_batch=4", "train.eval_steps=0", "train.timeout=60"),
    *("optim=cosine", "data=custom", "data.validation=0.2", "train.steps=12"),
)
"""Overrides of a run of a few milliseconds a step; `corpus` makes its data."""


def corpus(prefix: Path, documents: int = 60, seed: int = 1) -> str:
    """Write an indexed data set of short documents of letters; returns its prefix."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        for _ in range(documents):
            writer.add_document(np.append(np.resize(rng.integers(97, 123, size=5), rng.integers(20, 90)), 256))
        writer.finish(f"{prefix}.idx")
    return str(prefix)


@dataclass
class Job:
    """One start of a run: its ranks' processes and their output."""

    forge: "Forge"
    run: Path
    pids: list[int]
    log: str

    def wait(self, seconds: float = 60.0, ranks: Sequence[int] | None = None) -> list[int | None]:
        """Exit codes of some ranks, all by default: -signal for killed ones, None for those that still run after `seconds`."""
        pids = self.pids if ranks is None else [self.pids[rank] for rank in ranks]
        codes: list[int | None] = self.forge.ask({"wait": pids, "seconds": seconds})["codes"]
        return codes

    def finish(self, seconds: float = 60.0) -> "Job":
        """Wait for the end, which must be a good one."""
        codes = self.wait(seconds)
        assert codes == [0] * len(self.pids), f"{codes}\n{self.output(0)}\n{self.output(-1)}"
        return self

    def kill(self, number: int = signal.SIGKILL, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, all by default."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            os.kill(self.pids[rank], number)

    def output(self, rank: int = 0) -> str:
        """What the rank printed in this start."""
        rank %= len(self.pids)
        text = Path(f"{self.log}{rank}").read_text(encoding="utf-8")
        log = self.run / "logs" / f"rank_{rank}.log"
        return text + (log.read_text(encoding="utf-8") if rank and log.exists() else "")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Poll until `condition`; the run must not end before."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}\n{self.output(0)}"
            time.sleep(0.005)


@dataclass
class Forge:
    """The server of a test session."""

    process: "subprocess.Popen[str] | None" = None
    jobs: list[Job] = field(default_factory=list)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; the first one starts the server."""
        if self.process is None:
            environment = {key: value for key, value in os.environ.items() if key not in ("LEANTRON_AGENT_PID", "RANK", "WORLD_SIZE")}
            environment |= {"PYTHONPATH": os.pathsep.join((str(_ROOT), str(_SUPPORT))), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, str(_SUPPORT / "fork_server.py")]
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._answer() == {"ready": "train.loop"}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def start(self, overrides: Sequence[str], ranks: int = 2, fault: Callable[[int], None] | None = None) -> Job:
        """Start the run that the overrides make (`run.dir=` or `resume=` among them) on `ranks` processes.

        `fault`, a top-level function, is called with the rank in each process before it does anything.
        """
        config = prepare([*overrides, f"parallel.processes={ranks}"], ranks, ranks, 1)
        run, attempt = claim(config, make_plan(config, ranks))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = f"{run}/output_{attempt}_"
        where = [fault.__code__.co_filename, fault.__name__] if fault is not None else None
        pids = self.ask({"start": str(run), "ranks": ranks, "port": port, "fault": where, "log": log})["pids"]
        self.jobs.append(Job(self, run, pids, log))
        return self.jobs[-1]

    def close(self) -> None:
        """End the server and what it started."""
        for job in self.jobs:
            for pid in job.pids:
                if is_ours(pid):
                    os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.communicate(timeout=30)


def is_ours(pid: int) -> bool:
    """Whether a process of ours with this id is there and no zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and "fork_server.py" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Poll until `condition`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def figures(run: Path) -> dict[int, tuple[float, float, float, int]]:
    """Loss, gradient norm, learning rate and tokens of each step, the last line of a step counting."""
    lines = read_metrics(run / "metrics.jsonl").training
    return {int(line["step"]): (line["loss"], line["grad_norm"], line["lr"], line["tokens"]) for line in lines}


def steps_logged(run: Path) -> int:
    """Last step in the run's metrics so far; 0 before the first."""
    path = run / "metrics.jsonl"
    return max(figures(run), default=0) if path.exists() else 0


def state(run: Path) -> str:
    """`status.json`'s word."""
    return str(read_status(run).get("state"))
