"""A rank that stops, a loader and a writer that hang: named within the set time, stacks in the run's directory, the job ends."""

import json
import signal
import time
from pathlib import Path

import pytest
from real_runs import Forge, state, steps_logged

LIMIT = 3.0


def hang_loader(rank: int) -> None:
    """Rank 1's data set stops answering at the fourth step."""
    from train.data.dataset import BatchSource

    original, calls = BatchSource.rows, []

    def rows(self: BatchSource, ids: list[int]) -> object:
        calls.append(ids)
        if rank == 1 and len(calls) > 6:
            time.sleep(600)
        return original(self, ids)

    BatchSource.rows = rows  # type: ignore[method-assign, assignment]


def hang_writer(rank: int) -> None:
    """Rank 1's disk stops answering."""
    from train.engine import checkpoint

    class Hanging(checkpoint.FileSystemWriter):
        def write_data(self, *args: object) -> object:
            if rank == 1:
                time.sleep(600)
            return super().write_data(*args)  # type: ignore[arg-type]

    checkpoint.FileSystemWriter = Hanging  # type: ignore[misc]


def failure(run: Path, rank: int) -> str:
    record = json.loads((run / "logs" / f"rank_{rank}.failure.json").read_text())
    assert record["hang"] is True
    return str(record["error"])


def test_a_stopped_rank_is_named_by_the_other(forge: Forge, tiny: list[str], tmp_path: Path) -> None:
    job = forge.start([*tiny, f"run.dir={tmp_path}/run", "train.steps=1000000", f"train.hang_timeout={LIMIT}"])
    job.until(lambda: steps_logged(job.run) >= 3, "step 3")
    job.kill(signal.SIGSTOP, [1])
    stopped, last = time.monotonic(), steps_logged(job.run)
    assert job.wait(30, [0]) == [1] and time.monotonic() - stopped < 3 * LIMIT + 4
    said = failure(job.run, 0)
    assert f"rank 0 has made no progress for {LIMIT:.0f} s" in said or "rank 0 has made no progress for 4 s" in said
    assert f"rank 1 (process {job.pids[1]} on " in said and "has not been heard of for" in said
    assert any(f"at compute of step {step};" in said for step in range(last, last + 4)), said
    assert said in job.output(0).splitlines()
    assert "train_step" in (job.run / "logs/rank_0.stacks.txt").read_text()
    assert state(job.run) == "failed"
    job.kill(ranks=[1])


@pytest.mark.parametrize(
    ("fault", "settings", "where", "frame"),
    [
        (hang_loader, [], "at data of step", "in rows"),
        (hang_writer, ["checkpoint.every=2"], "at the write in the background of step", "write_data"),
        (hang_writer, ["checkpoint.every=2", "checkpoint.async_save=false"], "at checkpoint of step 2;", "write_data"),
    ],
    ids=["loader", "writer", "writer in the foreground"],
)
def test_what_hangs_is_found_in_the_stacks(
    forge: Forge, tiny: list[str], tmp_path: Path, fault: object, settings: list[str], where: str, frame: str
) -> None:
    settings = [*settings, "train.steps=1000000", f"train.hang_timeout={LIMIT}"]
    job = forge.start([*tiny, *settings, f"run.dir={tmp_path}/run"], fault=fault)  # type: ignore[arg-type]
    started = time.monotonic()
    assert job.wait(60) == [1, 1], job.output()
    assert time.monotonic() - started < 40
    said = failure(job.run, 1)  # rank 0 reports the same, or that rank 1 has left, whichever comes first
    assert "hang: rank 1 has made no progress" in said and where in said
    assert frame in (job.run / "logs/rank_1.stacks.txt").read_text()


def test_a_run_that_goes_on_is_left_alone_and_leaves_no_heartbeat(forge: Forge, tiny: list[str], tmp_path: Path) -> None:
    job = forge.start(
        [*tiny, f"run.dir={tmp_path}/run", "train.steps=160", "train.hang_timeout=5", "checkpoint.every=40"], ranks=1
    ).finish()
    assert sorted(path.name for path in (job.run / "logs").iterdir()) == ["pace.json"]
