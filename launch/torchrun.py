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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from launch.output import Terminal
from launch.packages import ROOT
from train.config.place import CONFIG_FILE, read_status, write_status
from train.worker import log_path, pace_path

WORKER = ("-m", "train.pretrain")
SAVE_SECONDS = 120.0
"""How long the workers may take at least to finish their step, save and leave after a signal, before they are killed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_TO_PREEMPT = (signal.SIGTERM, signal.SIGUSR1)


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

    def __init__(self, process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
        self.process = process
        self._run_dir = run_dir
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
        """Wait for torchrun; after a forwarded signal as long as the run's saves and steps have shown to take."""
        while True:
            try:
                return self.process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if self._asked_at is not None and time.monotonic() - self._asked_at > save_limit(self._run_dir):
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


def save_limit(run_dir: Path) -> float:
    """Seconds that workers may take to save and leave: three times what the run's last save, step and validation took together."""
    try:
        pace = json.loads(pace_path(run_dir).read_text(encoding="utf-8"))
        return max(SAVE_SECONDS, 3.0 * sum(float(seconds) for seconds in pace.values()))
    except (OSError, ValueError, AttributeError, TypeError):
        return SAVE_SECONDS


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def start(run_dir: Path, attempt: int, processes: int, worker: Sequence[str] = WORKER, max_restarts: int = 0) -> int:
    """Run the claimed run in `run_dir` to its end. Returns its exit code: 0, 1, or 128 + the signal that stopped it.

    `worker`: what torchrun starts on each process; it gets `--config <run>/config.yaml`. After a failure that another start may
    mend, all processes are started again, at most `max_restarts` times; the workers go on from the newest complete checkpoint.
    """
    for restart in range(max_restarts + 1):
        ended = _run_once(run_dir, processes, worker)
        code = _conclude(run_dir, attempt, ended)
        if code == 0 or ended.received is not None or restart == max_restarts or any(failure["final"] for failure in ended.failures):
            break
        attempt += 1
        print(f"{run_dir}: restart {restart + 1} of {max_restarts}, attempt {attempt}", file=sys.stderr, flush=True)
        write_status(run_dir, state="running", attempt=attempt)
    return code


@dataclass(frozen=True)
class Ended:
    """How torchrun ended: its exit code, the signal that was passed on to it, the ranks that failed, the first cause first."""

    code: int
    received: int | None
    failures: Sequence[Mapping[str, object]]


def _run_once(run_dir: Path, processes: int, worker: Sequence[str]) -> Ended:
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
    child = Child(process, run_dir)
    with _handlers(child.forward, terminal.resize):
        code = child.wait()
    terminal.close()
    failures = json.loads(report.read_text(encoding="utf-8"))["failures"] if report.is_file() else []
    report.unlink(missing_ok=True)
    return Ended(code, child.received, failures)


def _conclude(run_dir: Path, attempt: int, ended: Ended) -> int:
    """Write the status, say which rank failed and where its log is, and return the exit code."""
    code, failures = ended.code, ended.failures
    status = read_status(run_dir)
    if status.get("state") == "preempted" and status.get("attempt") == attempt:  # rank 0 wrote it once all had saved
        return _preempted(run_dir, attempt, ended.received, f"saved at step {status.get('step')}", step=status.get("step"))
    if ended.received is not None and code != 0:
        if ended.received in _TO_PREEMPT and all(_number(failure, "exit_code") == -signal.SIGTERM for failure in failures):
            return _preempted(run_dir, attempt, ended.received, "there was nothing to save yet")
        name, exit_code = signal.Signals(ended.received).name, 128 + ended.received
        write_status(run_dir, state="stopped", attempt=attempt, exit_code=exit_code, signal=name)
        print(f"{run_dir}: stopped by {name}; go on with `leantron pretrain resume={run_dir}`", file=sys.stderr)
        return exit_code
    if code == 0:
        write_status(run_dir, state="completed", attempt=attempt, exit_code=0)
        return 0
    return _failed(run_dir, attempt, code if code > 0 else 128 - code, failures)


def _preempted(run_dir: Path, attempt: int, received: int | None, how: str, **details: object) -> int:
    name = signal.Signals(received).name if received is not None else None
    write_status(run_dir, state="preempted", attempt=attempt, exit_code=0, signal=name, **details)
    by = f" by {name}" if name is not None else ""
    print(f"{run_dir}: preempted{by}, {how}; go on with `leantron pretrain resume={run_dir}`", file=sys.stderr)
    return 0


def _failed(run_dir: Path, attempt: int, exit_code: int, failures: Sequence[Mapping[str, object]]) -> int:
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
