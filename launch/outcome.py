"""How a torchrun world ended, put into words: its `status.json`, one line on stderr that names the rank and its log, its exit code."""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.config.place import read_status, write_status
from train.worker import log_path

_TO_PREEMPT = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Ended:
    """How torchrun ended: its exit code, the signal that was passed on to it, the ranks that failed, the first cause first."""

    code: int
    received: int | None
    failures: Sequence[Mapping[str, object]]


def hopeless(ended: Ended) -> bool:
    """Whether a rank says that another start would only fail again."""
    return any(failure["final"] for failure in ended.failures)


def conclude(run_dir: Path, attempt: int, ended: Ended, go_on: str | None) -> int:
    """Write the status, say which rank failed and where its log is, and return the exit code.

    `go_on`: the overrides with which the run goes on, for the line; None leaves them out.
    """
    code, failures = ended.code, ended.failures
    status = read_status(run_dir)
    if status.get("state") == "preempted" and status.get("attempt") == attempt:  # rank 0 wrote it once all had saved
        return _preempted(run_dir, attempt, ended.received, f"saved at step {status.get('step')}", go_on, step=status.get("step"))
    if ended.received is not None and code != 0:
        if ended.received in _TO_PREEMPT and all(_number(failure, "exit_code") == -signal.SIGTERM for failure in failures):
            return _preempted(run_dir, attempt, ended.received, "there was nothing to save yet", go_on)
        name, exit_code = signal.Signals(ended.received).name, 128 + ended.received
        write_status(run_dir, state="stopped", attempt=attempt, exit_code=exit_code, signal=name)
        _say(f"{run_dir}: stopped by {name}{_hint(go_on)}")
        return exit_code
    if code == 0:
        write_status(run_dir, state="completed", attempt=attempt, exit_code=0)
        return 0
    return _failed(run_dir, attempt, code if code > 0 else 128 - code, failures)


def _hint(go_on: str | None) -> str:
    return f"; go on with `leantron pretrain {go_on}`" if go_on is not None else ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _preempted(run_dir: Path, attempt: int, received: int | None, how: str, go_on: str | None, **details: object) -> int:
    name = signal.Signals(received).name if received is not None else None
    write_status(run_dir, state="preempted", attempt=attempt, exit_code=0, signal=name, **details)
    by = f" by {name}" if name is not None else ""
    _say(f"{run_dir}: preempted{by}, {how}{_hint(go_on)}")
    return 0


def _failed(run_dir: Path, attempt: int, exit_code: int, failures: Sequence[Mapping[str, object]]) -> int:
    if not failures:
        write_status(run_dir, state="failed", attempt=attempt, exit_code=exit_code, failed_rank=None, reason="torchrun failed")
        _say(f"{run_dir}: torchrun itself failed with exit code {exit_code}; see {log_path(run_dir, 0)}")
        return exit_code
    for failure in (failure for failure in failures if _number(failure, "exit_code") < 0):  # it could not write its own last line
        with log_path(run_dir, _number(failure, "rank")).open("a", encoding="utf-8") as stream:
            stream.write(_line(failure) + "\n")
    first, line = failures[0], _line(failures[0])
    write_status(
        run_dir, state="failed", attempt=attempt, exit_code=exit_code, failed_rank=first["rank"], reason=line, failures=list(failures)
    )
    _say(f"{run_dir}: {line}; its log: {log_path(run_dir, _number(first, 'rank'))}")
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
