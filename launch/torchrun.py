"""One torchrun world as a child: how it is started, told to stop, and started again; what it ended with is judged in `outcome.py`.

Everything within a world stays on this host: rendezvous and worker addresses are 127.0.0.1 with ports that the system chooses, so that
several worlds can start at once. (torchrun's own store listens on all interfaces: run it behind a firewall.)
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.outcome import Ended, conclude, hopeless
from launch.output import LogOnly, Terminal
from launch.packages import ROOT
from train.config.place import CONFIG_FILE, descriptors, write_status
from train.worker import log_path, pace_path

AGENT = ("-m", "launch.agent")
WORKER = ("-m", "train.pretrain")
SAVE_SECONDS = 120.0
"""How long the workers may take at least to finish their step, save and leave after a signal, before they are killed."""


def command(run_dir: Path, processes: int, worker: Sequence[str] = WORKER, agent: Sequence[str] = AGENT) -> list[str]:
    """Return the command line of torchrun's agent for a world on this host."""
    report = run_dir / "logs" / "agent.json"
    return [
        sys.executable, "-P", *agent, str(os.getpid()), str(report),
        f"--nproc-per-node={processes}", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run_dir.name}-{os.getpid()}", "--local-addr=127.0.0.1", "--max-restarts=0", "--monitor-interval=0.2",
        *worker, "--config", str(run_dir / CONFIG_FILE),
    ]  # fmt: skip


def child_environment(processes: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the children's environment: our packages first, no script folder on the path, threads shared out over the processes.

    `processes`: all that a command starts on this host. gloo talks over the loopback interface unless the environment says otherwise.
    """
    environment = dict(base)
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), base.get("PYTHONPATH", "")]))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // processes)))
    if sys.platform.startswith("linux"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def save_limit(run_dir: Path) -> float:
    """Seconds that workers may take to save and leave: three times what the run's last save, step and validation took together."""
    try:
        pace = json.loads(pace_path(run_dir).read_text(encoding="utf-8"))
        return max(SAVE_SECONDS, 3.0 * sum(float(seconds) for seconds in pace.values()))
    except (OSError, ValueError, AttributeError, TypeError):
        return SAVE_SECONDS


@dataclass(kw_only=True)
class World:
    """A torchrun world of a claimed run or site. `begin` it, then `poll` until that is True; `code` is what it ended with."""

    run_dir: Path
    """The run's or the site's directory."""
    attempt: int
    """Number of this start."""
    processes: int
    """Ranks."""
    environment: Mapping[str, str]
    """Of its processes."""
    worker: Sequence[str] = WORKER
    """What torchrun starts on each process; it gets `--config <run>/config.yaml`."""
    agent: Sequence[str] = AGENT
    """Our torchrun."""
    max_restarts: int = 0
    """How often all ranks are started again after a failure that another start may mend; they go on from the newest checkpoint."""
    cores: Sequence[int] | None = None
    """The cores it may use; None: all."""
    speaks: bool = True
    """Whether rank 0's output goes to our terminal besides its log."""
    patience: float = 0.0
    """Seconds that its ranks may need to leave besides: a meeting of sites that they are in."""
    go_on: str | None = None
    """The overrides with which this goes on after a stop, for its last line; None: somebody else says so."""
    code: int | None = None
    """Exit code: 0, 1 or another of torchrun, 128 + the signal that ended it; None so far."""
    received: int | None = None
    """The signal that was passed on to it."""
    _restarts: int = 0
    _asked_at: float = 0.0
    _process: "subprocess.Popen[bytes] | None" = None
    _terminal: Terminal | LogOnly | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Start torchrun."""
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "agent.json").unlink(missing_ok=True)
        self._terminal = (Terminal if self.speaks else LogOnly)(log_path(self.run_dir, 0))
        with _on(self.cores):
            self._process = subprocess.Popen(
                command(self.run_dir, self.processes, self.worker, self.agent),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=self._terminal.stdout,
                stderr=self._terminal.stderr,
                start_new_session=True,
                pass_fds=descriptors(self.run_dir),  # if we are killed, nobody goes on with the run while its workers still save
            )
        self._terminal.handed_over()

    def poll(self) -> bool:
        """Look after it: whether it has ended for good. After a signal it has as long as its saves and steps have shown to take."""
        if self.code is not None:
            return True
        assert self._process is not None and self._terminal is not None
        ended = self._process.poll()
        if ended is None:
            if self.received is not None and time.monotonic() - self._asked_at > save_limit(self.run_dir) + self.patience:
                self.kill()
            return False
        self._terminal.close()
        report = self.run_dir / "logs" / "agent.json"
        failures = json.loads(report.read_text(encoding="utf-8"))["failures"] if report.is_file() else []
        report.unlink(missing_ok=True)
        outcome = Ended(ended, self.received, failures)
        code = conclude(self.run_dir, self.attempt, outcome, self.go_on)
        if code == 0 or self.received is not None or self._restarts >= self.max_restarts or hopeless(outcome):
            self.code = code
            return True
        self._restarts += 1
        self.attempt += 1
        line = f"{self.run_dir}: restart {self._restarts} of {self.max_restarts}, attempt {self.attempt}"
        print(line, file=sys.stderr, flush=True)
        write_status(self.run_dir, state="running", attempt=self.attempt)
        self.begin()
        return False

    def forward(self, number: int) -> None:
        """First signal: ask the workers to save and leave. Second one: end them now."""
        if self.code is not None or self._process is None:
            return
        if self.received is not None:
            self.kill()
            return
        self.received, self._asked_at = number, time.monotonic()
        workers = self._below(recursive=False)
        for worker in workers:
            _signal(worker.pid, signal.SIGTERM)
        if not workers:  # torchrun is still starting
            _signal(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End torchrun and all below it."""
        if self._process is not None and self._process.poll() is None:
            for pid in [*(process.pid for process in self._below(recursive=True)), self._process.pid]:
                _signal(pid, signal.SIGKILL)

    def give_up(self) -> None:
        """End it for good."""
        self.max_restarts = 0
        self.kill()

    def resize(self) -> None:
        """Our terminal has another size."""
        if self._terminal is not None and self.code is None:
            self._terminal.resize()

    def _below(self, recursive: bool) -> list[psutil.Process]:
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=recursive)
        except psutil.NoSuchProcess:
            return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def _on(cores: Sequence[int] | None) -> Iterator[None]:
    """What is started in here may use `cores` only: a child has the cores of the thread that starts it."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
