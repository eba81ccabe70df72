"""The core-attention module: layout, layer numbers, tensor-parallel heads, documents, refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from oracle import inputs

import s2.megatron
from s2 import S2Pattern, s2_attention
from s2.megatron import S2CoreAttention

PATTERN = S2Pattern(num_heads=8, num_kv_heads=4, block_size=16, local_blocks=1, stride=8, rotate=2, dense_layers="first:1")
GROUPS: Any = SimpleNamespace(tp=None)


def config(**change: Any) -> TransformerConfig:
    fields = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "attention_dropout": 0.0}
    return TransformerConfig(**(fields | change))


def build(layer: int = 1, config_change: dict[str, Any] | None = None, **change: Any) -> S2CoreAttention:
    spec = ModuleSpec(module=S2CoreAttention, params={"pattern": PATTERN, "backend": "auto"} | change)
    module: S2CoreAttention = build_module(
        spec,
        config=config(**(config_change or {})),
        layer_number=layer,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=GROUPS,
    )
    return module


def test_layout_layer_and_documents() -> None:
    q, k, v, g, _ = inputs(96, 96, 8, 4, 8, 8, batch=2)
    for layer, pattern in [(1, PATTERN.for_layer(0)), (2, PATTERN.for_layer(1)), (3, PATTERN.for_layer(2))]:
        module = build(layer)
        leaves = [x.transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
        out = module(*leaves, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=None)
        assert out.shape == (96, 2, 64)
        want = s2_attention(q, k, v, pattern)
        assert isinstance(want, torch.Tensor)
        torch.testing.assert_close(out.view(96, 2, 8, 8).transpose(0, 1), want)
        out.backward(g.transpose(0, 1).reshape(96, 2, 64))
        assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)
    assert PATTERN.for_layer(0).is_dense
    cu = torch.tensor([0, 40, 96, 192], dtype=torch.int32)
    out = module(*leaves, cu)
    flat = [x.reshape(1, 192, *x.shape[2:]) for x in (q, k, v)]
    want = s2_attention(*flat, pattern, cu_seqlens_q=cu)
    assert isinstance(want, torch.Tensor)
    torch.testing.assert_close(out.view(96, 2, 8, 8).transpose(0, 1).reshape(1, 192, 8, 8), want)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_rank_takes_its_heads_of_the_global_pattern(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _, _ = (x.transpose(0, 1) for x in inputs(96, 96, 8, 4, 8, 8))
    whole = build(2)(q, k, v, None).view(96, 1, 8, 8)
    monkeypatch.setattr(s2.megatron, "get_pg_size", lambda group: world)
    parts = []
    for rank in range(world):
        monkeypatch.setattr(s2.megatron, "get_pg_rank", lambda group, rank=rank: rank)
        # With more ranks than key/value heads core shows the module as many groups as ranks.
        module = build(2, {"num_query_groups": max(4, world)})
        heads, kv = 8 // world, max(1, 4 // world)
        first_kv = rank * heads // 2
        out = module(q[:, :, rank * heads : (rank + 1) * heads], k[:, :, first_kv : first_kv + kv], v[:, :, first_kv : first_kv + kv], None)
        parts.append(out.view(96, 1, heads, 8))
    torch.testing.assert_close(torch.cat(parts, 2), whole)


def test_the_scale_is_core_s() -> None:
    assert build().softmax_scale == pytest.approx(8**-0.5)
    assert build(3, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}).softmax_scale == pytest.approx(8**-0.5)
    assert build(1, {"kv_channels": 32}).softmax_scale == pytest.approx(32**-0.5)


@pytest.mark.parametrize(
    ("config_change", "change", "message"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1: S2 attention has no dropout"),
        ({"num_attention_heads": 16, "hidden_size": 128}, {}, "num_heads=8: the model has 16 query heads"),
        ({"num_query_groups": 8}, {}, "num_kv_heads=4: the model has 8 key/value heads"),
        ({}, {"pattern": S2Pattern(num_heads=4, num_kv_heads=4, stride=4)}, "num_heads=4: the model has 8 query heads"),
    ],
)
def test_refusals(config_change: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(1, config_change, **change)


def test_masks_biases_and_packed_parameters_are_refused() -> None:
    q, k, v, _, _ = (x.transpose(0, 1) for x in inputs(32, 32, 8, 4, 8, 8))
    module = build()
    with pytest.raises(ValueError, match="attention_mask="):
        module(q, k, v, torch.ones(1, 1, 32, 32, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_bias"):
        module(q, k, v, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="packed_seq_params"):
        module(q, k, v, None, packed_seq_params=object())


def test_a_newer_core_may_pass_more_keywords() -> None:
    S2CoreAttention(config(), 1, pg_collection=GROUPS, pattern=PATTERN, k_channels=8, name="layer")
