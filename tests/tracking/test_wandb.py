"""wandb for real, offline: what is written, one id over attempts, nothing secret; and a start that is slow or fails."""

import os
import pty
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train.config.schema import Config
from train.tracking import build_trackers, read_metrics
from train.tracking.config import TrackingConfig
from train.tracking.protocol import TrackerStartError, flatten
from train.tracking.wandb_tracker import WandbTracker, run_id

SECRET = "not-a-real-key-" + "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No API key, no login file and no settings of the machine's owner."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    (tmp_path / "home").mkdir()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "test"
    path.mkdir(parents=True)
    return path


def config(start_timeout: float = 60.0, mode: str = "offline") -> Config:
    return replace(Config(), tracking=TrackingConfig(kind="wandb", mode=mode, start_timeout=start_timeout))


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after wandb's 7-byte header.

    Blocks of 32 KiB hold chunks of checksum (4 bytes), length (2), type (1: full, first, middle or last) and data.
    """
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(folder: Path) -> Iterator[Any]:
    """The records of an offline run's binary log."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def history(folder: Path) -> list[dict[str, str]]:
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def test_an_offline_run_has_the_figures_and_its_own_step_axis(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    tracker = build_trackers(config(), run_dir, attempt=0)
    for step in (10, 20, 30):
        tracker.log({"step": step, "loss": 4.0 / step, "expert_load": {"3": [0.25, 0.75]}})
    tracker.log({"step": 30, "val_loss": 1.5})
    tracker.finish("completed")
    assert tracker.failures == {}
    assert len(read_metrics(run_dir / "metrics.jsonl").training) == 3

    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    assert folder.name.endswith((run_dir / "wandb_id").read_text().strip())
    lines = history(folder)
    assert [line["step"] for line in lines] == ["10", "20", "30", "30"]
    assert lines[0]["loss"] == "0.4" and lines[0]["expert_load/3_max"] == "0.75" and lines[3]["val_loss"] == "1.5"
    axes = {
        record.metric.glob_name or record.metric.name: record.metric.step_metric
        for record in records(folder)
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes.get("*") == "step"
    ends = [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]
    assert ends == [0]
    for path in run_dir.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), f"{path} holds a secret of the environment"


def test_a_resumed_run_goes_on_under_its_id_and_a_failed_one_says_so(run_dir: Path) -> None:
    for attempt, status in ((0, "failed"), (1, "completed")):
        tracker = build_trackers(config(), run_dir, attempt)
        tracker.log({"step": attempt + 1, "loss": 1.0})
        tracker.finish(status)
        time.sleep(1.1)  # wandb names an attempt's folder by the second
    folders = sorted((run_dir / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    identity = (run_dir / "wandb_id").read_text().strip()
    assert {folder.name.rsplit("-", 1)[1] for folder in folders} == {identity}
    exits = [[r.exit.exit_code for r in records(folder) if r.WhichOneof("record_type") == "exit"] for folder in folders]
    assert exits == [[1], [0]]


def test_a_slow_start_is_given_up_and_the_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    finished = threading.Event()

    class Late:
        dir = "nowhere/files"

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def finish(self, exit_code: int) -> None:
            finished.set()

    def slow(**_: Any) -> Late:
        time.sleep(5)
        return Late()

    monkeypatch.setattr(wandb, "init", slow)
    begin = time.monotonic()
    tracker = build_trackers(config(start_timeout=1.0), run_dir, attempt=0)
    assert 0.9 <= time.monotonic() - begin < 4.5, "the wait must end by its bound, not by the start"
    tracker.log({"step": 1, "loss": 1.0})
    tracker.finish("completed")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "tracking: wandb did not start within tracking.start_timeout=1 s; the run goes on without wandb, metrics.jsonl has every figure"
    )
    line = read_metrics(run_dir / "metrics.jsonl").training[0]
    assert line["loss"] == 1.0 and line["tracker_failures"] == 1
    assert finished.wait(10), "a run that starts after it was given up must be closed"


def test_a_process_whose_wandb_hangs_still_ends(run_dir: Path) -> None:
    body = (
        "import sys, time, wandb; from dataclasses import replace; from pathlib import Path\n"
        "from train.config.schema import Config; from train.tracking import build_trackers\n"
        "from train.tracking.config import TrackingConfig\n"
        "wandb.init = lambda **_: time.sleep(600)\n"
        "tracker = build_trackers(replace(Config(), tracking=TrackingConfig(start_timeout=0.5)), Path(sys.argv[1]), 0)\n"
        "tracker.log({'step': 1, 'loss': 1.0}); tracker.finish('completed')\n"
    )
    ended = subprocess.run([sys.executable, "-c", body, str(run_dir)], capture_output=True, text=True, timeout=40)
    assert ended.returncode == 0, ended.stderr
    assert "wandb did not start within" in ended.stderr


def test_a_failing_start_is_one_line_and_the_run_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def fail(**_: Any) -> None:
        raise wandb.errors.CommError("no service\nhere")

    monkeypatch.setattr(wandb, "init", fail)
    tracker = build_trackers(config(), run_dir, attempt=0)
    tracker.log({"step": 1, "loss": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "tracking: wandb did not start (no service here); the run goes on without wandb, metrics.jsonl has every figure"
    ]
    assert tracker.failures == {"wandb": 1}


def test_online_without_a_key_says_what_to_do_and_asks_nothing(run_dir: Path) -> None:
    """On a terminal too, where wandb by itself would ask for the key and wait."""
    body = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from train.config.schema import Config; from train.tracking import build_trackers\n"
        "from train.tracking.config import TrackingConfig\n"
        "build_trackers(replace(Config(), tracking=TrackingConfig(mode='online')), Path(sys.argv[1]), 0).finish('completed')\n"
    )
    master, slave = pty.openpty()
    ended = subprocess.run([sys.executable, "-c", body, str(run_dir)], stdin=slave, stderr=subprocess.PIPE, stdout=slave, timeout=40)
    os.close(slave)
    os.close(master)
    said = ended.stderr.decode()
    assert ended.returncode == 0, said
    reason = "tracking.mode=online needs an API key: run `wandb login`, or use tracking.mode=offline"
    assert f"tracking: wandb did not start ({reason}); the run goes on without wandb" in said


def test_a_finish_that_hangs_is_bounded() -> None:
    class Hanging:
        dir = "runs/x/wandb/offline-run-1/files"
        summary: dict[str, str]

        def __init__(self) -> None:
            self.summary = {}

        def finish(self, exit_code: int) -> None:
            time.sleep(30)

    tracker = WandbTracker(Hanging(), finish_timeout=0.3)
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.3 s; what it has not sent is in runs/x/wandb/offline-run-1"):
        tracker.finish("completed")


def test_the_id_is_kept_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first and len(first) == 12
    (tmp_path / "wandb_id").write_text("")
    with pytest.raises(TrackerStartError, match="does not hold a wandb id; delete it"):
        run_id(tmp_path)


def test_nested_figures_become_flat_names() -> None:
    assert flatten({"step": 1, "a": {"b": {"c": 2}}, "load": {"3": [0.1, 0.9]}, "empty": []}) == {
        "step": 1,
        "a/b/c": 2,
        "load/3_min": 0.1,
        "load/3_max": 0.9,
    }
