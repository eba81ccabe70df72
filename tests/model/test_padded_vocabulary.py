"""A padded vocabulary: padding has no probability, no gradient and no influence on the loss, whatever the tensor-parallel size."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from small_engine import build, micro_batches, small_config, take_step
from torch import Tensor

SIZE = {"model.width": 96, "model.ffn_width": 96, "model.heads": 6, "model.kv_heads": 3, "model.vocab_size": 1000}
VOCABULARY, PADDED = 1000, {1: 1024, 3: 1152}


def figures(changes: dict[str, Any], steps: int) -> list[tuple[float, float]]:
    engine = build(small_config({**SIZE, **changes}))
    return [(result.loss, result.grad_norm) for result in (take_step(engine, step) for step in range(steps))]


def with_loud_padding(changes: dict[str, Any]) -> tuple[float, Tensor, int]:
    """Loss, logits and padded size when the head's padding rows would win every argmax; asserts that training leaves them alone."""
    from train.engine.checkpoint import unwrap

    engine = build(small_config({**SIZE, **changes}))
    model = unwrap(engine.chunks[0])
    weight = model.output_layer.weight
    tp, rank = engine.ranks.groups.tp.size(), engine.ranks.groups.tp.rank()
    part = model.padded_vocab // tp
    padding = torch.arange(rank * part, (rank + 1) * part) >= VOCABULARY
    with torch.no_grad():
        weight[padding] = 50.0 * torch.sign(torch.randn(int(padding.sum()), weight.shape[1]))
    engine.optimizer.reload_model_params()
    batch = micro_batches(engine, 0)[0]
    with torch.no_grad():
        local = model(batch.tokens, batch.positions, batch.cu_seqlens)
    before = weight.detach().clone()
    loss = take_step(engine, 0, lr=1e-2).loss
    decay = 1 - 1e-2 * engine.config.optim.weight_decay
    torch.testing.assert_close(weight.detach()[padding], before[padding] * decay)
    parts = [torch.empty_like(local) for _ in range(tp)]
    dist.all_gather(parts, local.contiguous(), group=engine.ranks.groups.tp)
    return loss, torch.cat(parts, dim=-1), model.padded_vocab


@pytest.mark.parametrize("tp", [1, 3])
def test_padding_is_never_emitted(ranks: RankPools, tp: int) -> None:
    (want, *_) = ranks(1).run(figures, {}, 1)[0]
    for loss, logits, padded in ranks(tp).run(with_loud_padding, {"parallel.tp": tp}):
        assert padded == PADDED[tp] and logits.shape[-1] == padded
        probabilities = logits.double().softmax(-1)
        assert float(probabilities[..., VOCABULARY:].max()) == 0.0
        assert int(logits.argmax(-1).max()) < VOCABULARY
        torch.testing.assert_close(probabilities[..., :VOCABULARY].sum(-1), torch.ones(logits.shape[:-1], dtype=torch.float64))
        assert loss == pytest.approx(want[0], rel=1e-5)


def test_three_tensor_parallel_ranks_train_like_one(ranks: RankPools) -> None:
    (want,) = ranks(1).run(figures, {}, 3)
    for got in ranks(3).run(figures, {"parallel.tp": 3}, 3):
        for one, other in zip(want, got, strict=True):
            assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "layout"), [(1, {"parallel.tp": 2}), (1, {"parallel.tp": 2, "parallel.sp": True}), (2, {"parallel.tp": 4})]
)
def test_fewer_key_value_heads_than_tensor_parallel_ranks(ranks: RankPools, kv_heads: int, layout: dict[str, Any]) -> None:
    changes = {"model.width": 64, "model.heads": 4, "model.kv_heads": kv_heads, "model.vocab_size": 120, "attention.rotate": 2}
    (want,) = ranks(1).run(figures, changes, 3)
    for got in ranks(layout["parallel.tp"]).run(figures, {**changes, **layout}, 3):
        for one, other in zip(want, got, strict=True):
            assert other == pytest.approx(one, rel=1e-5)
