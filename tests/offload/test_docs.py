"""The page's code and commands work."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "offload.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^(leantron pretrain .*)$", PAGE, re.MULTILINE))
def test_commands_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = main(shlex.split(command, comments=True)[1:])
    told = capsys.readouterr()
    assert code == 0, told.err
    assert ("> stream" in told.out, "> cpu_step" in told.out) == ("=stream" in command, "=cpu_step" in command)


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("{'device': "), done.stderr
