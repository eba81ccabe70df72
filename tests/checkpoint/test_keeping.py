"""Which checkpoints stay: the newest, those kept for good, and what a kill left half-way."""

import json
from pathlib import Path

from train.checkpoint.directory import MANIFEST, checkpoint_path, list_checkpoints, newest_complete, partial_path, prune, stale_path, tidy


def write(path: Path, text: str = "x" * 9) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_text(text)
    (path / MANIFEST).write_text(json.dumps({"format": 1, "progress": {}, "files": {"data": len(text)}}))
    return path


def steps(directory: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(directory)]


def test_the_newest_and_the_permanent_ones_stay_and_invalid_ones_do_not_count(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 60, 70):
        write(checkpoint_path(tmp_path, step))
    (checkpoint_path(tmp_path, 60) / MANIFEST).unlink()
    (checkpoint_path(tmp_path, 20) / "data").write_text("short")
    gone = prune(tmp_path, keep=2, keep_every=20)
    assert [path.name for path in gone] == ["step_00000010", "step_00000030"]
    assert steps(tmp_path) == [20, 40, 50, 60, 70], "50 and 70 are the newest complete, 40 is for good, 20 and 60 are not complete"
    assert not list(tmp_path.glob(".*"))
    assert [path.name for path in prune(tmp_path, keep=1, keep_every=0)] == ["step_00000040", "step_00000050"]


def test_a_start_clears_up_what_a_kill_left(tmp_path: Path) -> None:
    final = checkpoint_path(tmp_path, 10)
    write(final)
    write(partial_path(checkpoint_path(tmp_path, 20)))
    half_deleted = write(stale_path(checkpoint_path(tmp_path, 5)))
    (half_deleted / "data").unlink()
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [final.name]
    tidy(tmp_path / "nowhere")


def test_a_checkpoint_moved_aside_for_one_that_never_came_is_put_back(tmp_path: Path) -> None:
    final = checkpoint_path(tmp_path, 10)
    write(stale_path(final), "the only one")
    tidy(tmp_path)
    assert newest_complete(tmp_path)[0] == final and (final / "data").read_text() == "the only one"
    write(stale_path(final), "an older one")
    tidy(tmp_path)
    assert (final / "data").read_text() == "the only one" and not list(tmp_path.glob(".*"))
