"""A checkpoint that cannot be written: every rank says so, and what was there before stays."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPools
from small_engine import MOE, build, small_config, take_step

from train.checkpoint.directory import manifest_of

CHANGES = {**MOE, "parallel.ep": 2}
DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


def break_writer(rank: int) -> Any:
    """The storage writer of torch, failing on `rank` after the others have begun; returns what it replaces."""
    from train.engine import checkpoint

    original = checkpoint.FileSystemWriter

    class Broken(original):  # type: ignore[valid-type, misc]
        def write_data(self, *args: Any) -> Any:
            if dist.get_rank() == rank:
                raise DISK_FULL
            return super().write_data(*args)

    checkpoint.FileSystemWriter = Broken  # type: ignore[misc]
    return original


def save_and_fail(folder: str, where: str) -> tuple[str, float]:
    """A good checkpoint of step 1, a failed one of step 2; the error, and the loss of a step after it."""
    import train.engine.checkpoint as module

    engine = build(small_config(CHANGES))
    take_step(engine, 0)
    directory = Path(folder)
    module.save(directory, 1, engine.chunks, engine.optimizer, {"place": 1})
    take_step(engine, 1)
    original = module.FileSystemWriter, module.publish, module._empty_folder
    try:
        if where.startswith("rank"):
            break_writer(int(where[-1]))
        elif where == "manifest":
            module.publish = fail  # type: ignore[assignment]
        else:
            module._empty_folder = fail
        module.save(directory, 2, engine.chunks, engine.optimizer, {"place": 2})
    except module.CheckpointNotWritten as error:
        message = str(error)
    else:
        raise AssertionError("the second save went through")
    finally:
        module.FileSystemWriter, module.publish, module._empty_folder = original  # type: ignore[misc]
    return message, take_step(engine, 2).loss


def fail(*_: Any) -> None:
    raise DISK_FULL


def save_three_times(folder: str) -> tuple[float, float]:
    """Step 1 written, written again after a further step; the loss of a step from each state."""
    from train.engine import checkpoint

    engine = build(small_config(CHANGES))
    take_step(engine, 0)
    checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {"place": "first"})
    first = take_step(engine, 1).loss
    path = checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {"place": "second"})
    second = take_step(engine, 1).loss
    again = build_again(str(path))
    assert again == second
    return first, second


def build_again(path: str) -> float:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    loss: float = take_step(build(small_config(CHANGES), path), 1).loss
    return loss


@pytest.mark.parametrize("where", ["rank 0", "rank 1", "manifest", "folder"])
def test_a_failing_write_is_raised_on_every_rank_and_leaves_the_earlier_checkpoint(ranks: RankPools, tmp_path: Path, where: str) -> None:
    answers = ranks(2).run(save_and_fail, str(tmp_path), where)
    for message, loss in answers:
        assert message.startswith(f"checkpoint {tmp_path}/step_00000002: it could not be written (OSError: [Errno 28] No space left")
        assert "\n" not in message and message.endswith("go on from the last one")
        assert loss == answers[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert manifest_of(tmp_path / "step_00000001")["progress"] == {"place": 1}


def test_a_place_that_is_no_folder_is_refused_on_every_rank(ranks: RankPools, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    for message in ranks(2).run(save_below_a_file, str(place)):
        assert message.startswith(f"checkpoint {place}/step_00000001: it could not be written (") and "\n" not in message


def save_below_a_file(folder: str) -> str:
    from train.engine import checkpoint

    engine = build(small_config(CHANGES))
    try:
        checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {})
    except checkpoint.CheckpointNotWritten as error:
        return str(error)
    return "written"


def test_a_step_that_is_written_again_replaces_the_first(ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / ".step_00000001.partial").mkdir()
    (tmp_path / ".step_00000001.partial/rest of a killed save").write_text("x")
    for first, second in ranks(2).run(save_three_times, str(tmp_path)):
        assert first != second
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    manifest = manifest_of(tmp_path / "step_00000001")
    assert manifest["progress"] == {"place": "second"} and "rest of a killed save" not in manifest["files"]
