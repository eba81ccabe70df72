"""One model, every layout: the same losses, gradient norms and weights from one seed checkpoint, in fp32, with both router losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, assemble, build, pieces, small_config, take_step

Figures = list[tuple[float, float, int]]
Reference = Callable[[str], tuple[str, Figures]]

STEPS = 3
TP, SP, PP, EP = ({"parallel.tp": 2}, {"parallel.tp": 2, "parallel.sp": True}, {"parallel.pp": 2}, {"parallel.ep": 2})
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": MOE,
    "shared": {**MOE, "moe.layers": "all", "moe.shared_width": 32, "model.tied": True},
}


def write_seed(changes: dict[str, Any], folder: str) -> str:
    """A checkpoint after one step, so that the optimiser's moments count too."""
    from train.engine import checkpoint

    engine = build(small_config(changes))
    take_step(engine, 100)
    return str(checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {}))


def train(changes: dict[str, Any], seed: str, steps: int = STEPS) -> Figures:
    engine = build(small_config(changes), seed)
    results = [take_step(engine, step) for step in range(steps)]
    assert all(result.updated for result in results)
    return [(result.loss, result.grad_norm, result.tokens) for result in results]


def initial(changes: dict[str, Any]) -> Any:
    return pieces(build(small_config(changes)), optimizer=False)


@pytest.fixture(scope="module")
def reference(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`reference(model)`: its seed checkpoint and the figures of one process that goes on from there."""
    known: dict[str, tuple[str, Figures]] = {}

    def get(model: str) -> tuple[str, Figures]:
        if model not in known:
            (seed,) = ranks(1).run(write_seed, MODELS[model], str(tmp_path_factory.mktemp(model)))
            (figures,) = ranks(1).run(train, MODELS[model], seed)
            known[model] = seed, figures
        return known[model]

    return get


def compare(ranks: RankPools, reference: Reference, size: int, model: str, layout: dict[str, Any], tolerance: float = 1e-5) -> None:
    seed, wanted = reference(model)
    results = ranks(size).run(train, {**MODELS[model], **layout}, seed)
    for figures in results:
        assert figures == results[0]
    for (loss, norm, tokens), (want_loss, want_norm, want_tokens) in zip(results[0], wanted, strict=True):
        assert tokens == want_tokens
        assert loss == pytest.approx(want_loss, rel=tolerance), (results[0], wanted)
        assert norm == pytest.approx(want_norm, rel=tolerance), (results[0], wanted)


def test_the_reference_learns(reference: Reference) -> None:
    for model in MODELS:
        _, figures = reference(model)
        assert figures[-1][0] < figures[0][0] - 0.02
        assert len({norm for _, norm, _ in figures}) == STEPS


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", TP),
        ("dense", SP),
        ("experts", SP),
        ("shared", SP),
        ("dense", PP),
        ("experts", PP),
        ("shared", PP),
        ("experts", {**PP, "parallel.vpp": 2}),
        ("shared", {**PP, "parallel.vpp": 2}),
        ("experts", {}),
        ("experts", {"parallel.distributed_optimizer": False}),
        ("experts", EP),
        ("shared", EP),
        ("experts", {**EP, "parallel.distributed_optimizer": False}),
        ("experts", {**SP, **EP}),
        ("experts", {**SP, "parallel.distributed_optimizer": False}),
    ],
    ids=str,
)
def test_two_processes_equal_one(ranks: RankPools, reference: Reference, model: str, layout: dict[str, Any]) -> None:
    compare(ranks, reference, 2, model, layout)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", TP),
        ("experts", SP),
        ("experts", {**PP, **EP}),
        ("experts", {**SP, **PP}),
        ("experts", {**SP, "parallel.ep": 4}),
        ("experts", {**PP, **EP, "parallel.vpp": 2, "parallel.distributed_optimizer": False}),
    ],
    ids=str,
)
def test_four_processes_equal_one(ranks: RankPools, reference: Reference, model: str, layout: dict[str, Any]) -> None:
    compare(ranks, reference, 4, model, layout)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("size", [1, 2])
def test_recomputing_activations_changes_nothing(ranks: RankPools, reference: Reference, recompute: str, size: int) -> None:
    compare(ranks, reference, size, "experts", {"train.recompute": recompute, **({} if size == 1 else PP)}, tolerance=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_begins_with_the_same_weights(ranks: RankPools, model: str) -> None:
    wanted = assemble(ranks(1).run(initial, MODELS[model]))
    layouts: list[dict[str, Any]] = [SP, PP, {**PP, "parallel.vpp": 2}, {}]
    layouts += [TP] if model == "dense" else [EP]
    for layout in layouts:
        got = assemble(ranks(2).run(initial, {**MODELS[model], **layout}))
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(got[name], wanted[name]), (layout, name)
    assert all(value.std() > 0 or name.endswith("norm.weight") for name, value in wanted.items())
    other = assemble(ranks(1).run(initial, {**MODELS[model], "train.seed": 8}))
    assert all(name.endswith("norm.weight") or not torch.equal(other[name], wanted[name]) for name in wanted)
