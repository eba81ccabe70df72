"""Runs of several sites on one host, with workers and a meeting point that need no torch: directories, signals, failures, restarts."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from train.config.compose import load_config
from train.config.place import current_status, site_dirs

HELD = "resume=runs/l: the run is still going on in another process; wait for it, or stop it first\n"
SITES = ("experiment=demo", "tracking=none", "moe=none", "parallel.ep=1", "federation.sites=2")
Wait = Callable[[Callable[[], bool], str], None]


def waiting(folder: Path, name: str) -> Callable[[], bool]:
    return lambda: all((folder / f"runs/{name}/sites/{site}/waiting_0").exists() for site in range(2))


def site_status(folder: Path, name: str, site: int) -> dict:
    return json.loads((folder / f"runs/{name}/sites/{site}/status.json").read_text())


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_two_sites_from_plan_to_status(quick) -> None:
    done = quick.run(*SITES, "run.name=two", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    run = quick.folder / "runs/two"
    assert {path.name for path in run.iterdir()} == {".lock", ".turn", "config.yaml", "plan.json", "status.json", "logs", "sites"}
    assert "2 sites on this host, 1 process each, on the CPU" in done.stdout
    assert done.stdout.count("stub rank 0 of 1") == 1, "only site 0 speaks to the terminal"
    whole, sites = load_config(run / "config.yaml"), [load_config(place / "config.yaml") for place in site_dirs(run)]
    assert (whole.federation.site, whole.federation.endpoint, whole.parallel.processes) == (None, None, 2)
    assert [(site.federation.site, site.parallel.processes) for site in sites] == [(0, 1), (1, 1)]
    about = [json.loads((place / "about_0").read_text()) for place in site_dirs(run)]
    assert about[0]["endpoint"] == about[1]["endpoint"] and about[0]["endpoint"].startswith("127.0.0.1:")
    ours = sorted(os.sched_getaffinity(0))
    assert about[0]["cores"] + about[1]["cores"] == ours if len(ours) > 1 else about[0]["cores"] == about[1]["cores"] == ours
    threads = max(1, len(ours) // 2)
    for place in site_dirs(run):
        assert f"stub rank 0 of 1, threads {threads}" in (place / "logs/rank_0.log").read_text()
    status = quick.status("two")
    assert (status["state"], status["exit_code"], status["attempt"]) == ("completed", 0, 1)
    assert {site: (part["state"], part["attempt"]) for site, part in status["sites"].items()} == {
        "0": ("completed", 1),
        "1": ("completed", 1),
    }
    assert f"at {about[0]['endpoint']} --quorum 2 --deadline 60.0" in (run / "logs/meeting.log").read_text()


def test_a_failed_site_is_named_and_the_other_goes_on(quick) -> None:
    done = quick.run(*SITES, "run.name=f", plan={"1/0": "raise"})
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    why = "failed with exit code 1: RuntimeError: the stub was told to fail"
    assert first.startswith("runs/f/sites/1: rank 0 (process ") and first.endswith(f"{why}; its log: runs/f/sites/1/logs/rank_0.log")
    assert last.startswith("runs/f: site 0 completed, site 1 failed (rank 0 (process ")
    assert last.endswith(f"{why}); go on with `leantron pretrain resume=runs/f`")
    status = quick.status("f")
    assert (status["state"], status["exit_code"], status["sites"]["0"]["state"]) == ("failed", 1, "completed")
    assert (status["sites"]["1"]["state"], status["sites"]["1"]["failed_rank"]) == ("failed", 0)


def test_a_site_starts_again_by_itself_and_all_resume(quick) -> None:
    done = quick.run(*SITES, "run.name=r", "train.max_restarts=1", plan={"0/0": "kill once"})
    assert done.returncode == 0, done.stderr
    assert "runs/r/sites/0: restart 1 of 1, attempt 2" in done.stderr
    assert [site_status(quick.folder, "r", site)["attempt"] for site in range(2)] == [2, 1]
    assert quick.status("r")["attempt"] == 1
    again = quick.run("resume=runs/r", "train.steps=400")
    assert again.returncode == 0, again.stderr
    assert [site_status(quick.folder, "r", site)["attempt"] for site in range(2)] == [3, 2]
    assert quick.status("r")["attempt"] == 2
    configs = [load_config(place / "config.yaml") for place in (quick.folder / "runs/r", *site_dirs(quick.folder / "runs/r"))]
    assert [config.train.steps for config in configs] == [400] * 3


@pytest.mark.parametrize(
    ("number", "plan", "code", "state", "line"),
    [
        (signal.SIGUSR1, "save", 0, "preempted", "runs/s: site 0 preempted (at step 7), site 1 preempted (at step 7)"),
        (signal.SIGINT, "wait", 130, "stopped", "runs/s: site 0 stopped, site 1 stopped"),
    ],
)
def test_a_signal_reaches_all_sites(quick, wait_for: Wait, number: int, plan: str, code: int, state: str, line: str) -> None:
    process = quick.start(*SITES, "run.name=s", plan={"0": plan})
    wait_for(waiting(quick.folder, "s"), "the workers")
    below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err.splitlines()[-1] == f"{line}; go on with `leantron pretrain resume=runs/s`"
    status = quick.status("s")
    assert (status["state"], status["exit_code"]) == (state, code)
    assert [part["state"] for part in status["sites"].values()] == [state] * 2
    assert len(below) >= 5 and gone(below)


def test_a_killed_launcher_leaves_no_process_and_a_run_that_is_said_to_have_died(quick, wait_for: Wait) -> None:
    process = quick.start(*SITES, "run.name=l", plan={"0": "wait"})
    wait_for(waiting(quick.folder, "l"), "the workers")
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 5  # the meeting point, two torchruns, two workers
    run, agents = quick.folder / "runs/l", [child for child in below if any("stub_agent" in word for word in child.cmdline())]
    assert len(agents) == 2
    for agent in agents:
        agent.suspend()
    process.kill()
    process.communicate(timeout=60)
    # While a site's workers may still save, the run is theirs.
    assert current_status(run)["state"] == "running"
    again = quick.run("resume=runs/l")
    assert (again.returncode, again.stderr) == (2, HELD)
    for agent in agents:
        agent.resume()
    wait_for(lambda: gone([child.pid for child in below]), "the children to end")
    status = current_status(run)
    assert (status["state"], [part["state"] for part in status["sites"].values()]) == ("died", ["died"] * 2)
    assert quick.status("l")["state"] == "running", "nobody was left to write it"


def test_a_dead_meeting_point_is_started_again_and_a_run_belongs_to_one_launcher(quick, wait_for: Wait) -> None:
    process = quick.start(*SITES, "run.name=m", plan={"0": "wait"})
    wait_for(waiting(quick.folder, "m"), "the workers")
    log = quick.folder / "runs/m/logs/meeting.log"
    # One that dies before the launcher has had an answer was never up, and is started again without a word.
    wait_for((quick.folder / "asked").exists, "the launcher to ask the meeting point")
    psutil.Process(int(log.read_text().split()[1])).kill()
    wait_for(lambda: len(log.read_text().splitlines()) == 2, "another one")
    other = quick.run("resume=runs/m")
    assert (other.returncode, other.stderr) == (2, HELD.replace("runs/l", "runs/m"))
    alone = quick.run("resume=runs/m", "federation.site=1", f"federation.endpoint={_endpoint(log)}")
    assert (alone.returncode, alone.stderr) == (2, other.stderr.replace("the run is", "site 1 is"))
    process.send_signal(signal.SIGTERM)
    assert "started again" in process.communicate(timeout=60)[1]
    assert process.returncode == 0


def _endpoint(log: Path) -> str:
    return log.read_text().split()[3]


def test_a_sweep_over_sites(quick) -> None:
    done = quick.run("-m", *SITES, "run.name=w", "train.seed=1,2", plan={"1/0": "raise"})
    assert done.returncode == 1
    assert [quick.status(f"w_{number}")["state"] for number in range(2)] == ["failed", "failed"]
    assert [site_status(quick.folder, f"w_{number}", 0)["state"] for number in range(2)] == ["completed"] * 2
    assert done.stderr.splitlines()[-1].startswith("sweep w: 2 of its runs failed (w_0, w_1)")
