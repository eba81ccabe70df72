"""One run as a child: torchrun with its workers, the signals passed on, the status written, the failing rank named.

Everything stays on this host: rendezvous and worker addresses are 127.0.0.1 with ports that the system chooses, so that several runs
can start at once. (torchrun's own store listens on all interfaces: run it behind a firewall.)
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from launch.output import Terminal
from launch.packages import ROOT
from train.config.place import CONFIG_FILE, write_status
from train.worker import log_path

WORKER = ("-m", "train.pretrain")
SAVE_SECONDS = 120.0
"""How long the workers may take to save and leave after SIGTERM or SIGINT, before they are killed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(run_dir: Path, processes: int, worker: Sequence[str] = WORKER) -> list[str]:
    """Return the command line of torchrun's agent for a run on this host."""
    report = run_dir / "logs" / "agent.json"
    return [
        sys.executable, "-P", "-m", "launch.agent", str(os.getpid()), str(report),
        f"--nproc-per-node={processes}", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run_dir.name}-{os.getpid()}", "--local-addr=127.0.0.1", "--max-restarts=0", "--monitor-interval=0.2",
        *worker, "--config", str(run_dir / CONFIG_FILE),
    ]  # fmt: skip


def child_environment(processes: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the workers' environment: our packages first, no script folder on the path, threads shared out over the processes."""
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


class Child:
    """The running torchrun and what its workers are told."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.received: int | None = None
        self._asked_at: float | None = None

    def forward(self, number: int) -> None:
        """First signal: ask the workers to save and leave. Second one: end them now."""
        if self.received is None:
            self.received, self._asked_at = number, time.monotonic()
            workers = self._workers()
            for worker in workers:
                _signal(worker.pid, signal.SIGTERM)
            if not workers:  # torchrun is still starting
                _signal(self.process.pid, signal.SIGTERM)
        else:
            self.kill()

    def wait(self) -> int:
        """Wait for torchrun; after a forwarded signal at most `SAVE_SECONDS`."""
        while True:
            try:
                return self.process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if self._asked_at is not None and time.monotonic() - self._asked_at > SAVE_SECONDS:
                    self.kill()

    def kill(self) -> None:
        """End torchrun and all below it."""
        for process in [*self._descendants(), self.process]:
            _signal(process.pid, signal.SIGKILL)

    def _workers(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def start(run_dir: Path, attempt: int, processes: int, worker: Sequence[str] = WORKER) -> int:
    """Run the claimed run in `run_dir` to its end. Returns its exit code: 0, 1, or 128 + the signal that stopped it.

    `worker`: what torchrun starts on each process; it gets `--config <run>/config.yaml`.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    report = logs / "agent.json"
    report.unlink(missing_ok=True)
    terminal = Terminal(log_path(run_dir, 0))
    process = subprocess.Popen(
        command(run_dir, processes, worker),
        env=child_environment(processes),
        stdin=subprocess.DEVNULL,
        stdout=terminal.stdout,
        stderr=terminal.stderr,
        start_new_session=True,
    )
    terminal.handed_over()
    child = Child(process)
    with _handlers(child.forward, terminal.resize):
        code = child.wait()
    terminal.close()
    failures = json.loads(report.read_text(encoding="utf-8"))["failures"] if report.is_file() else []
    report.unlink(missing_ok=True)
    return _conclude(run_dir, attempt, code, child.received, failures)


def _conclude(run_dir: Path, attempt: int, code: int, received: int | None, failures: Sequence[Mapping[str, object]]) -> int:
    """Write the status, say which rank failed and where its log is, and return the exit code."""
    if received is not None:
        name = signal.Signals(received).name
        exit_code = 0 if code == 0 else 128 + received
        write_status(run_dir, state="stopped", attempt=attempt, exit_code=exit_code, signal=name)
        print(f"{run_dir}: stopped by {name}; go on with `leantron pretrain resume={run_dir}`", file=sys.stderr)
        return exit_code
    if code == 0:
        write_status(run_dir, state="completed", attempt=attempt, exit_code=0)
        return 0
    exit_code = code if code > 0 else 128 - code
    if not failures:
        write_status(run_dir, state="failed", attempt=attempt, exit_code=exit_code, failed_rank=None, reason="torchrun failed")
        print(f"{run_dir}: torchrun itself failed with exit code {exit_code}; see {log_path(run_dir, 0)}", file=sys.stderr)
        return exit_code
    for failure in (failure for failure in failures if _number(failure, "exit_code") < 0):  # it could not write its own last line
        with log_path(run_dir, _number(failure, "rank")).open("a", encoding="utf-8") as stream:
            stream.write(_line(failure) + "\n")
    first, line = failures[0], _line(failures[0])
    write_status(
        run_dir, state="failed", attempt=attempt, exit_code=exit_code, failed_rank=first["rank"], reason=line, failures=list(failures)
    )
    print(f"{run_dir}: {line}; its log: {log_path(run_dir, _number(first, 'rank'))}", file=sys.stderr)
    return exit_code


def _number(failure: Mapping[str, object], key: str) -> int:
    return int(str(failure[key]))


def _line(failure: Mapping[str, object]) -> str:
    """`rank 1 (process 123) was killed by SIGKILL`, or what the rank itself said."""
    code, who = _number(failure, "exit_code"), f"rank {failure['rank']} (process {failure['pid']})"
    if code == -signal.SIGTERM:
        return f"{who} was ended by SIGTERM, as another rank had failed"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    said = str(failure["message"]).removeprefix(f"rank {failure['rank']} failed: ")
    return f"{who} failed with exit code {code}: {said}"


@contextmanager
def _handlers(forward: Callable[[int], None], resize: Callable[[], None]) -> Iterator[None]:
    """Pass signals on while a run goes; only the main thread may (a sweep's jobs in threads have no handlers)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        forward(number)

    def handle_resize(_: int, __: FrameType | None) -> None:
        resize()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, handle_resize)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
