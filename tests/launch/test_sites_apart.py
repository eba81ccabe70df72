"""Sites that are started one by one, as on several hosts: by a launcher each, or by hand."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main
from train.config.compose import load_config
from train.config.place import site_dirs

ROOT = Path(__file__).resolve().parents[2]
HAND, SERVER = Path(__file__).with_name("hand_worker.py"), Path(__file__).with_name("stub_server.py")
Wait = Callable[[Callable[[], bool], str], None]


@pytest.fixture
def site() -> Callable[..., list[str]]:
    """`site(k, *overrides)`: overrides of site k of two that meet at a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["experiment=demo", "tracking=none", "moe=none", "parallel.ep=1", "federation.sites=2", "run.name=x"]
    return lambda number, *more: [*common, f"federation.site={number}", f"federation.endpoint=127.0.0.1:{port}", *more]


def test_two_launchers_make_one_run_and_the_first_serves_until_the_other_has_left(quick, site, wait_for: Wait) -> None:
    (quick.folder / "heard").write_text("1")
    second = quick.start(*site(1, "parallel.processes=2"), plan={"1/0": "save"})
    first = quick.start(*site(0, "parallel.processes=1"))
    run = quick.folder / "runs/x"
    wait_for(lambda: (run / "sites/1/waiting_0").exists(), "site 1")
    wait_for(lambda: (run / "sites/0/metrics.jsonl").exists() and quick.status("x")["sites"]["0"]["state"] == "completed", "site 0")
    assert quick.status("x")["state"] == "running"
    assert first.poll() is None, "site 1 is still heard of"
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0
    assert err.splitlines()[-1] == (
        "runs/x/sites/1: preempted by SIGTERM, saved at step 7; go on with `leantron pretrain resume=runs/x federation.site=1`"
    )
    (quick.folder / "heard").write_text("0")
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert "stub rank 0 of 1" in out
    configs = [load_config(place / "config.yaml") for place in (run, *site_dirs(run))]
    assert [(config.federation.site, config.parallel.processes) for config in configs[1:]] == [(0, 1), (1, 2)]
    assert configs[0].federation.site is None
    status = quick.status("x")
    assert (status["state"], status["exit_code"]) == ("preempted", 0)
    assert {number: part["state"] for number, part in status["sites"].items()} == {"0": "completed", "1": "preempted"}
    assert json.loads((run / "sites/0/about_0").read_text())["gloo"] == "lo"
    assert "--quorum 2" in (run / "sites/0/logs/meeting.log").read_text() and not (run / "sites/1/logs/meeting.log").exists()


def test_by_hand_the_first_site_serves_too(site, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STUB_SERVER": str(SERVER), "WAIT_FOR": "runs/x/sites/1/status.json"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HAND), *site(number)],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (1, 0)
    ]  # fmt: skip
    for number, process in zip((1, 0), processes, strict=True):
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, f"rank -: runs/x/sites/{number} attempt 1 steps 300 resumed False\n"), err
    assert (tmp_path / "runs/x/sites/0/logs/meeting.log").read_text().startswith("server ")
    again = subprocess.run(
        [sys.executable, str(HAND), "federation.sites=2"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (again.returncode, again.stderr) == (
        2,
        "federation.site=null: torchrun starts the processes of one site, and federation.sites=2; add federation.site=<k> "
        "federation.endpoint=<host of site 0>:<port>, or start all sites here with `leantron pretrain`\n",
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["federation.sites=2", "federation.site=1", "federation.endpoint=127.0.0.1:9"],
            "run.name=null: sites that are started one by one belong to one run by its name; give every site the same run.name",
        ),
        (
            ["federation.sites=2", "federation.site=1", "run.name=x"],
            "federation.endpoint=null: a site that is started by itself needs to know where the sites meet, as host:port; "
            "write federation.endpoint=<host of site 0>:<free port>",
        ),
        (
            ["federation.sites=2", "parallel.processes=3"],
            "parallel.processes=3: must be a multiple of federation.sites=2: every site has as many processes; use 4",
        ),
        (
            ["federation.share_gpus=true"],
            "federation.share_gpus=true: lets several sites share a GPU, and federation.sites=1; "
            "leave it out, or set federation.sites=2 or more",
        ),
        (
            ["-m", "federation.sites=2", "federation.site=1", "federation.endpoint=127.0.0.1:9", "train.seed=1,2"],
            "federation.site=1: a sweep starts all sites of its jobs on this host; leave it out, or run the jobs one by one",
        ),
    ],
)
def test_refusals(
    overrides: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", *overrides]) == 2
    assert capsys.readouterr() == ("", line + "\n")
    assert list(tmp_path.iterdir()) == []
