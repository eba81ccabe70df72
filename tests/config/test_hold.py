"""A run belongs to one process at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from train.config.errors import ConfigError
from train.config.place import hold

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
