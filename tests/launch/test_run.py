"""The launcher around torchrun, with a worker that needs no torch: output, status, failures, signals, several at once."""

import os
import pty
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from launch.torchrun import save_limit

SMALL = ("experiment=demo", "tracking=none")
Wait = Callable[[Callable[[], bool], str], None]


def waiting(folder: Path, name: str, ranks: int = 2) -> Callable[[], bool]:
    return lambda: all((folder / "runs" / name / f"waiting_{rank}").exists() for rank in range(ranks))


def worker_pids(folder: Path, name: str, ranks: int = 2) -> list[int]:
    return [int((folder / "runs" / name / f"pid_{rank}").read_text()) for rank in range(ranks)]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_a_run_from_plan_to_status(launcher) -> None:
    done = launcher.run(*SMALL, "run.name=one")
    assert done.returncode == 0, done.stderr
    run = launcher.folder / "runs" / "one"
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["runs"]
    assert [path.name for path in run.parent.iterdir()] == ["one"]
    assert {"config.yaml", "plan.json", "status.json", "logs", "metrics.jsonl"} <= {path.name for path in run.iterdir()}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"stub rank 0 of 2, threads {threads}, tty False" in done.stdout
    assert "rank 1" not in done.stdout, "only rank 0 speaks to the terminal"
    assert "40.6% of the causal pairs" in done.stdout and "memory (model)" in done.stdout
    assert "stub rank 0" in (run / "logs" / "rank_0.log").read_text()
    assert "stub rank 1" in (run / "logs" / "rank_1.log").read_text()
    status = launcher.status("one")
    assert (status["state"], status["exit_code"], status["attempt"]) == ("completed", 0, 1)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["model"]["vocab_size"], config["run"]["name"]) == (257, "one")


def test_a_used_directory_is_refused_and_resume_is_a_second_attempt(quick) -> None:
    assert quick.run(*SMALL, "run.name=one").returncode == 0
    again = quick.run(*SMALL, "run.name=one")
    assert again.returncode == 2
    expected = "run.name=one: runs/one is used by another run; choose another run.name, or go on with it: resume=runs/one\n"
    assert again.stderr == expected
    resumed = quick.run("resume=runs/one", "train.steps=400")
    assert resumed.returncode == 0, resumed.stderr
    assert quick.status("one")["attempt"] == 2
    assert yaml.safe_load((quick.folder / "runs/one/config.yaml").read_text())["train"]["steps"] == 400
    assert (quick.folder / "runs/one/config_1.yaml").exists()


def test_a_killed_rank_ends_all_and_is_named(launcher) -> None:
    done = launcher.run(*SMALL, "run.name=k", plan={"1": "kill", "others": "wait"})
    assert done.returncode == 1
    pid = worker_pids(launcher.folder, "k")[1]
    line = f"rank 1 (process {pid}) was killed by SIGKILL"
    assert done.stderr.splitlines()[-1] == f"runs/k: {line}; its log: runs/k/logs/rank_1.log"
    assert (launcher.folder / "runs/k/logs/rank_1.log").read_text().splitlines()[-1] == line
    status = launcher.status("k")
    assert (status["state"], status["failed_rank"], status["exit_code"], status["reason"]) == ("failed", 1, 1, line)
    assert gone(worker_pids(launcher.folder, "k"))


def test_a_rank_that_raises_is_named_with_its_error(launcher) -> None:
    done = launcher.run(*SMALL, "run.name=r", plan={"0": "raise", "others": "wait"})
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("runs/r: rank 0 (process ")
    assert last.endswith("failed with exit code 1: RuntimeError: the stub was told to fail; its log: runs/r/logs/rank_0.log")
    assert "rank 0 failed: RuntimeError: the stub was told to fail" in (launcher.folder / "runs/r/logs/rank_0.log").read_text()
    assert launcher.status("r")["failed_rank"] == 0


@pytest.mark.parametrize(
    ("number", "plan", "code", "state", "how"),
    [
        (signal.SIGTERM, "save", 0, "preempted", "preempted by SIGTERM, saved at step 7"),
        (signal.SIGUSR1, "save", 0, "preempted", "preempted by SIGUSR1, saved at step 7"),
        (signal.SIGINT, "save", 0, "preempted", "preempted by SIGINT, saved at step 7"),
        (signal.SIGTERM, "wait", 0, "preempted", "preempted by SIGTERM, there was nothing to save yet"),
        (signal.SIGINT, "wait", 130, "stopped", "stopped by SIGINT"),
    ],
)
def test_a_signal_is_passed_on(launcher, wait_for: Wait, number: int, plan: str, code: int, state: str, how: str) -> None:
    """Workers that save and leave, or have nothing to save, make it 0; Ctrl-C on workers that just die 128 + the signal."""
    process = launcher.start(*SMALL, "run.name=s", plan={"0": plan, "1": plan})
    wait_for(waiting(launcher.folder, "s"), "the workers")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.splitlines()[-1] == f"runs/s: {how}; go on with `leantron pretrain resume=runs/s`"
    status = launcher.status("s")
    assert (status["state"], status["signal"], status["exit_code"]) == (state, signal.Signals(number).name, code)
    assert gone(worker_pids(launcher.folder, "s"))


@pytest.mark.parametrize(
    ("pace", "limit"), [(None, 120.0), ("{", 120.0), ("[]", 120.0), ('{"save_seconds": 50, "step_seconds": 10}', 180.0)]
)
def test_the_time_to_save_follows_the_measured_one(tmp_path: Path, pace: str | None, limit: float) -> None:
    (tmp_path / "logs").mkdir()
    if pace is not None:
        (tmp_path / "logs" / "pace.json").write_text(pace)
    assert save_limit(tmp_path) == limit


def test_a_killed_launcher_leaves_no_process(launcher, wait_for: Wait) -> None:
    process = launcher.start(*SMALL, "run.name=l", plan={"0": "wait", "1": "wait"})
    wait_for(waiting(launcher.folder, "l"), "the workers")
    below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(below) >= 3
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: gone(below), "the children to end")


def test_a_killed_torchrun_leaves_no_worker(launcher, wait_for: Wait) -> None:
    process = launcher.start(*SMALL, "run.name=t", plan={"0": "wait", "1": "wait"})
    wait_for(waiting(launcher.folder, "t"), "the workers")
    (agent,) = psutil.Process(process.pid).children()
    agent.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "torchrun itself failed" in err.splitlines()[-1]
    wait_for(lambda: gone(worker_pids(launcher.folder, "t")), "the workers to end")
    assert launcher.status("t")["state"] == "failed"


def test_two_launches_at_once(launcher) -> None:
    runs = [launcher.start(*SMALL) for _ in range(2)]
    for process in runs:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "stub rank 0 of 2" in out
    assert len(list((launcher.folder / "runs").glob("run-*/status.json"))) == 2


def test_a_terminal_reaches_rank_zero_as_a_terminal(launcher) -> None:
    own, theirs = pty.openpty()
    process = launcher.start(*SMALL, "run.name=tty", stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(own, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    _, err = process.communicate(timeout=60)
    os.close(own)
    assert process.returncode == 0, err
    assert b"tty True\r\n" in shown
    assert "tty True\n" in (launcher.folder / "runs/tty/logs/rank_0.log").read_text()
