"""A run that goes on from a checkpoint is the run that was never interrupted; another layout reads the same state, bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Piece, assemble, build, pieces, small_config, take_step

SP, PP, EP = {"parallel.tp": 2, "parallel.sp": True}, {"parallel.pp": 2}, {"parallel.ep": 2}
INTERLEAVED, WHOLE = {**PP, "parallel.vpp": 2}, {"parallel.distributed_optimizer": False}
TIED_BF16 = {**MOE, "model.tied": True, "train.precision": "bf16"}
BEFORE, AFTER = 2, 2


@dataclass
class Seen:
    """A rank's state at the checkpoint, the steps after it, the state at the end."""

    path: str
    steps: list[int]
    stored: list[Piece]
    figures: list[tuple[float, float, int]]
    end: list[Piece]


def counts(engine: Any) -> list[int]:
    """Adam's count of steps of each of this rank's parameters: its bias correction depends on it."""
    parts = [part.optimizer for part in engine.optimizer.chained_optimizers if part.optimizer is not None]
    return [int(values["step"]) for part in parts for values in part.state.values()]


def go_on(engine: Any, path: str, after: int) -> Seen:
    steps, stored = counts(engine), pieces(engine)
    results = [take_step(engine, step) for step in range(BEFORE, BEFORE + after)]
    return Seen(path, steps, stored, [(result.loss, result.grad_norm, result.tokens) for result in results], pieces(engine))


def write(changes: dict[str, Any], folder: str, after: int = 0) -> Seen:
    from train.engine import checkpoint

    engine = build(small_config(changes))
    for step in range(BEFORE):
        take_step(engine, step)
    path = checkpoint.save(Path(folder), BEFORE, engine.chunks, engine.optimizer, {"place": BEFORE})
    return go_on(engine, str(path), after)


def read(changes: dict[str, Any], path: str, after: int = 0) -> Seen:
    """From other initial weights, which the checkpoint must replace all of."""
    from train.engine import checkpoint

    engine = build(small_config({**changes, "train.seed": 99}))
    assert checkpoint.load(Path(path), engine.chunks, engine.optimizer) == {"place": BEFORE}
    return go_on(engine, path, after)


def same(got: list[Piece], want: list[Piece]) -> None:
    assert [piece.name for piece in got] == [piece.name for piece in want]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.data, other.data), one.name


def same_whole(got: list[Seen], want: list[Seen]) -> None:
    one, other = assemble([seen.stored for seen in got]), assemble([seen.stored for seen in want])
    assert one.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(one[name], value), name


@pytest.mark.parametrize(
    "changes", [TIED_BF16, {**MOE, **WHOLE}, {**TIED_BF16, **WHOLE}, {**MOE, **SP}, {**TIED_BF16, **INTERLEAVED}, {**MOE, **EP}], ids=str
)
def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    pool = ranks(2)
    unsplit = pool.run(write, changes, str(tmp_path), AFTER)
    resumed = pool.run(read, changes, unsplit[0].path, AFTER)
    for before, after in zip(unsplit, resumed, strict=True):
        assert set(after.steps) <= {BEFORE} and after.steps == before.steps
        same(after.stored, before.stored)
        assert after.figures == before.figures
        same(after.end, before.end)
        assert any(not torch.equal(one.data, other.data) for one, other in zip(after.stored, after.end, strict=True))


@pytest.fixture(scope="module")
def by_one(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What one process wrote, for every layout to read."""
    return ranks(1).run(write, TIED_BF16, str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize("layout", [SP, PP, INTERLEAVED, EP, {}, WHOLE, {**EP, **WHOLE}, {**SP, **EP}], ids=str)
def test_two_processes_and_one_read_each_others_state(ranks: RankPools, tmp_path: Path, by_one: list[Seen], layout: dict[str, Any]) -> None:
    spread = ranks(2).run(write, {**TIED_BF16, **layout}, str(tmp_path / "two"))
    alone = ranks(1).run(read, TIED_BF16, spread[0].path)
    same_whole(alone, spread)
    assert set(alone[0].steps) == {BEFORE}
    same_whole(ranks(2).run(read, {**TIED_BF16, **layout}, by_one[0].path), by_one)
    names = assemble([alone[0].stored])
    masters = [name for name in names if name.startswith("optimizer.state.") and names[name].dtype == torch.float32]
    assert len(masters) == 3 * sum(value.dtype == torch.bfloat16 for value in names.values())


def test_either_kind_of_optimiser_reads_the_other(ranks: RankPools, tmp_path: Path) -> None:
    for first, second in ((WHOLE, {}), ({}, WHOLE)):
        written = ranks(2).run(write, {**MOE, **EP, **first}, str(tmp_path / str(len(first))), AFTER)
        taken = ranks(2).run(read, {**MOE, **EP, **second}, written[0].path, AFTER)
        same_whole(taken, written)
        for one, other in zip(written[0].figures, taken[0].figures, strict=True):
            assert other == pytest.approx(one, rel=1e-6)


def test_four_processes_are_read_by_two_of_another_shape(ranks: RankPools, tmp_path: Path) -> None:
    written = ranks(4).run(write, {**MOE, **PP, **EP}, str(tmp_path))
    same_whole(ranks(2).run(read, {**MOE, **SP}, written[0].path), written)


def test_a_vocabulary_padded_for_three_ranks_is_read_by_one(ranks: RankPools, tmp_path: Path) -> None:
    changes = {"model.width": 96, "model.heads": 6, "model.kv_heads": 3}
    written = ranks(3).run(write, {**changes, "parallel.tp": 3}, str(tmp_path))
    one, three = assemble([ranks(1).run(read, changes, written[0].path)[0].stored]), assemble([seen.stored for seen in written])
    for name, value in three.items():
        if "word_embeddings" in name or "output_layer" in name:
            assert value.shape[0] == 192 and one[name].shape[0] == 128
            assert torch.equal(value[:120], one[name][:120]), name
        else:
            assert torch.equal(value, one[name]), name
