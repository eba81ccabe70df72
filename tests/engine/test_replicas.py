"""Which ranks hold the same weights: replicas stay the same bits through training, slices do not become replicas."""

from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Piece, assemble, build, names, pieces, small_config, take_step
from torch import Tensor

SP = {"parallel.tp": 2, "parallel.sp": True}
STEPS = 3


def weights(changes: dict[str, Any]) -> dict[str, Tensor]:
    engine = build(small_config(changes))
    for step in range(STEPS):
        assert take_step(engine, step).updated
    return {name: parameter.detach().clone() for name, parameter in names(engine)}


def trained(changes: dict[str, Any]) -> list[Piece]:
    engine = build(small_config(changes))
    for step in range(STEPS):
        assert take_step(engine, step).updated
    return pieces(engine)


def moved(name: str, value: Tensor) -> bool:
    return not name.endswith("norm.weight") or bool((value != 1).any())


@pytest.mark.parametrize("changes", [{"parallel.tp": 2}, {**MOE, **SP}, {**MOE, **SP, "moe.shared_width": 32}], ids=str)
def test_tensor_parallel_ranks_share_replicated_weights_and_differ_in_slices(ranks: RankPools, changes: dict[str, Any]) -> None:
    first, second = ranks(2).run(weights, changes)
    assert first.keys() == second.keys()
    # Without expert parallelism every rank holds all experts.
    replicated = {name for name in first if name.endswith(("norm.weight", "router.weight")) or ".mlp.experts." in name}
    assert len(replicated) >= 9
    for name, value in first.items():
        assert torch.equal(value, second[name]) == (name in replicated), name
        assert moved(name, value), f"{name} was not trained"


def test_expert_parallel_ranks_differ_in_experts_only(ranks: RankPools) -> None:
    first, second = ranks(2).run(weights, {**MOE, "parallel.ep": 2})
    for name, value in first.items():
        assert torch.equal(value, second[name]) == (".mlp.experts." not in name), name


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("layout", [{}, SP, {"parallel.pp": 2}, {"parallel.ep": 2}], ids=str)
def test_every_replica_of_weights_masters_and_moments_is_the_same(ranks: RankPools, layout: dict[str, Any], distributed: bool) -> None:
    """`assemble` compares the bits of whatever several ranks hold."""
    changes = {**MOE, **layout, "model.tied": True, "train.precision": "bf16", "parallel.distributed_optimizer": distributed}
    whole = assemble(ranks(2).run(trained, changes))
    for name, value in whole.items():
        if name.startswith(("optimizer.state.fp32_param.", "optimizer.state.param.")):
            weight = name.split(".", 3)[3]
            assert whole[weight].dtype == torch.bfloat16 and value.dtype == torch.float32
            assert torch.equal(value.bfloat16(), whole[weight]), weight


@pytest.mark.parametrize("vpp", [1, 2])
def test_tied_weights_stay_equal_over_the_pipeline(ranks: RankPools, vpp: int) -> None:
    changes = {"model.tied": True, "parallel.pp": 2, "parallel.vpp": vpp}
    first, last = ranks(2).run(weights, changes)
    embedding, head = first["embedding.word_embeddings.weight"], last["output_layer.weight"]
    assert torch.equal(embedding, head)
    (alone,) = ranks(1).run(weights, {"model.tied": True})
    assert "output_layer.weight" not in alone
    torch.testing.assert_close(embedding, alone["embedding.word_embeddings.weight"], rtol=1e-4, atol=1e-6)
