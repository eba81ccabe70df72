"""`metrics.jsonl`: exact floats, NaN and infinity, each line on disk at once, a torn last line, and what the readers make of it."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train.tracking.jsonl import JsonlTracker, plain, restore
from train.tracking.readers import read_metrics


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.floats(width=64), values=st.lists(st.floats(width=64)))
def test_floats_come_back_to_the_bit(tmp_path: Path, value: float, values: list[float]) -> None:
    line = {"step": 1, "loss": value, "expert_load": {"3": values}}
    text = json.dumps(plain(line), allow_nan=False)
    assert same(restore(json.loads(text)), line)


def test_numbers_of_numpy_and_torch_are_taken() -> None:
    torch = pytest.importorskip("torch")
    got = plain(
        {
            "a": np.float32(0.1),
            "b": np.int64(3),
            "c": np.array([1.5, np.nan]),
            "d": torch.tensor(2.5),
            "e": torch.tensor([1, 2]),
            "f": True,
            "g": None,
        }
    )
    assert got == {"a": float(np.float32(0.1)), "b": 3, "c": [1.5, "NaN"], "d": 2.5, "e": [1, 2], "f": True, "g": None}
    with pytest.raises(TypeError, match="a metric must be a number"):
        plain({"a": object()})


def test_every_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    """A process that kills itself right after logging loses nothing."""
    path = tmp_path / "metrics.jsonl"
    body = (
        "import os, signal, sys; from pathlib import Path; from train.tracking.jsonl import JsonlTracker\n"
        "tracker = JsonlTracker(Path(sys.argv[1]))\n"
        "for step in (1, 2, 3): tracker.log({'step': step, 'loss': 1.0 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", body, str(path)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [line["loss"] for line in read_metrics(path).training] == [1.0, 0.5, 1 / 3]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 3.0}', '{"step": 3, "loss": 3.0', "\x00\x00\x00"])
def test_a_torn_last_line_costs_at_most_itself(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n' + torn)
    tracker = JsonlTracker(path)
    tracker.log({"step": 4, "loss": 4.0})
    tracker.log({"step": 5, "loss": 5.0})
    tracker.finish("completed")
    got = read_metrics(path)
    whole = torn.endswith("}")
    assert [line["step"] for line in got.training] == ([1, 2, 3, 4, 5] if whole else [1, 2, 4, 5])
    assert got.unreadable == (0 if whole else 1)


def test_a_write_that_stops_halfway_costs_only_its_line(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"step": 1, "loss": 1.0})
    real = tracker._file

    class FullDisk:
        def write(self, data: memoryview) -> int:
            real.write(data[:7])
            raise OSError(28, "No space left on device")

    tracker._file = FullDisk()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        tracker.log({"step": 2, "loss": 2.0})
    tracker._file = real
    tracker.log({"step": 3, "loss": 3.0})
    got = read_metrics(tracker.path)
    assert [line["step"] for line in got.training] == [1, 3] and got.unreadable == 1


def test_readers_take_the_last_line_of_a_step_and_keep_validation_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for line in (
        {"step": 1, "loss": 5.0, "attempt": 0},
        {"step": 2, "loss": 4.0, "attempt": 0},
        {"step": 2, "val_loss": 4.5, "val_bits_per_byte": 6.0},
        {"step": 3, "loss": 3.0, "attempt": 0},
        {"bigram_bits_per_byte": 3.5},
        {"step": 2, "loss": math.nan, "attempt": 1},
        {"step": 2, "val_loss": 4.25},
        {"step": 3, "loss": 2.0, "attempt": 1},
    ):
        tracker.log(line)
    with open(path, "a") as file:
        file.write("\n[1, 2]\nnull\n")
    got = read_metrics(path)
    assert [(line["step"], line["attempt"]) for line in got.training] == [(1, 0), (2, 1), (3, 1)]
    assert math.isnan(got.training[1]["loss"])
    assert got.validation == [{"step": 2, "val_loss": 4.25}]
    assert got.unreadable == 2
    assert got.last("bigram_bits_per_byte") == 3.5 and got.last("val_loss") == 4.25 and got.last("nothing") is None
    steps, losses = got.series("loss")
    assert steps == [1.0, 2.0, 3.0] and losses[0] == 5.0 and math.isnan(losses[1]) and losses[2] == 2.0


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "metrics.jsonl")
