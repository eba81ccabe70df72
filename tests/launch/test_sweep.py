"""Sweeps: each job its own torchrun and directory, all checked first, failures counted, no litter."""

import json
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.sweep import last_validation

SMALL = ("experiment=demo", "tracking=none", "parallel.processes=1", "parallel.ep=1")


def test_a_sweep_runs_each_job_in_its_own_directory(launcher) -> None:
    done = launcher.run("-m", *SMALL, "run.name=lr", "optim.lr=1e-3,5e-4")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in launcher.folder.iterdir()) == ["runs"]
    runs = launcher.folder / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["lr", "lr_0", "lr_1"]
    rates = [yaml.safe_load((runs / f"lr_{number}/config.yaml").read_text())["optim"]["lr"] for number in range(2)]
    assert rates == [1e-3, 5e-4]
    assert [launcher.status(f"lr_{number}")["state"] for number in range(2)] == ["completed", "completed"]
    assert [path.name for path in (runs / "lr").iterdir()] == ["multirun.yaml"]


def test_a_failing_job_is_named_and_the_others_run(launcher) -> None:
    done = launcher.run("-m", *SMALL, "run.name=f", "train.seed=1,2", plan={"0": "raise"})
    assert done.returncode == 1
    assert [launcher.status(f"f_{number}")["state"] for number in range(2)] == ["failed", "failed"]
    assert done.stderr.splitlines()[-1].startswith("sweep f: 2 of its runs failed (f_0, f_1)")


def test_all_jobs_are_checked_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "-m", *SMALL, "train.global_batch=8,16,3"]) == 2
    message = "train.global_batch=3: must be a multiple of train.micro_batch=2 x 1 data-parallel ranks; use 4\n"
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.rl=1,2", "optim.rl=1,2: there is no such key; did you mean optim.lr?"),
        ("attention=s2,s4", "attention=s4: there is no such option of attention; did you mean s2? choose one of dense, s2"),
        ("resume=runs/x", "resume=runs/x: a sweep makes new runs; resume one run without -m"),
    ],
)
def test_bad_sweeps(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "-m", *SMALL, override]) == 2
    assert capsys.readouterr().err == message + "\n"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_sweep_lists_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [*SMALL, "run.name=g", "optim.lr=1e-3,4e-4", "optim=cosine,wsd"]
    assert main(["pretrain", "-m", "--dry-run", *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [f"runs/g_{number}" for number in range(4)]
    assert lines[3].endswith("optim.lr=0.0004 optim=wsd")
    assert list(tmp_path.iterdir()) == []


def test_the_objective_is_the_last_validation_loss(tmp_path: Path) -> None:
    assert last_validation(tmp_path) is None
    lines = [{"step": 1, "loss": 3.0}, {"step": 1, "val_loss": 2.5}, {"step": 2, "val_loss": 2.25}, {"step": 3, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_validation(tmp_path) == 2.25
