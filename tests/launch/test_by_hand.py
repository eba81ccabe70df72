"""`torchrun -m train.pretrain` by hand: rank 0 composes and publishes, one run directory, one error on every rank."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.config.publish import resolve

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("hand_worker.py")
Torchrun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    """`torchrun(processes, *overrides, options=(), **environment)` in an empty folder."""

    def run(processes: int, *overrides: str, options: tuple[str, ...] = (), **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
        child = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run([*command, str(WORKER), *overrides], cwd=tmp_path, env=child, capture_output=True, text=True, timeout=250)

    return run


def test_four_ranks_a_second_apart_make_one_directory(torchrun: Torchrun, tmp_path: Path) -> None:
    done = torchrun(4, "train.steps=7", STAGGER="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: runs/{run.name} attempt 1 steps 7 resumed False" for rank in range(4)]
    assert {path.name for path in run.iterdir()} == {".lock", "config.yaml", "plan.json", "status.json"}


def test_an_error_is_the_same_line_on_every_rank(torchrun: Torchrun, tmp_path: Path) -> None:
    done = torchrun(2, "train.global_batch=7")
    line = "train.global_batch=7: must be a multiple of train.micro_batch=1 x 2 data-parallel ranks; use 8"
    assert done.returncode != 0
    assert done.stderr.splitlines().count(line) == 2
    assert "exitcode: 2" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_restart_by_torchrun_goes_on_in_the_same_directory(torchrun: Torchrun, tmp_path: Path, processes: int) -> None:
    done = torchrun(processes, options=("--max-restarts=1",), FAIL_FIRST="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    # Of the first attempt torchrun may end a rank before it speaks.
    lines = done.stdout.splitlines()
    assert all(f" runs/{run.name} attempt " in line for line in lines) and any(" attempt 1 " in line for line in lines), done.stdout
    assert sorted(line for line in lines if " attempt 1 " not in line) == [
        f"rank {rank}: runs/{run.name} attempt 2 steps 100 resumed True" for rank in range(processes)
    ]


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKER), "train.steps=3", "run.name=alone"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.stdout == "rank -: runs/alone attempt 1 steps 3 resumed False\n", done.stderr
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert again.returncode == 2
    assert again.stderr.startswith("run.name=alone: runs/alone is used by another run; ") and again.stderr.count("\n") == 1
    read = subprocess.run(
        [sys.executable, str(WORKER), "--config", "runs/alone/config.yaml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert read.stdout == done.stdout


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_under_torchrun_is_refused_with_the_command(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([flag, "optim.lr=1e-3,3e-4"], {"RANK": "1", "WORLD_SIZE": "2"})
    assert str(caught.value) == (
        "-m=: a sweep starts torchrun itself, once for each job; run `leantron pretrain -m optim.lr=1e-3,3e-4` without torchrun"
    )


def test_config_takes_one_file() -> None:
    with pytest.raises(ConfigError, match=r"^--config=a\.yaml train\.steps=3: takes one file and no overrides; give <run>/config\.yaml$"):
        resolve(["--config", "a.yaml", "train.steps=3"], {})
