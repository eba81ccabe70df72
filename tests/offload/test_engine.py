"""The distributed optimiser with its states on the host: the losses of `none`, and checkpoints that move between modes and layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, assemble, build, pieces, small_config, take_step

Figures = list[tuple[float, float]]
BF16 = {"train.precision": "bf16"}
CLIP = 0.05
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "stream": {"offload.mode": "stream"},
    "half": {"offload.mode": "stream", "offload.fraction": 0.5},
    "cpu_step": {"offload.mode": "cpu_step"},
}


def train(changes: dict[str, Any], load: str | None, save: str | None, steps: range) -> tuple[Figures, Any, str | None]:
    """Figures of each step, the whole state, and the path of a checkpoint of it when `save` names a folder."""
    from train.engine import checkpoint

    engine = build(small_config({**changes, "optim.clip": CLIP}), load)
    results = [take_step(engine, step) for step in steps]
    assert all(result.updated for result in results)
    path = str(checkpoint.save(Path(save), steps.stop, engine.chunks, engine.optimizer, {})) if save else None
    return [(result.loss, result.grad_norm) for result in results], pieces(engine), path


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys() and any(name.startswith("optimizer.state.exp_avg") for name in got)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def run(ranks: RankPools, size: int, changes: dict[str, Any], steps: range, load: str | None = None, save: str | None = None) -> Any:
    """(Figures, whole state, checkpoint). Kept for runs that start anew and leave no checkpoint."""
    key = (size, repr(sorted(changes.items())), steps)
    if load is None and save is None and key in KNOWN:
        return KNOWN[key]
    results = ranks(size).run(train, changes, load, save, steps)
    states = [[piece for piece in state if not piece.name.startswith("random.")] for _, state, _ in results]
    outcome = results[0][0], assemble(states), results[0][2]
    if load is None and save is None:
        KNOWN[key] = outcome
    return outcome


KNOWN: dict[Any, Any] = {}


@pytest.mark.parametrize(
    ("place", "precision"), [("stream", "bf16"), ("half", "bf16"), ("cpu_step", "bf16"), ("half", "fp32"), ("cpu_step", "fp32")]
)
def test_training_is_that_of_none(ranks: RankPools, place: str, precision: str) -> None:
    """Losses, clipped gradient norms, weights, masters and moments: the same bits."""
    model = {**MOE, "train.precision": precision}
    wanted = run(ranks, 2, model, range(3))
    got = run(ranks, 2, {**model, **PLACES[place]}, range(3))
    assert got[0] == wanted[0] and wanted[0][-1][0] < wanted[0][0][0]
    assert all(norm > CLIP for _, norm in wanted[0]), "clipping must have had work"
    assert_same(got[1], wanted[1])


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        ("half", {"parallel.tp": 2, "parallel.sp": True}),
        ("cpu_step", {"parallel.pp": 2}),
        ("half", {"parallel.pp": 2, "parallel.vpp": 2}),
        ("half", {"parallel.ep": 2}),
        ("cpu_step", {"parallel.ep": 2}),
    ],
    ids=str,
)
def test_every_layout_trains_as_with_none(ranks: RankPools, place: str, layout: dict[str, Any]) -> None:
    model = {**BF16, **MOE, **layout}
    wanted = run(ranks, 2, model, range(2))
    got = run(ranks, 2, {**model, **PLACES[place]}, range(2))
    assert got[0] == wanted[0]
    assert_same(got[1], wanted[1])


@pytest.mark.parametrize(
    ("precision", "source", "target"),
    [
        ("bf16", "half", "half"),
        ("bf16", "none", "half"),
        ("bf16", "half", "cpu_step"),
        ("bf16", "cpu_step", "none"),
        ("fp32", "none", "cpu_step"),
        ("fp32", "cpu_step", "stream"),
    ],
)
def test_a_checkpoint_of_one_mode_goes_on_in_another(ranks: RankPools, tmp_path: Path, precision: str, source: str, target: str) -> None:
    model = {"train.precision": precision}
    whole = run(ranks, 2, model, range(3))
    first = run(ranks, 2, {**model, **PLACES[source]}, range(2), save=str(tmp_path))
    then = run(ranks, 2, {**model, **PLACES[target]}, range(2, 3), load=first[2])
    assert [*first[0], *then[0]] == whole[0]
    assert_same(then[1], whole[1])


@pytest.mark.parametrize(("write", "read", "place"), [(1, 2, "half"), (2, 1, "cpu_step")])
def test_a_checkpoint_moves_to_another_world(ranks: RankPools, tmp_path: Path, write: int, read: int, place: str) -> None:
    """What is stored is the same state, cut otherwise: it reads back bit for bit before the first step."""
    first = run(ranks, write, {**BF16, **PLACES["stream"]}, range(2), save=str(tmp_path))
    _, state, _ = run(ranks, read, {**BF16, **PLACES[place]}, range(0), load=first[2])
    assert_same(state, first[1])


def write_weights(changes: dict[str, Any]) -> tuple[float, bool, bool]:
    """Write other weights from outside, refresh, take a step with lr 0: (master's error, weights kept, they were other ones)."""
    engine = build(small_config({**changes, "optim.weight_decay": 0.0}))
    take_step(engine, 0)
    from small_engine import names

    before = {name: parameter.detach().clone() for name, parameter in names(engine)}
    with torch.no_grad():
        for _, parameter in names(engine):
            parameter.mul_(1.5)
    written = {name: parameter.detach().clone() for name, parameter in names(engine)}
    for part in engine.optimizer.chained_optimizers:
        part.reload_model_params()
    take_step(engine, 1, lr=0.0)
    kept = all(torch.equal(parameter, written[name]) for name, parameter in names(engine))
    masters = {piece.name.removeprefix("optimizer.state.param."): piece.data for piece in pieces(engine) if ".param." in piece.name}
    error = max(float((masters[name] - masters[name].to(torch.bfloat16).float()).abs().max()) for name in masters)
    return error, kept, any(not torch.equal(before[name], written[name]) for name in before)


@pytest.mark.parametrize("place", ["half", "cpu_step"])
def test_weights_written_from_outside_survive_a_step_without_a_rate(ranks: RankPools, place: str) -> None:
    for error, kept, changed in ranks(2).run(write_weights, {**BF16, **PLACES[place]}):
        assert error == 0.0 and kept and changed


def train_ahead(changes: dict[str, Any], steps: range) -> tuple[Figures, Any, list[int], list[float]]:
    """As `train` on a device with room for all states, and one backward whose step is not taken before each step.

    Then how many buckets came ahead in each step, and what each waited for the host.
    """
    from unittest.mock import patch

    from small_engine import micro_batches

    from train.engine.offload import exposed_seconds
    from train.engine.step import run_micro_batches
    from train.offload.stream import Streamed

    came: list[int] = []
    real = Streamed.prefetch

    def count(self: Streamed, room: int) -> int:
        came[-1] += real(self, room)
        return 0

    results, waits = [], []
    with patch("train.offload.adam.free_room", lambda device: 10**9), patch.object(Streamed, "prefetch", count):
        engine = build(small_config({**changes, "optim.clip": CLIP}))
        for step in steps:
            came.append(0)
            batches, train = micro_batches(engine, 100 + step), engine.config.train
            engine.optimizer.zero_grad()
            run_micro_batches(
                engine.chunks, lambda b=batches: iter(b), engine.ranks, len(batches), train.micro_batch, train.seq_len, train=True
            )
            results.append(take_step(engine, step))
            waits += exposed_seconds(engine.optimizer).values()
    return [(result.loss, result.grad_norm) for result in results], pieces(engine), came, waits


@pytest.mark.parametrize(
    "layout",
    [{}, {"parallel.tp": 2, "parallel.sp": True}, {"parallel.pp": 2, "parallel.vpp": 2}, {"parallel.ep": 2}],
    ids=str,
)
def test_states_that_come_ahead_change_nothing(ranks: RankPools, layout: dict[str, Any]) -> None:
    """Also those of a backward whose step was not taken: they are dropped, and come again."""
    model = {**BF16, **MOE, **layout}
    wanted = run(ranks, 2, model, range(2))
    results = ranks(2).run(train_ahead, {**model, **PLACES["stream"]}, range(2))
    assert results[0][0] == wanted[0]
    assert_same(assemble([[piece for piece in state if not piece.name.startswith("random.")] for _, state, _, _ in results]), wanted[1])
    for _, _, came, waits in results:
        assert came[0] >= 2 and came == came[:1] * 2, "one bucket or more in both backwards of each step"
        assert len(waits) == 2 and all(wait > 0 for wait in waits)


def count_without_prefetch(changes: dict[str, Any]) -> int:
    """How often states were asked to come ahead."""
    from unittest.mock import patch

    from train.offload.adam import OffloadedAdam

    with patch.object(OffloadedAdam, "prefetch") as asked:
        take_step(build(small_config(changes)), 0)
    return asked.call_count


def test_prefetch_can_be_left_out(ranks: RankPools) -> None:
    streamed = {**BF16, **PLACES["stream"]}
    assert all(count > 0 for count in ranks(2).run(count_without_prefetch, streamed))
    assert ranks(2).run(count_without_prefetch, {**streamed, "offload.prefetch": False}) == [0, 0]
    assert ranks(2).run(count_without_prefetch, {**BF16, **PLACES["cpu_step"]}) == [0, 0]


def test_the_metrics_say_what_a_step_waited(ranks: RankPools, tmp_path: Path) -> None:
    """In each line of a run that offloads, mean of the steps since the last one; in no other."""
    from real_runs import corpus
    from small_run import run as run_loop
    from small_run import run_config

    data = corpus(tmp_path / "phrases")
    lines = {}
    for name, place in PLACES.items():
        config = run_config(data, {"train.precision": "bf16", "train.steps": 4, "train.log_every": 2, **place})
        lines[name] = ranks(1).run(run_loop, config, str(tmp_path / name))[0].lines
    for name, told in lines.items():
        waits = [line.get("offload_exposed_seconds") for line in told]
        assert len(waits) == 2 and all((wait is None) if name == "none" else (wait > 0) for wait in waits)
        assert all(wait is None or wait < line["step_seconds"] for wait, line in zip(waits, told, strict=True))
