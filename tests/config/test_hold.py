"""A run belongs to one process at a time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.config.place import current_status, hold, read_status, write_status

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


def test_running_is_died_once_nobody_holds_the_run(tmp_path: Path) -> None:
    write_status(tmp_path, state="running", attempt=1)
    assert current_status(tmp_path)["state"] == "died"
    hold(tmp_path)
    assert current_status(tmp_path)["state"] == "running"


def test_of_a_run_on_another_host_its_own_word_is_all_that_is_known(tmp_path: Path) -> None:
    write_status(tmp_path, state="running", attempt=1)
    said = (tmp_path / "status.json").read_text(encoding="utf-8")
    (tmp_path / "status.json").write_text(said.replace(read_status(tmp_path)["host"], "elsewhere"), encoding="utf-8")
    assert current_status(tmp_path)["state"] == "running"


def test_a_child_that_has_the_descriptors_holds_the_run_after_its_parent(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, pathlib; from train.config.place import descriptors, hold; place = pathlib.Path(sys.argv[1]); hold(place);"
        "subprocess.Popen([sys.executable, '-c', 'input()'], pass_fds=descriptors(place))"
    )
    with subprocess.Popen([sys.executable, "-c", parent, str(tmp_path)], stdin=subprocess.PIPE) as process:
        assert process.wait() == 0
        with pytest.raises(ConfigError, match="still going on"):
            hold(tmp_path)
        assert process.stdin is not None
        process.stdin.close()
        end = time.monotonic() + 60.0
        while True:
            try:
                return hold(tmp_path)
            except ConfigError:
                assert time.monotonic() < end
                time.sleep(0.05)
