"""Forked runs and their data."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import TINY, Forge, corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Starts ranks by forking; see tests/support/real_runs.py."""
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of milliseconds a step, its data included."""
    return [*TINY, f"data.paths=[{corpus(tmp_path_factory.mktemp('corpus') / 'letters')}]"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """`launch(*overrides)`: `leantron pretrain` in an empty folder."""
    started: list[subprocess.Popen[str]] = []

    def run(*overrides: str) -> "subprocess.Popen[str]":
        kept = {key: value for key, value in os.environ.items() if key not in ("LEANTRON_AGENT_PID", "RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "launch", "pretrain", *overrides]
        environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=60)
