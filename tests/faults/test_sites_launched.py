"""A run of two sites as a user has it: one site killed, both asked to stop, both going on; real processes, a real place to meet."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from real_runs import figures, steps_logged, until

from train.config.place import read_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXPERTS = ("moe=fomoe", "moe.experts=4", "moe.ffn_width=32", "moe.layers=[1]")
SITES = ("federation.sites=2", "federation.replication=1", "federation.sync_every=4", "federation.deadline=20")


def first_rank(process: "subprocess.Popen[str]", site: int) -> psutil.Process:
    """Rank 0 of a site."""
    lines = {child: child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)}
    return next(child for child, line in lines.items() if "launch.agent" not in line and f"sites/{site}/config.yaml" in " ".join(line))


def test_a_killed_site_is_back_and_both_stop_and_go_on(
    launch: Callable[..., "subprocess.Popen[str]"], tiny: list[str], tmp_path: Path
) -> None:
    settings = ("parallel.processes=2", "checkpoint.every=4", "train.steps=1000000", "optim=constant", "train.max_restarts=1")
    process = launch(*tiny, *EXPERTS, *SITES, *settings, "run.name=s")
    run = tmp_path / "runs/s"
    places = [run / "sites/0", run / "sites/1"]
    until(lambda: steps_logged(places[1]) > 8)
    first_rank(process, 1).kill()
    until(lambda: '"attempt": 2' in (places[1] / "metrics.jsonl").read_text())
    assert read_status(run)["state"] == "running"
    assert [read_status(place)["attempt"] for place in places] == [1, 2]
    reached = steps_logged(places[0])
    until(lambda: min(map(steps_logged, places)) > reached + 8)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert f"{Path('runs/s/sites/1')}: restart 1 of 1, attempt 2" in err
    status = read_status(run)
    assert (status["state"], [part["state"] for part in status["sites"].values()]) == ("preempted", ["preempted"] * 2)
    stopped = [part["step"] for part in status["sites"].values()]

    last = max(stopped) + 9
    process = launch("resume=runs/s", f"train.steps={last}")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert read_status(run)["state"] == "completed"
    for place in places:
        assert max(figures(place)) == last
        assert json.loads((place / f"checkpoints/step_{last:08d}/leantron.json").read_text())["progress"]["federation"]["round"] > 2
