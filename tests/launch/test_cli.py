"""The command line as a user sees it: help, refusals, dry runs."""

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from launch.cli import COMMANDS, main
from launch.help import documented_keys, group_options, pretrain_help
from train.config.compose import compose
from train.config.convert import known_keys, plain

Cli = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pretrain", "experiment=demo", "+model.layer=3"], "+model.layer=3: there is no such key; did you mean model.layers?"),
        (
            ["pretrain", "experiment=demo", "parallel.processes=3"],
            "parallel.ep=2: must divide the 3 processes of a pipeline stage (tp 1 x dp 3); choose a divisor",
        ),
        (
            ["pretrain", "experiment=demo", "run.name=../x"],
            "run.name=../x: a name starts with a letter or digit and holds only letters, digits and . _ - + = , (up to 128); "
            "choose another name; run.dir takes a whole path",
        ),
    ],
)
def test_bad_input_is_one_line_within_seconds(cli: Cli, tmp_path: Path, arguments: list[str], line: str) -> None:
    started = time.monotonic()
    done = cli(arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")
    assert time.monotonic() - started < 20.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pretrian"], "command=pretrian: there is no such command; did you mean pretrain?"),
        (["experiment=demo"], "command=experiment=demo: there is no such command; write `leantron pretrain experiment=demo`"),
        (["pretrain", "--dryrun"], "--dryrun=: there is no such option; `leantron pretrain --help` lists them"),
        (
            ["pretrain", "parallel.hosts=2"],
            "parallel.hosts=2: the launcher starts the processes of one host; "
            "start `torchrun --nnodes=... --nproc-per-node=... -m train.pretrain <overrides>` on each host",
        ),
        (["pretrain", "resume=nowhere"], "resume=nowhere: there is no run: no config.yaml in it; give the directory of a run"),
        (["report", "nowhere"], "run=nowhere: there is no run: no config.yaml in it; give the directory of a run"),
        (["report", "runs/x", "--all"], "--all=: `leantron report` takes a run and no more; leave it out"),
        (["report"], "run=: `leantron report` needs a run; give its directory: leantron report runs/<name>"),
    ],
)
def test_other_bad_input(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")


def test_run_directories_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    for overrides, message in (
        (["run.dir=full"], "run.dir=full: the folder is not empty and holds no run; choose another run.name or run.dir"),
        (["run.dir=full/file/x"], "run.dir=full/file/x: full/file is not a folder; choose another run.dir"),
    ):
        assert main(["pretrain", "--dry-run", *overrides]) == 2
        assert capsys.readouterr().err == message + "\n"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["pretrain", "--dry-run", "run.dir=other/x"]) == 2
    assert capsys.readouterr().err == "run.dir=other/x: . is not writable; choose another run.dir, or make it writable\n"


def test_a_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "experiment=demo", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "dp 2, ep 2" in out and "Mixture of Experts" in out
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key_with_type_default_and_documentation() -> None:
    text = pretrain_help()
    documented = {key: documentation for key, _, _, documentation in documented_keys()}
    assert list(documented) == list(known_keys())
    for key, documentation in documented.items():
        assert f"\n  {key}  (" in text, key
        assert len(documentation) > 10, f"{key} has no documentation"
    for group, options in group_options().items():
        assert f"{group}=" in text and " | ".join(options) in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "leantron <command>" in out and all(f"\n  {name}" in out for name in COMMANDS)
    assert main([]) == 2
    capsys.readouterr()
    assert main(["pretrain", "--help"]) == 0
    assert "train.seq_len  (integer, 512)" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("leantron ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as left:  # argparse leaves so
        code = left.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: leantron {name}")


def test_config_prints_the_composition(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "experiment=demo", "train.steps=5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == plain(compose(["experiment=demo", "train.steps=5"]))
