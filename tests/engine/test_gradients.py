"""What a token's and a loss's weight in the gradient may not depend on: accumulation, ranks, stages, ragged masks."""

import dataclasses
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, build, gradients, make_rows, micro_batches, names, small_config, take_step
from torch import Tensor

WHOLE = {"parallel.distributed_optimizer": False}
NO_ROUTER_LOSS = {**MOE, **WHOLE, "moe.aux_coef": 0.0, "moe.z_coef": 0.0}


def steps(changes: dict[str, Any], count: int) -> tuple[list[tuple[float, float, int]], dict[str, Tensor]]:
    engine = build(small_config(changes))
    figures = [(result.loss, result.grad_norm, result.tokens) for result in (take_step(engine, step) for step in range(count))]
    return figures, {name: parameter.detach().clone() for name, parameter in names(engine)}


def gradients_of(changes: dict[str, Any], repeat: int = 1) -> dict[str, Tensor]:
    engine = build(small_config({**WHOLE, **changes}))
    return gradients(engine, micro_batches(engine, 0) * repeat)


def gradients_without_masked_rows(changes: dict[str, Any], row: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two rows of which `row` has no valid target, and of the other row alone."""
    engine = build(small_config({**WHOLE, **changes, "train.micro_batch": 1, "train.global_batch": 2}))
    both = [make_rows([number], engine.config.train.seq_len) for number in (3, 6)]
    both[row] = dataclasses.replace(both[row], loss_mask=torch.zeros_like(both[row].loss_mask))
    return gradients(engine, both), gradients(engine, [both[1 - row]])


def merged(by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dict of all ranks' tensors; where two ranks have one, the first's."""
    whole: dict[str, Tensor] = {}
    for part in by_rank:
        whole = {**part, **whole}
    return whole


def close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor's error against its own size: small gradients count as much as large ones."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        error = (got[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("rows", [1, 2])
def test_four_and_eight_micro_batches_with_ragged_masks_equal_one(ranks: RankPools, rows: int) -> None:
    ((want, weights),) = ranks(1).run(steps, {**NO_ROUTER_LOSS, "train.micro_batch": 8}, 3)
    ((got, accumulated),) = ranks(1).run(steps, {**NO_ROUTER_LOSS, "train.micro_batch": rows}, 3)
    masks = {float(make_rows([number], 96).loss_mask.sum()) for number in range(8)}
    assert len(masks) > 4, "the rows must differ in their valid targets"
    for one, other in zip(want, got, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    close(accumulated, weights, 1e-4)


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_without_valid_targets_has_no_weight(ranks: RankPools, row: int) -> None:
    ((both, alone),) = ranks(1).run(gradients_without_masked_rows, {}, row)
    close(both, alone, 1e-6)


def test_gradients_are_those_of_the_mean_loss_over_valid_tokens(ranks: RankPools) -> None:
    ((got, want),) = ranks(1).run(against_autograd, {**WHOLE, "train.micro_batch": 2})
    close(got, want, 1e-5)


def against_autograd(changes: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The engine's gradients, and torch's of cross entropy written out on the model's logits over all rows at once."""
    from train.engine.checkpoint import unwrap

    engine = build(small_config(changes))
    batches = micro_batches(engine, 0)
    got = gradients(engine, batches)
    model = unwrap(engine.chunks[0])
    engine.chunks[0].zero_grad_buffer()
    total, tokens = torch.zeros(()), 0.0
    for batch in batches:
        logits = model(batch.tokens, batch.positions, batch.cu_seqlens).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        valid = batch.loss_mask.flatten() > 0
        total = total + losses[valid].sum()
        tokens += float(valid.sum())
    parameters = dict(names(engine))
    want = torch.autograd.grad(total / tokens, list(parameters.values()))
    return got, dict(zip(parameters, want, strict=True))


def router_part(with_loss: dict[str, Tensor], without: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a router loss adds to the gradients of the routers."""
    return {name: with_loss[name] - without[name] for name in with_loss if "router" in name}


@pytest.mark.parametrize("loss", ["moe.aux_coef", "moe.z_coef"])
def test_the_routers_gradient_is_linear_in_its_coefficients(ranks: RankPools, loss: str) -> None:
    pool = ranks(1)
    none, once, twice = (pool.run(gradients_of, {**NO_ROUTER_LOSS, loss: coefficient})[0] for coefficient in (0.0, 0.02, 0.04))
    once, twice = router_part(once, none), router_part(twice, none)
    assert len(once) == 2 and all(value.abs().max() > 0 for value in once.values())
    close(twice, {name: 2 * value for name, value in once.items()}, 1e-4)


@pytest.mark.parametrize("loss", ["moe.aux_coef", "moe.z_coef"])
def test_the_routers_losses_weigh_the_same_in_every_layout(ranks: RankPools, loss: str) -> None:
    """Large coefficients, so that a factor of ranks, stages or micro-batches cannot hide behind the language model's gradient."""
    on, off = {**NO_ROUTER_LOSS, loss: 1.0}, NO_ROUTER_LOSS
    want = router_part(ranks(1).run(gradients_of, on)[0], ranks(1).run(gradients_of, off)[0])
    repeated = router_part(ranks(1).run(gradients_of, on, 3)[0], ranks(1).run(gradients_of, off, 3)[0])
    close(repeated, want, 1e-4)
    sp = {"parallel.tp": 2, "parallel.sp": True}
    for layout in ({}, {"parallel.pp": 2}, {"parallel.pp": 2, "parallel.vpp": 2}, {"parallel.ep": 2}, sp, {**sp, "parallel.ep": 2}):
        pool = ranks(2)
        got = router_part(merged(pool.run(gradients_of, {**on, **layout})), merged(pool.run(gradients_of, {**off, **layout})))
        close(got, want, 1e-4)
