"""One site of a federation in whole training steps: what it skips, freezes and balances, the same in every layout of its ranks."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Piece, assemble, build, gradients, make_rows, names, pieces, small_config, take_step
from torch import Tensor

STEPS = 3
EIGHT = {**MOE, "moe.experts": 8, "moe.top_k": 3, "federation.sites": 2, "optim.weight_decay": 0.3}
"""Experts for two sites; residents of site 1 lie scattered: 1, 3, 5, 7."""
SKIP = {**EIGHT, "moe.mode": "skip", "federation.replication": 1, "federation.policy": "strided", "federation.site": 1}
SP = {"parallel.tp": 2, "parallel.sp": True}


def figures(changes: dict[str, Any]) -> tuple[list[tuple[float, float, int]], dict[str, float]]:
    """Losses, gradient norms and tokens of some steps, and what the routers did in them."""
    import torch.distributed as dist

    from moe.load import ExpertLoad
    from train.engine.checkpoint import unwrap

    engine = build(small_config(changes))
    load = ExpertLoad([unwrap(chunk) for chunk in engine.chunks], engine.config.model.layers, engine.config.moe.experts)
    results = [take_step(engine, step) for step in range(STEPS)]
    assert all(result.updated for result in results)
    return [(result.loss, result.grad_norm, result.tokens) for result in results], load.figures(dist.group.WORLD)


def trained(changes: dict[str, Any], load: str | None = None) -> tuple[list[float], list[Piece], list[Piece]]:
    """Losses of some steps, and all that a checkpoint would hold before and after them."""
    engine = build(small_config(changes), load)
    before = pieces(engine)
    results = [take_step(engine, step) for step in range(STEPS)]
    assert all(result.updated for result in results)
    return [result.loss for result in results], before, pieces(engine)


def same(one: list[Any], other: list[Any]) -> None:
    got, want = (assemble([after for _, _, after in result]) for result in (one, other))
    assert got.keys() == want.keys() and len(got) > 100
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("layout", [{}, {"parallel.ep": 2}], ids=str)
def test_skipping_nothing_is_the_ordinary_layer_bit_for_bit(ranks: RankPools, layout: dict[str, Any]) -> None:
    pool = ranks(2 if layout else 1)
    full, skip = (pool.run(trained, {**EIGHT, "moe.mode": mode, **layout}) for mode in ("full", "skip"))
    assert full[0][0] == skip[0][0] and len(set(full[0][0])) == STEPS
    same(skip, full)


LAYOUTS: list[dict[str, Any]] = [{}, {"parallel.ep": 2}, {"parallel.pp": 2}, {**SP, "parallel.ep": 2}, {"train.recompute": "full"}]


@pytest.mark.parametrize(("gate", "layouts"), [("full", LAYOUTS), ("kept", LAYOUTS[1:2])], ids=["full", "kept"])
def test_a_sites_layouts_train_alike(ranks: RankPools, gate: str, layouts: list[dict[str, Any]]) -> None:
    changes = {**SKIP, "moe.gate": gate}
    ((want, routers),) = ranks(1).run(figures, changes)
    assert 0.3 < routers["skip_rate"] < 0.7 and 0.0 < routers["none_resident"] < 0.5
    assert 0.5 < routers["expert_entropy"] < 1.0 and {len(shares) for shares in routers["expert_load"].values()} == {8}
    for layout in layouts:
        for got, theirs in ranks(2).run(figures, {**changes, **layout}):
            for (loss, norm, tokens), (want_loss, want_norm, want_tokens) in zip(got, want, strict=True):
                assert tokens == want_tokens
                assert (loss, norm) == pytest.approx((want_loss, want_norm), rel=1e-5), layout
            # A token at the edge of two experts may fall the other way after a step.
            assert theirs["skip_rate"] == pytest.approx(routers["skip_rate"], abs=0.01), layout


def test_sites_begin_with_the_experts_of_a_run_of_one_site(ranks: RankPools) -> None:
    whole = assemble(ranks(1).run(begun, EIGHT | {"federation.sites": 1}))
    for site in (0, 1):
        mine = assemble(ranks(2).run(begun, {**SKIP, "federation.site": site, "parallel.ep": 2}))
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in mine if ".mlp.experts." in name}
        assert experts == {e for e in range(8) if e % 2 == site}
        for name, value in mine.items():
            assert torch.equal(value, whole[name]), name


def begun(changes: dict[str, Any]) -> list[Piece]:
    return pieces(build(small_config(changes)), optimizer=False)


FROZEN = {**SKIP, "moe.mode": "frozen"}


def moments(folder: str) -> str:
    """A checkpoint of a run that has trained every expert, so that foreign ones have momentum too."""
    from train.engine import checkpoint

    engine = build(small_config({**EIGHT, "federation.sites": 1}))
    take_step(engine, 50)
    return str(checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_experts_keep_every_bit_and_the_others_learn(ranks: RankPools, tmp_path: Path, precision: str) -> None:
    (seed,) = ranks(1).run(moments, str(tmp_path)) if precision == "fp32" else (None,)
    results: list[list[float]] = []
    layouts: list[dict[str, Any]] = [{}, {"parallel.distributed_optimizer": False}, {"parallel.ep": 2}, {"offload.mode": "stream"}]
    for layout in layouts:
        by_rank = ranks(2).run(trained, {**FROZEN, **layout, "train.precision": precision}, seed)
        before, after = (assemble([result[part] for result in by_rank]) for part in (1, 2))
        for name, value in after.items():
            if ".mlp.experts." in name and "exp_avg" not in name:
                foreign = int(name.split(".experts.")[1].split(".")[0]) % 2 == 0
                assert torch.equal(value, before[name]) == foreign, (layout, name)
        results.append(by_rank[0][0])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5 if precision == "fp32" else 1e-3)


BIAS = {**SKIP, "moe.bias_rate": 0.01, "moe.aux_coef": 0.0}


def biased(changes: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], str]:
    """The biases after some steps, the last of which had no finite loss, and a checkpoint of them."""
    from train.engine import checkpoint

    engine = build(small_config(changes))
    for step in range(STEPS):
        assert take_step(engine, step).updated
    after = biases(engine)
    with torch.no_grad():
        weight = next(parameter for name, parameter in names(engine) if name.endswith("input_layernorm.weight"))
        kept = weight.clone()
        weight.fill_(float("nan"))
        assert not take_step(engine, STEPS).updated
        weight.copy_(kept)
    assert all(torch.equal(value, after[name]) for name, value in biases(engine).items())
    return after, str(checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {}))


def loaded(changes: dict[str, Any], path: str) -> dict[str, Tensor]:
    return biases(build(small_config(changes), path))


def biases(engine: Any) -> dict[str, Tensor]:
    from train.engine.checkpoint import unwrap

    return {
        f"{number}.{name}": buffer.clone()
        for number, chunk in enumerate(engine.chunks)
        for name, buffer in unwrap(chunk).named_buffers()
        if name.endswith("router.expert_bias")
    }


@pytest.mark.parametrize("changes", [{}, SP, {"train.precision": "bf16", "train.recompute": "full"}], ids=str)
def test_biases_are_one_on_all_ranks_and_in_checkpoints(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    (first, path), (second, _) = ranks(2).run(biased, {**BIAS, **changes}, str(tmp_path))
    assert len(first) == 2
    alone_too = {key: value for key, value in changes.items() if key.startswith("train.")}
    (again,) = ranks(1).run(loaded, {**BIAS, **alone_too}, path)
    for name, value in first.items():
        assert value.dtype == torch.float32 and 0.005 < value.abs().max() <= 0.031
        assert torch.equal(value, second[name]) and torch.equal(value, again[name])
    if not changes:
        ((alone, _),) = ranks(1).run(biased, BIAS, str(tmp_path))
        assert all(torch.allclose(value, alone[name]) for name, value in first.items())


def masked_rows(changes: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a micro-batch of a row and one without valid targets, and of the row alone."""
    engine = build(small_config(changes))
    two = make_rows([3, 6], engine.config.train.seq_len)
    mask = two.loss_mask.clone()
    mask[1] = 0.0
    row = [make_rows([3], engine.config.train.seq_len)]
    return gradients(engine, [dataclasses.replace(two, loss_mask=mask)]), gradients(engine, row)


def test_rows_without_weight_leave_the_routers_losses_alone(ranks: RankPools) -> None:
    whole = {**MOE, "moe.aux_coef": 1.0, "moe.z_coef": 0.1, "parallel.distributed_optimizer": False}
    for changes in parallel(whole):
        size = 2 if len(changes) > len(whole) else 1
        for both, alone in ranks(size).run(masked_rows, changes):
            for name, value in alone.items():
                assert (both[name] - value).norm() <= 1e-5 * value.norm(), name


def parallel(changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield changes
    yield {**changes, **SP}
