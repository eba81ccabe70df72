"""TensorBoard event files, read back with TensorBoard's own reader."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from train.config.schema import Config
from train.tracking import build_trackers, read_metrics
from train.tracking.config import TrackingConfig

CONFIG = replace(Config(), tracking=TrackingConfig(kind="tensorboard"))


def test_every_number_is_a_scalar_over_its_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ModuleNotFoundError)
    tracker = build_trackers(CONFIG, tmp_path, attempt=2)
    tracker.log({"step": 5, "loss": 2.5, "lr": 1e-3, "expert_load": {"3": [0.25, 0.75]}, "time": 100.0})
    tracker.log({"step": 6, "loss": math.nan, "time": 101.0})
    tracker.log({"step": 6, "val_loss": 2.25, "time": 102.0})
    tracker.finish("completed")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {"loss", "lr", "expert_load/3_min", "expert_load/3_max", "val_loss", "attempt"}
    assert set(events.Tags()["scalars"]) == names
    first, second = events.Scalars("loss")
    assert (first.step, first.value, first.wall_time, second.step) == (5, 2.5, 100.0, 6) and math.isnan(second.value)
    assert [(event.step, event.value) for event in events.Scalars("expert_load/3_max")] == [(5, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("val_loss")] == [(6, 2.25)]
    assert tracker.failures == {}


def test_lines_are_on_the_disk_before_the_end(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ModuleNotFoundError)
    tracker = build_trackers(CONFIG, tmp_path, attempt=1)
    tracker.log({"step": 1, "loss": 4.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [4.0]
    tracker.finish("failed")


def test_without_the_package_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("train.tracking.tensorboard_tracker.find_spec", lambda _: None)
    tracker = build_trackers(CONFIG, tmp_path, attempt=1)
    tracker.log({"step": 1, "loss": 4.0})
    line = "tracking: tracking.kind=tensorboard needs the package tensorboard: pip install tensorboard; "
    assert capsys.readouterr().err == f"{line}the run goes on without tensorboard, metrics.jsonl has every figure\n"
    assert read_metrics(tmp_path / "metrics.jsonl").training[0]["tracker_failures"] == 1
