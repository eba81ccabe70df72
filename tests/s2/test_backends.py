"""The table of back ends, the refusals of the call, and autocast."""

import logging
from typing import Any

import pytest
import torch
from oracle import inputs

from s2 import BlockMask, Request, S2Pattern, backends, explain, s2_attention, table

PATTERN = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)


def call(**change: Any) -> Any:
    q, k, v, _, _ = inputs(40, 40, 4, 2, 8, 8, dtype=torch.float32)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": PATTERN} | change
    return s2_attention(**arguments)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(40, 4, 8)}, r"shapes=q\(40, 4, 8\)"),
    ({"k": torch.zeros(1, 40, 2, 9)}, "shapes=.* do not agree"),
    ({"v": torch.zeros(1, 39, 2, 8)}, "shapes=.* do not agree"),
    ({"v": torch.zeros(1, 40, 2, 8, dtype=torch.float64)}, "dtype=.*must have one floating dtype"),
    ({"q": torch.zeros(1, 0, 4, 8)}, "every size must be positive"),
    ({"q": torch.zeros(1, 41, 4, 8)}, "q_len=41: exceeds k_len=40"),
    ({"q": torch.zeros(1, 40, 3, 8)}, "heads=3: must be a multiple of the 2"),
    ({"q": torch.zeros(1, 40, 2, 8)}, "heads=2: the pattern has 4 query heads"),
    ({"k": torch.zeros(1, 40, 1, 8), "v": torch.zeros(1, 40, 1, 8)}, "kv_heads=1: the pattern has 2"),
    ({"pattern": BlockMask(torch.ones(4, 2, 2, dtype=torch.bool), 16)}, "k_len=40: the mask describes 32 positions"),
    ({"backend": "cuda"}, "backend=cuda: is not one of auto"),
    ({"backend": "flex"}, "backend=flex: cannot serve this call: FlexAttention has no backward pass on cpu"),
    ({"backend": "sdpa"}, "backend=sdpa: cannot serve this call: it serves dense causal attention only"),
    ({"cu_seqlens_k": torch.tensor([0, 40], dtype=torch.int32)}, "needs cu_seqlens_q"),
    ({"cu_seqlens_q": torch.tensor([0, 40])}, r"cu_seqlens_q=\(2,\) torch.int64"),
    ({"cu_seqlens_q": torch.tensor([0, 30], dtype=torch.int32)}, "must rise from 0 to the 40 rows"),
    ({"cu_seqlens_q": torch.tensor([0, 30, 20, 40], dtype=torch.int32)}, "must rise from 0"),
    (
        {"cu_seqlens_q": torch.tensor([0, 30, 40], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 40], dtype=torch.int32)},
        "names other documents",
    ),
    (
        {"cu_seqlens_q": torch.tensor([0, 30, 40], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 20, 40], dtype=torch.int32)},
        "more queries than its 20 keys",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_calls_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as info:
        call(**change)
    assert "\n" not in str(info.value)


def test_packed_documents_need_batch_one() -> None:
    q, k, v, _, _ = inputs(40, 40, 4, 2, 8, 8, batch=2)
    with pytest.raises(ValueError, match="batch=2"):
        s2_attention(q, k, v, PATTERN, cu_seqlens_q=torch.tensor([0, 40], dtype=torch.int32))


def test_each_refusal_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_logged", set())
    with caplog.at_level(logging.INFO, logger="s2"):
        call()
        call()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages))
    assert any("flex is not used: FlexAttention has no backward pass on cpu; reference runs instead" in m for m in messages)


def test_explain_gives_choice_and_reasons_per_layer() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=2, dense_layers="first:1")
    rows = table(pattern, 3, kv_heads=2, d_k=32, d_v=32, packed=True)
    assert [row.backend for row in rows] == ["sdpa", "reference", "reference"]
    assert rows[1].refusals["sdpa"] == "it serves dense causal attention only"
    assert "flex" in rows[0].refusals
    (choice,) = explain([Request(pattern=pattern.for_layer(0), lse=True)])
    assert choice.backend == "reference"
    assert "log-sum-exp" in choice.refusals["sdpa"]


def test_flex_is_chosen_by_device_and_dtype() -> None:
    (choice,) = explain([Request(pattern=PATTERN, device="cuda", dtype="float64")])
    assert "float64" in choice.refusals["flex"]


def test_autocast_casts_like_torch_attention() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call()
    assert out.dtype == torch.bfloat16
    q, k, v, _, _ = inputs(40, 40, 4, 2, 8, 8, dtype=torch.float32)
    assert torch.equal(out, s2_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), PATTERN))


def test_custom_mask_kv_efficiency() -> None:
    assert BlockMask(PATTERN.block_mask(20), 16).is_kv_efficient()
    mask = torch.eye(6, dtype=torch.bool)[None]
    assert BlockMask(mask, 16).is_kv_efficient()
    mask[0, 4, 1] = True
    assert not BlockMask(mask, 16).is_kv_efficient()


@pytest.mark.parametrize(
    ("mask", "block", "message"),
    [
        (torch.ones(2, 2), 16, "mask="),
        (torch.ones(2, 2, 2), 16, "mask="),
        (torch.ones(2, 2, 2, dtype=torch.bool), 24, "block_size=24"),
    ],
)
def test_bad_custom_masks(mask: torch.Tensor, block: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockMask(mask, block)


def test_recomputation_in_the_backward_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v, g, _ = inputs(40, 40, 4, 2, 8, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plain = torch.autograd.grad(s2_attention(*leaves, PATTERN), leaves, g)
    again = torch.autograd.grad(checkpoint(s2_attention, *leaves, PATTERN, use_reentrant=False), leaves, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
