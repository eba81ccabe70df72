"""A disk that is full, in the background or not: the old checkpoint stays, the run stops or goes on as configured."""

import errno
import json
from pathlib import Path

import pytest
from real_runs import Forge, state

from train.checkpoint.directory import list_checkpoints
from train.tracking import read_metrics

FULL = OSError(errno.ENOSPC, "No space left on device")


def second_save_fails(rank: int) -> None:
    """Rank 1's disk is full for the second checkpoint, and for this one only."""
    from train.engine import checkpoint

    saves: list[int] = []

    class Full(checkpoint.FileSystemWriter):
        def write_data(self, *args: object) -> object:
            saves.append(1)
            if rank == 1 and len(saves) == 2:
                raise FULL
            return super().write_data(*args)  # type: ignore[arg-type]

    checkpoint.FileSystemWriter = Full  # type: ignore[misc]


def last_save_fails(rank: int) -> None:
    """The manifest of the last checkpoint finds no room."""
    from train.engine import checkpoint

    original = checkpoint.publish

    def finish(partial: Path, final: Path, step: int, progress: dict[str, object]) -> None:
        if step == 12:
            raise FULL
        original(partial, final, step, progress)

    checkpoint.publish = finish


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_run_stops_with_one_line_and_goes_on_from_the_old_one(forge: Forge, tiny: list[str], tmp_path: Path, background: str) -> None:
    run = tmp_path / "run"
    job = forge.start(
        [*tiny, f"run.dir={run}", "checkpoint.every=4", f"checkpoint.async_save={background}", "train.steps=2000"], fault=second_save_fails
    )
    assert job.wait() == [1, 1]
    record = json.loads((run / "logs/rank_0.failure.json").read_text())
    line = f"checkpoint {run}/checkpoints/step_00000008: it could not be written (OSError: [Errno 28] No space left on device)"
    assert line in record["error"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000004"]
    assert state(run) == "failed"
    again = forge.start([f"resume={run}", "train.steps=12"]).finish()
    assert f"going on from {run}/checkpoints/step_00000004" in again.output()


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_run_goes_on_when_told_to(forge: Forge, tiny: list[str], tmp_path: Path, background: str) -> None:
    settings = ["checkpoint.every=4", f"checkpoint.async_save={background}", "checkpoint.on_failure=continue", "checkpoint.keep=9"]
    job = forge.start([*tiny, f"run.dir={tmp_path}/run", *settings], fault=second_save_fails).finish()
    assert [step for step, _ in list_checkpoints(job.run / "checkpoints")] == [4, 12]
    told = [line for line in job.output().splitlines() if "could not be written" in line]
    assert len(told) == 1 and told[0].endswith("checkpoint.on_failure=continue: the run goes on")
    assert read_metrics(job.run / "metrics.jsonl").training[-1]["failed_checkpoints"] == 1


def test_the_last_checkpoint_must_be_written(forge: Forge, tiny: list[str], tmp_path: Path) -> None:
    settings = ["checkpoint.every=4", "checkpoint.on_failure=continue"]
    job = forge.start([*tiny, f"run.dir={tmp_path}/run", *settings], fault=last_save_fails)
    assert job.wait() == [1, 1]
    assert (
        "step_00000012: it could not be written (OSError: [Errno 28]"
        in json.loads((job.run / "logs/rank_1.failure.json").read_text())["error"]
    )
    assert [step for step, _ in list_checkpoints(job.run / "checkpoints")] == [4, 8]
