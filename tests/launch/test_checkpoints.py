"""`leantron checkpoints <run>`: what is there, what is wrong with it, what stays."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launch.checkpoints import checkpoint_rows
from train.checkpoint.directory import MANIFEST
from train.config.compose import dump_config
from train.config.resume import put
from train.config.schema import Config

Cli = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (100, 150, 200, 250):
        path = run / "checkpoints" / f"step_{step:08d}"
        path.mkdir(parents=True)
        (path / "data").write_bytes(b"x" * 2**20)
        (path / MANIFEST).write_text(json.dumps({"format": 1, "progress": {}, "files": {"data": 2**20}}))
    (run / "checkpoints/step_00000200/data").write_bytes(b"x" * 100)
    (run / "checkpoints/step_00000250" / MANIFEST).unlink()
    dump_config(put(put(Config(), "checkpoint.keep", 1), "checkpoint.keep_every", 100), run / "config.yaml")
    return run


def test_rows(run: Path) -> None:
    rows = checkpoint_rows(run)
    assert [(step, state, kept) for step, _, state, kept in rows] == [
        (100, "complete", "for good"),
        (150, "complete", "newest 1"),
        (200, f"data is 100 bytes instead of {2**20}", "not counted"),
        (250, "leantron.json is missing, so it was never completed", "not counted"),
    ]
    assert rows[0][1] > 2**20 > rows[2][1]


def test_the_command(cli: Cli, run: Path) -> None:
    done = cli(["checkpoints", str(run)])
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and lines[0].split() == ["step", "size", "state", "kept"]
    assert lines[1].split() == ["100", "1.0", "MiB", "complete", "for", "good"]
    for step in (100, 150):
        (run / f"checkpoints/step_{step:08d}" / MANIFEST).unlink()
    assert cli(["checkpoints", str(run)]).returncode == 1
    missing = cli(["checkpoints", "nowhere"])
    assert missing.returncode == 2
    assert missing.stderr == "run=nowhere: there is no run: no config.yaml in it; give the directory of a run\n"


def test_of_several_sites_each_is_listed(cli: Cli, run: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    (whole / "sites/1").mkdir(parents=True)
    run.rename(whole / "sites/0")
    for place in (whole, whole / "sites/1"):
        dump_config(Config(), place / "config.yaml")
    done = cli(["checkpoints", str(whole)])
    assert done.returncode == 1, "site 1 has nothing to go on from"
    lines = done.stdout.splitlines()
    assert (lines[0], len(lines)) == ("site 0", 8) and lines[1].split() == ["step", "size", "state", "kept"]
    assert lines[6:] == ["site 1", f"{whole}/sites/1: no checkpoints"]
    assert cli(["checkpoints", str(whole / "sites/0")]).returncode == 0
