"""The launcher as a user has it: restarts after a failure, signals, kills, a slow tracker; real processes, real torchrun."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from real_runs import figures, state, steps_logged, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Launch = Callable[..., "subprocess.Popen[str]"]


def ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The worker processes by rank."""
    below = [child for child in psutil.Process(process.pid).children(recursive=True) if "train.pretrain" in child.cmdline()]
    found = {child.environ()["RANK"]: child for child in below if "RANK" in child.environ()}
    return [found[rank] for rank in sorted(found)]


def attempt(run: Path) -> int:
    return int(json.loads((run / "status.json").read_text())["attempt"])


def test_a_failed_job_starts_again_by_itself_and_loses_nothing(launch: Launch, tiny: list[str], tmp_path: Path) -> None:
    settings = [*tiny, "parallel.processes=2", "optim=constant", "checkpoint.every=5", "train.max_restarts=2", "train.steps=1500"]
    process = launch(*settings, "run.name=r")
    run = tmp_path / "runs/r"
    for number, victim in ((1, 1), (2, 0)):
        until(lambda number=number: (run / "checkpoints/step_00000010").exists() and attempt(run) == number and steps_logged(run) > 0)
        until(lambda: any(f'"attempt": {attempt(run)}' in line for line in (run / "metrics.jsonl").read_text().splitlines()[-3:]))
        ranks_of(process)[victim].kill()
        until(lambda number=number: attempt(run) == number + 1)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert f"{Path('runs/r')}: restart 1 of 2, attempt 2" in err and f"{Path('runs/r')}: restart 2 of 2, attempt 3" in err
    assert state(run) == "completed" and attempt(run) == 3
    assert sorted(figures(run)) == list(range(1, 1501))


def test_sigterm_to_the_launcher_saves_and_sigkill_leaves_no_process(launch: Launch, tiny: list[str], tmp_path: Path) -> None:
    process = launch(*tiny, "parallel.processes=2", "run.name=p", "train.steps=1000000")
    run = tmp_path / "runs/p"
    until(lambda: steps_logged(run) > 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    last = steps_logged(run)
    assert process.returncode == 0, err
    assert err.splitlines()[-1] == (f"runs/p: preempted by SIGTERM, saved at step {last}; go on with `leantron pretrain resume=runs/p`")
    assert state(run) == "preempted" and (run / f"checkpoints/step_{last:08d}/leantron.json").exists()
    process = launch("resume=runs/p")
    until(lambda: steps_logged(run) > last)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE], 60)


def test_a_stopped_rank_ends_the_job_and_is_named(launch: Launch, tiny: list[str], tmp_path: Path) -> None:
    process = launch(*tiny, "parallel.processes=2", "run.name=h", "train.steps=1000000", "train.hang_timeout=4")
    run = tmp_path / "runs/h"
    until(lambda: steps_logged(run) > 2)
    stopped = ranks_of(process)[1]
    stopped.send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0 and not stopped.is_running()
    assert f"rank 1 (process {stopped.pid} on " in err.splitlines()[-1] and "has not been heard of" in err.splitlines()[-1]
    assert "has not been heard of" in json.loads((run / "status.json").read_text())["reason"]
