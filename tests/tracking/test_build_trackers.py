"""All trackers as one: each gets every line; a failing one is told once, counted, and does not stop the others."""

import io
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.config.schema import Config
from train.tracking import NullTracker, Tracker, build_trackers, read_metrics
from train.tracking.build import CompositeTracker
from train.tracking.config import TrackingConfig


class Memory:
    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.status: str | None = None

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)

    def finish(self, status: str) -> None:
        self.status = status


class Failing(Memory):
    def log(self, metrics: Mapping[str, Any]) -> None:
        raise ConnectionError("the server\nis away")

    def finish(self, status: str) -> None:
        raise RuntimeError("still away")


def test_every_tracker_gets_every_line_with_attempt_and_time() -> None:
    one, two = Memory(), Memory()
    tracker: Tracker = CompositeTracker([("one", one), ("two", two)], attempt=3)
    given = {"step": 1, "loss": 2.0}
    tracker.log(given)
    tracker.log({"step": 2, "loss": 1.0, "attempt": 9, "time": 5.0})
    tracker.finish("completed")
    assert one.lines == two.lines and one.status == two.status == "completed"
    assert one.lines[0]["attempt"] == 3 and one.lines[0]["time"] > 1e9
    assert one.lines[1] == {"step": 2, "loss": 1.0, "attempt": 9, "time": 5.0}
    assert given == {"step": 1, "loss": 2.0}, "the caller's line is not changed"


def test_a_failing_tracker_is_told_once_counted_and_does_not_stop_the_others() -> None:
    stream, memory = io.StringIO(), Memory()
    tracker = CompositeTracker([("failing", Failing()), ("memory", memory)], attempt=0, stream=stream)
    for step in (1, 2, 3):
        tracker.log({"step": step})
    assert stream.getvalue().count("\n") == 1
    assert "failing failed at a line of step 1 (ConnectionError: the server is away)" in stream.getvalue()
    assert [line.get("tracker_failures") for line in memory.lines] == [None, 1, 2]
    tracker.finish("completed")
    assert memory.status == "completed"
    assert tracker.failures == {"failing": 4}
    assert stream.getvalue().splitlines()[-1] == "tracking: failing failed 4 times in this run"


def test_metrics_file_and_console_without_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = build_trackers(replace(Config(), tracking=TrackingConfig(kind="none")), tmp_path, attempt=2)
    tracker.log({"step": 1, "loss": 2.0})
    tracker.finish("completed")
    assert read_metrics(tmp_path / "metrics.jsonl").training[0]["attempt"] == 2
    assert "step 1/100 | loss 2.0000" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        build_trackers(replace(Config(), tracking=TrackingConfig(kind="none")), tmp_path / "nowhere", attempt=0)


def test_the_null_tracker_takes_everything() -> None:
    tracker: Tracker = NullTracker()
    tracker.log({"step": 1})
    tracker.finish("failed")


def test_importing_the_package_and_its_configuration_loads_no_torch_rich_or_wandb() -> None:
    body = "import sys, train.tracking, train.tracking.config; print([m for m in ('torch', 'rich', 'wandb') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True).stdout.strip() == "[]"
