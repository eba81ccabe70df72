"""Which directories count as checkpoints: incomplete ones are named and passed over, old ones pruned."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from train.checkpoint.directory import MANIFEST, checkpoint_path, list_checkpoints, manifest_of, newest_complete, prune


def write(directory: Path, step: int) -> Path:
    path = checkpoint_path(directory, step)
    path.mkdir(parents=True)
    for name, size in ((".metadata", 5), ("__0_0.distcp", 9)):
        (path / name).write_bytes(b"x" * size)
    files = {".metadata": 5, "__0_0.distcp": 9}
    (path / MANIFEST).write_text(json.dumps({"format": 1, "step": step, "progress": {"step": step}, "files": files}))
    return path


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: (path / MANIFEST).unlink(), "leantron.json is missing, so it was never completed"),
    (lambda path: (path / MANIFEST).write_text(""), "leantron.json is unreadable"),
    (lambda path: (path / MANIFEST).write_text('{"progress": '), "leantron.json is unreadable"),
    (lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe"), "leantron.json is unreadable"),
    (lambda path: (path / MANIFEST).write_text("[]"), "leantron.json lacks its fields"),
    (lambda path: (path / MANIFEST).write_text('{"files": {}}'), "leantron.json lacks its fields"),
    (lambda path: (path / "__0_0.distcp").write_bytes(b"x" * 8), "__0_0.distcp is 8 bytes instead of 9"),
    (lambda path: (path / "__0_0.distcp").write_bytes(b""), "__0_0.distcp is 0 bytes instead of 9"),
    (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
]


@pytest.mark.parametrize(("damage", "finding"), DAMAGES, ids=[finding for _, finding in DAMAGES])
def test_an_incomplete_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, damage: Callable[[Path], object], finding: str
) -> None:
    first, second = write(tmp_path, 4), write(tmp_path, 8)
    assert newest_complete(tmp_path) == (second, [])
    damage(second)
    path, lines = newest_complete(tmp_path)
    assert path == first
    (line,) = lines
    assert line.startswith(f"checkpoint {second}: {finding}") and line.endswith("; use an earlier checkpoint") and "\n" not in line
    with pytest.raises(ValueError, match="use an earlier checkpoint"):
        manifest_of(second)
    damage(first)
    assert newest_complete(tmp_path)[0] is None and len(newest_complete(tmp_path)[1]) == 2


def test_only_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for step in (100, 20, 100_000_000, 3):
        write(tmp_path, step)
    for name in (".step_00000200.partial", "step_12", "step_00000300x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000400").write_text("a file")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 20, 100, 100_000_000]
    assert newest_complete(tmp_path)[0] == tmp_path / "step_100000000"
    assert list_checkpoints(tmp_path / "nowhere") == [] and newest_complete(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_pruning_keeps_the_newest_complete_ones(tmp_path: Path, keep: int) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    (paths[3] / MANIFEST).unlink()
    complete = [path for path in paths if path != paths[3]]
    gone = prune(tmp_path, keep)
    assert gone == complete[: max(0, 4 - keep)]
    assert [path for path in paths if path.exists()] == [path for path in paths if path not in gone]
    assert newest_complete(tmp_path)[0] == paths[4]
