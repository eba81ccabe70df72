"""What each process of a run does about itself: end with its parent, keep its output in the run's log, name itself when it fails."""

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from train.config.compose import write_atomic
from train.config.place import read_status, write_status

_PR_SET_PDEATHSIG = 1
AGENT_VARIABLE = "LEANTRON_AGENT_PID"
"""Environment variable in which the launcher's torchrun names itself to its workers."""


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends, however that ends. Linux only; elsewhere nothing.

    `parent`: process id of the parent as it should be; when it has gone already, this process ends here.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def quiet_dependencies() -> None:
    """Silence what Megatron-core and torch say about packages that we do not use (Transformer Engine, Apex) and about themselves."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def log_path(run_dir: Path, rank: int) -> Path:
    """Where the output of a rank goes."""
    return run_dir / "logs" / f"rank_{rank}.log"


def failure_path(run_dir: Path, rank: int) -> Path:
    """Where a rank says that, when and why it failed."""
    return run_dir / "logs" / f"rank_{rank}.failure.json"


def pace_path(run_dir: Path) -> Path:
    """Where rank 0 notes what a save, a step and a validation take: JSON, names to seconds."""
    return run_dir / "logs" / "pace.json"


@contextmanager
def worker(run_dir: Path, rank: int) -> Iterator[None]:
    """Run a rank's work: output of all ranks but 0 goes to `logs/rank_<n>.log`, an exception is written there with the rank's name.

    Rank 0 keeps the terminal; the launcher copies its output to `logs/rank_0.log`. Exceptions end the process with exit code 1.
    Without the launcher (torchrun by hand) the rank that fails, or rank 0 at the end, writes `status.json` itself.
    """
    agent = os.environ.get(AGENT_VARIABLE)
    die_with_parent(parent=int(agent) if agent else None)
    log = log_path(run_dir, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    failure_path(run_dir, rank).unlink(missing_ok=True)
    if rank != 0:
        _redirect(log)
    try:
        yield
        if agent is None and rank == 0 and read_status(run_dir).get("state") == "running":
            write_status(run_dir, state="completed", attempt=_attempt(run_dir), exit_code=0)
    except Exception as error:
        traceback.print_exc()
        end_failed(run_dir, rank, f"{type(error).__name__}: {' '.join(str(error).split())}", final=isinstance(error, Hopeless))


class Hopeless(RuntimeError):
    """An error that starting again would only meet again."""


def end_failed(run_dir: Path, rank: int, reason: str, *, final: bool = False, hang: bool = False) -> NoReturn:
    """End this rank with exit code 1 and leave a record of why, from any thread. `final`: a restart would not help."""
    line = f"rank {rank} failed: {reason}"
    record = {"rank": rank, "time": time.time(), "error": line, "final": final, "hang": hang}
    # A full disk must not keep the process from ending.
    with contextlib.suppress(OSError):
        write_atomic(failure_path(run_dir, rank), json.dumps(record))
        if os.environ.get(AGENT_VARIABLE) is None:
            write_status(run_dir, state="failed", attempt=_attempt(run_dir), exit_code=1, failed_rank=rank, reason=line)
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
        sys.stdout.flush()
    # Not sys.exit: interpreter shutdown would wait for collectives and threads that the other ranks will never join.
    os._exit(1)


def _attempt(run_dir: Path) -> int:
    return int(read_status(run_dir).get("attempt", 1))


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
