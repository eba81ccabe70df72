"""A run belongs to one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.config.place import hold, read_status

HOLDER = "import sys, pathlib; from train.config.place import hold; hold(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"


def test_a_run_that_goes_on_elsewhere_is_refused_until_its_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=f"resume={tmp_path}: the run is still going on in another process; wait for it, or stop it first"
        ):
            hold(tmp_path)
        other.kill()
        other.wait()
    hold(tmp_path)
    hold(tmp_path)  # the same process may take it again


def test_a_status_that_is_no_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "runn', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^status=.*/status\.json: the file is not JSON \(.*\); delete it: .*"):
        read_status(tmp_path)
    (tmp_path / "status.json").unlink()
    assert read_status(tmp_path) == {}
