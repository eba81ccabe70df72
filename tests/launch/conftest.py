"""Runs of the launcher with a worker that needs no torch, each in a folder of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB, SERVER, AGENT = (str(Path(__file__).with_name(f"stub_{name}.py")) for name in ("worker", "server", "agent"))
_CODE = f"""
import os, sys
from launch import cli, pretrain
from launch.sites import Programs
from launch.torchrun import AGENT
agent = ({AGENT!r},) if os.environ["STUB_AGENT"] else AGENT
pretrain.pretrain.__defaults__ = (Programs(({STUB!r},), ({SERVER!r},), agent),)
sys.exit(cli.main(["pretrain", *sys.argv[1:]]))
"""


@dataclass
class Launcher:
    """Starts `leantron pretrain` in `folder`; the stub's ranks do what `plan` says (see stub_worker.py)."""

    folder: Path
    agent: str = ""
    """Anything: torchrun's place is taken by a stub that starts within a second."""
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment of a child: our packages on the path, nothing of this process's threads."""
        kept = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "LEANTRON_AGENT_PID")}
        return {**kept, "PYTHONPATH": str(ROOT), **extra}

    def start(
        self, *overrides: str, plan: dict[str, str] | None = None, extra: dict[str, str] | None = None, **popen: Any
    ) -> "subprocess.Popen[str]":
        """Start it, output piped unless `popen` says otherwise."""
        command = [sys.executable, "-c", _CODE, *overrides]
        environment = self.environment(STUB_PLAN=json.dumps(plan or {}), STUB_AGENT=self.agent, **(extra or {}))
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | popen
        process = subprocess.Popen(command, cwd=self.folder, env=environment, **settings)
        self.started.append(process)
        return process

    def run(self, *overrides: str, plan: dict[str, str] | None = None, **extra: str) -> "subprocess.CompletedProcess[str]":
        """Run it to its end, with `extra` in its environment."""
        process = self.start(*overrides, plan=plan, extra=extra)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def status(self, name: str) -> dict[str, Any]:
        """`status.json` of the run `name`."""
        return json.loads((self.folder / "runs" / name / "status.json").read_text())

    def close(self) -> None:
        """End what a failed test left."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher in an empty folder."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher in an empty folder whose torchrun is a stub, too."""
    launcher = Launcher(tmp_path, agent="stub")
    yield launcher
    launcher.close()


@pytest.fixture
def cli(tmp_path: Path) -> Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]:
    """`cli(arguments)` runs `python -m launch <arguments>` in an empty folder."""

    def run(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "launch", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool], str], None]:
    """`wait_for(condition, what)` polls for up to 150 seconds: on a busy machine two launchers take a minute to start."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 150.0
        while not condition():
            assert time.monotonic() < deadline, f"waited 150 s for {what}"
            time.sleep(0.05)

    return wait
