"""Real runs of small models, started as a user starts them, killed, restarted and compared."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from train.data.indexed import IndexedWriter
from train.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("model.layers=2", "model.width=32", "model.heads=2", "model.ffn_width=64", "attention=dense", "moe=none"),
    *("train.precision=fp32", "train.seq_len=64", "train.micro_batch=1", "train.global_batch=4", "train.eval_steps=0", "train.timeout=60"),
    *("optim=constant", "optim.warmup_steps=0", "tracking=none", "data=custom", "data.validation=0.2"),
]
EXPERTS = ["moe=mixtral", "moe.experts=2", "moe.top_k=1", "moe.layers=[1]", "moe.ffn_width=32"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run that takes milliseconds a step, its data set included."""
    prefix = tmp_path_factory.mktemp("corpus") / "bytes"
    rng = np.random.default_rng(1)
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        for _ in range(200):
            writer.add_document(np.append(np.resize(rng.integers(97, 123, size=5), rng.integers(20, 200)), 256))
        writer.finish(f"{prefix}.idx")
    return [*SMALL, f"data.paths=[{prefix}]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*command, **environment)` in an empty folder with our packages on the path, output piped; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, **environment: str) -> "subprocess.Popen[str]":
        kept = {key: value for key, value in os.environ.items() if key not in ("LEANTRON_AGENT_PID", "RANK", "WORLD_SIZE")}
        env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def launch(start: Start, *overrides: str) -> "subprocess.Popen[str]":
    return start("-m", "launch", "pretrain", *overrides)


def finish(process: "subprocess.Popen[str]", timeout: float = 280.0) -> tuple[str, str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return out, err


def lines(run: Path) -> list[dict[str, Any]]:
    """The training lines written so far."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, whole) if "loss" in line]


def wait_for(condition: Callable[[], bool], what: str, process: "subprocess.Popen[str]", seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended before {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def rank_process(parent: int, rank: int) -> psutil.Process:
    """The process of a rank among the descendants of `parent`."""
    for child in psutil.Process(parent).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "train.pretrain" in child.cmdline():
            return child
    raise AssertionError(f"no process of rank {rank}")


def by_step(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step, the last line of a step counting."""
    metrics = read_metrics(run / "metrics.jsonl")
    return {step: (line["loss"], line["grad_norm"]) for line in metrics.training for step in [int(line["step"])]}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_is_named_and_the_run_goes_on_bit_for_bit(start: Start, small: list[str], tmp_path: Path, rank: int) -> None:
    overrides = [*small, *EXPERTS, "parallel.processes=2", "parallel.ep=2", "checkpoint.every=2", "checkpoint.keep=1000"]
    process = launch(start, *overrides, "run.name=k", "train.steps=100000")
    run = tmp_path / "runs/k"
    wait_for(lambda: len(lines(run)) >= 3 and bool(list(run.glob("checkpoints/step_*/leantron.json"))), "step 3 and a checkpoint", process)
    below = psutil.Process(process.pid).children(recursive=True)
    victim = rank_process(process.pid, rank)
    victim.kill()
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert not [child for child in below if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert time.monotonic() - killed < 60
    named = f"rank {rank} (process {victim.pid}) was killed by SIGKILL"
    assert err and named in err.splitlines()[-1], err
    assert named in (run / f"logs/rank_{rank}.log").read_text()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["failed_rank"]) == ("failed", rank)

    first = {line["step"]: (line["loss"], line["grad_norm"]) for line in lines(run)}
    complete = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*") if (path / "leantron.json").exists())
    stop = complete[-1] + 3
    finish(launch(start, f"resume={run}", f"train.steps={stop}"))
    again = [line for line in lines(run) if line["attempt"] == 2]
    assert [line["step"] for line in again] == [complete[-1] + n for n in (1, 2, 3)]
    repeated = [line for line in again if line["step"] in first]
    assert all((line["loss"], line["grad_norm"]) == first[line["step"]] for line in repeated)
    assert not list((run / "checkpoints").glob(".step_*.stale"))


@pytest.mark.slow
def test_four_steps_and_four_more_are_eight(start: Start, small: list[str], tmp_path: Path) -> None:
    overrides = [*small, *EXPERTS, "parallel.processes=2", "parallel.ep=2"]
    finish(launch(start, *overrides, "run.name=whole", "train.steps=8"))
    finish(launch(start, *overrides, "run.name=split", "train.steps=4"))
    want = by_step(tmp_path / "runs/whole")
    half = by_step(tmp_path / "runs/split")
    assert sorted(want) == list(range(1, 9)) and half == {step: want[step] for step in range(1, 5)}
    finish(launch(start, "resume=runs/split", "train.steps=6"))
    assert by_step(tmp_path / "runs/split") == {step: want[step] for step in range(1, 7)}
    # The rest on one process: the same samples and the same model, summed in another order.
    finish(launch(start, "resume=runs/split", "train.steps=8", "parallel.processes=1", "parallel.ep=1"))
    for step, figures in by_step(tmp_path / "runs/split").items():
        assert figures == pytest.approx(want[step], rel=1e-5)
    assert [line["attempt"] for line in lines(tmp_path / "runs/split")] == [1] * 4 + [2] * 2 + [3] * 2


@pytest.mark.slow
def test_two_real_launches_at_once(start: Start, small: list[str], tmp_path: Path) -> None:
    overrides = [*small, "parallel.processes=2", "train.steps=4"]
    processes = [launch(start, *overrides, f"train.seed={seed}") for seed in (1, 2)]
    for process in processes:
        finish(process)
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    losses = [[loss for loss, _ in by_step(run).values()] for run in runs]
    assert [len(part) for part in losses] == [4, 4] and losses[0] != losses[1]
    assert all((run / "checkpoints/step_00000004/leantron.json").exists() for run in runs)


@pytest.mark.slow
def test_four_real_ranks_a_second_apart_make_one_run(start: Start, small: list[str], tmp_path: Path) -> None:
    overrides = [*small, "train.steps=3", "tracking=wandb", "tracking.mode=offline"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in (2, 0, 3, 1):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        processes.append(
            start("-m", "train.pretrain", *overrides, **environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
        )
        time.sleep(1.0)
    for process in processes:
        finish(process)
    (run,) = (tmp_path / "runs").iterdir()
    assert len(list((run / "wandb").rglob("*.wandb"))) == 1
    assert [line["step"] for line in lines(run)] == [1, 2, 3]
    assert json.loads((run / "status.json").read_text())["state"] == "completed"


def test_a_real_sweep_under_torchrun_is_refused(start: Start, small: list[str], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train.pretrain"]
    _, err = (process := start(*torchrun, "-m", "optim.lr=1e-3,3e-4")).communicate(timeout=250)
    assert process.returncode != 0
    line = "-m=: a sweep starts torchrun itself, once for each job; run `leantron pretrain -m optim.lr=1e-3,3e-4` without torchrun"
    assert err.splitlines().count(line) in (1, 2)  # torchrun may end the second rank before it comes to speak
    assert not (tmp_path / "runs").exists()
