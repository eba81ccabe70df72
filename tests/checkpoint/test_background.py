"""Checkpoints written while training goes on: the state of the step they were begun at, whatever happens to the weights meanwhile."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, build, pieces, small_config, take_step

LAYOUTS = [{**MOE, "parallel.ep": 2}, {"parallel.tp": 2, "parallel.sp": True, "train.precision": "bf16", "model.tied": True}]


def step_while_writing(folder: str, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of two steps taken while a checkpoint is held back in the writer, and of the same steps from that checkpoint."""
    from megatron.core import parallel_state

    from train.engine import checkpoint

    engine = build(small_config(changes))
    saver = checkpoint.BackgroundSaver(Path(folder))
    for step in range(3):
        take_step(engine, step)
    before = pieces(engine)
    gate = hold_writer()
    torch.manual_seed(17)
    state = torch.get_rng_state()
    saver.start(3, engine.chunks, engine.optimizer, {"place": 3}, lambda: None)
    went_on = [take_step(engine, step).loss for step in (3, 4)]
    assert saver.state == "writing"
    gate()
    path = saver.finish()
    assert path is not None and saver.state == "idle"
    parallel_state.destroy_model_parallel()
    again = build(small_config({**changes, "train.seed": 99}))
    torch.manual_seed(5)
    assert checkpoint.load(path, again.chunks, again.optimizer) == {"place": 3}
    assert torch.equal(torch.get_rng_state(), state), "the generators go on where they were"
    for stored, now in zip(before, pieces(again), strict=True):
        assert stored.name == now.name and torch.equal(stored.data, now.data), stored.name
    return went_on, [take_step(again, step).loss for step in (3, 4)]


def hold_writer() -> Any:
    """Make the writer wait until the answer is called."""
    import threading

    from train.engine import checkpoint

    original, opened = checkpoint.FileSystemWriter, threading.Event()

    class Held(original):  # type: ignore[valid-type, misc]
        def write_data(self, *args: Any) -> Any:
            assert opened.wait(60)
            return super().write_data(*args)

    checkpoint.FileSystemWriter = Held  # type: ignore[misc]

    def release() -> None:
        checkpoint.FileSystemWriter = original  # type: ignore[misc]
        opened.set()

    return release


@pytest.mark.parametrize("changes", LAYOUTS, ids=["ep", "tp"])
def test_what_is_written_is_the_state_of_the_start(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    for went_on, again in ranks(2).run(step_while_writing, str(tmp_path), changes):
        assert went_on == again


def dies(folder: str) -> tuple[str, str, bool]:
    """A writer that dies on rank 1: what both ranks see, and whether a later save works."""
    import torch.distributed as dist

    from train.engine import checkpoint

    engine = build(small_config(LAYOUTS[0]))
    saver, original = checkpoint.BackgroundSaver(Path(folder)), checkpoint.FileSystemWriter

    class Dying(original):  # type: ignore[valid-type, misc]
        def write_data(self, *args: Any) -> Any:
            if dist.get_rank() == 1:
                raise SystemExit("the writing thread is gone")
            return super().write_data(*args)

    checkpoint.FileSystemWriter = Dying  # type: ignore[misc]
    saver.start(1, engine.chunks, engine.optimizer, {}, lambda: None)
    while saver.state == "writing":
        time.sleep(0.01)
    seen = saver.state
    checkpoint.FileSystemWriter = original  # type: ignore[misc]
    try:
        saver.finish()
    except checkpoint.CheckpointNotWritten as error:
        message = str(error)
    saver.start(2, engine.chunks, engine.optimizer, {}, lambda: None)
    return seen, message, saver.finish() is not None


def test_a_writer_that_dies_is_noticed_on_every_rank(ranks: RankPools, tmp_path: Path) -> None:
    for seen, message, works in ranks(2).run(dies, str(tmp_path)):
        assert seen == "failed" and works
        assert message.startswith(f"checkpoint {tmp_path}/step_00000001: it could not be written (") and "\n" not in message
        assert "the writing thread is gone" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
