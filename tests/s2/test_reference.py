"""The reference back end (the CPU training path) and the SDPA one against the dense float64 oracle, forward and every gradient."""

import time
from typing import Any

import pytest
import torch
from oracle import dense, gradients, inputs, packed_mask, token_mask
from torch.nn.functional import scaled_dot_product_attention

from s2 import BlockMask, S2Pattern, s2_attention

torch.set_num_threads(1)
CASES: list[tuple[dict[str, Any], int, int, int, int]] = [
    ({"num_heads": 4, "num_kv_heads": 4, "stride": 4, "local_blocks": 1}, 100, 100, 8, 8),
    ({"num_heads": 6, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, 300, 300, 16, 12),
    ({"num_heads": 10, "num_kv_heads": 2, "stride": 3, "local_blocks": 2, "per": "q_head", "offset": 1}, 130, 130, 8, 24),
    ({"num_heads": 4, "num_kv_heads": 4, "stride": 3, "local_blocks": 1, "dense_heads": 1}, 257, 257, 8, 8),
    ({"num_heads": 4, "num_kv_heads": 1, "stride": 1}, 65, 65, 8, 8),
    ({"num_heads": 4, "num_kv_heads": 4, "stride": 4, "local_blocks": 1}, 33, 300, 8, 8),
    ({"num_heads": 4, "num_kv_heads": 2, "stride": 1}, 1, 77, 8, 8),
    ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, 1, 1, 8, 8),
    ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, 1025, 1025, 8, 8),
]


def compare(pattern: Any, q_len: int, k_len: int, d_k: int, d_v: int, mask: torch.Tensor, batch: int = 2, **call: Any) -> None:
    """Output and gradients with and without lse against the oracle, float64."""
    kv_heads = call.pop("kv_heads", None) or pattern.local_kv_heads
    q, k, v, g, g_lse = inputs(q_len, k_len, pattern.local_heads, kv_heads, d_k, d_v, batch)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scale = d_k**-0.5
    want_out, want_lse = dense(q, k, v, mask, scale)
    seen = mask.any(-1)
    g_lse = g_lse * seen
    want = gradients((want_out,), (g,), leaves)
    want_both = gradients((want_out, want_lse.masked_fill(~seen, 0.0)), (g, g_lse), leaves)
    out = s2_attention(q, k, v, pattern, **call)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
    for got, right in zip(gradients((out,), (g,), leaves), want, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-11)
    if call.get("backend") == "sdpa":
        return
    out, lse = s2_attention(q, k, v, pattern, return_lse=True, **call)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    for got, right in zip(gradients((out, lse.masked_fill(~seen, 0.0)), (g, g_lse), leaves), want_both, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_output_and_gradients(case: tuple[dict[str, Any], int, int, int, int], backend: str) -> None:
    fields, q_len, k_len, d_k, d_v = case
    pattern = S2Pattern(block_size=16, **fields)
    if backend == "sdpa" and not pattern.is_dense:
        with pytest.raises(ValueError, match="dense causal attention only"):
            s2_attention(*inputs(q_len, k_len, pattern.num_heads, pattern.num_kv_heads, d_k, d_v)[:3], pattern, backend=backend)
        return
    compare(pattern, q_len, k_len, d_k, d_v, token_mask(pattern, q_len, k_len), backend=backend)


DOCUMENTS = [
    ([0, 70, 70, 71, 200, 328], None),
    ([0, 64, 128, 192], None),
    ([0, 10, 10, 42], [0, 60, 75, 200]),
    ([0, 512, 1024, 1536], None),
]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("stride", [1, 2])
def test_packed_documents(documents: tuple[list[int], list[int] | None], stride: int) -> None:
    cu_q, cu_k = documents[0], documents[1] or documents[0]
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=stride)
    call: dict[str, Any] = {"cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32)}
    if documents[1]:
        call["cu_seqlens_k"] = torch.tensor(cu_k, dtype=torch.int32)
    mask = packed_mask(pattern, cu_q, cu_k)
    compare(pattern, cu_q[-1], cu_k[-1], 8, 8, mask, batch=1, **call)
    if stride == 1:
        compare(pattern, cu_q[-1], cu_k[-1], 8, 8, mask, batch=1, backend="sdpa", **call)


def test_custom_masks_with_empty_rows_and_columns() -> None:
    mask = torch.rand(6, 12, 12, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[0, 3] = False
    mask[:, :, 2] = False
    mask[1] = False
    custom = BlockMask(mask, 16)
    for q_len, k_len in [(190, 190), (50, 100)]:
        tokens = token_mask(custom, q_len, k_len)
        assert not tokens.any(-1).all()
        compare(custom, q_len, k_len, 8, 8, tokens, kv_heads=2)
    cu = [0, 40, 100, 180]
    compare(custom, 180, 180, 8, 8, packed_mask(custom, cu, cu), batch=1, kv_heads=3, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32))


def test_an_empty_row_is_zero_with_zero_gradients() -> None:
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[:, 1] = False
    q, k, v, g, g_lse = inputs(64, 64, 2, 2, 8, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = s2_attention(*leaves, BlockMask(mask, 16), return_lse=True)
    assert (out[:, 16:32] == 0).all()
    assert (lse[:, :, 16:32] == float("-inf")).all()
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (g, g_lse))
    assert (dq[:, 16:32] == 0).all()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


def test_unattended_keys_have_no_effect_even_when_they_are_nan() -> None:
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    q, k, v, g, g_lse = inputs(16, 96, 2, 2, 8, 8)
    seen = token_mask(pattern, 16, 96).any(1)
    assert not seen.all()
    clean = s2_attention(q, k, v, pattern, return_lse=True)
    k[0][~seen.T], v[0][~seen.T] = float("nan"), float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = s2_attention(*leaves, pattern, return_lse=True)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])
    grads = torch.autograd.grad((out, lse), leaves, (g, g_lse))
    assert all(torch.isfinite(x).all() for x in grads)
    assert (grads[1][0][~seen.T] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lse", [False, True])
def test_narrow_inputs_accumulate_in_float32(dtype: torch.dtype, lse: bool) -> None:
    """Against the float64 oracle on the rounded inputs, the only error is the rounding of the results."""
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=2, stride=2)
    q, k, v, g, _ = inputs(300, 300, 4, 2, 32, 32, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want, want_lse = dense(*wide, token_mask(pattern, 300, 300), 32**-0.5)
    result = s2_attention(*leaves, pattern, return_lse=lse)
    out = result[0] if lse else result
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=2e-5)
    if lse:
        assert result[1].dtype == torch.float32
        torch.testing.assert_close(result[1].double(), want_lse, rtol=0, atol=2e-5)
    got = torch.autograd.grad(out, leaves, g)
    for a, b in zip(got, torch.autograd.grad(want, wide, g.double()), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=2 * eps, atol=max(1e-4, 2 * eps))


def test_non_contiguous_inputs_and_upstream_gradients() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    q, k, v, g, _ = inputs(80, 80, 4, 2, 8, 8, batch=2)
    want = s2_attention(q, k, v, pattern)
    strided = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0).requires_grad_() for x in (q, k, v)]
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(s2_attention(*strided, pattern), want)
    for lse in (False, True):
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        outs = [s2_attention(*leaves, pattern, return_lse=lse) for leaves in (plain, strided)]
        outs = [out[0] if lse else out for out in outs]
        wrong_layout = g.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        first, second = torch.autograd.grad(outs[0], plain, g), torch.autograd.grad(outs[1], strided, wrong_layout)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)
        expanded = torch.autograd.grad(s2_attention(*plain, pattern).sum(), plain)
        for a, b in zip(expanded, torch.autograd.grad(s2_attention(*plain, pattern), plain, torch.ones_like(g)), strict=True):
            torch.testing.assert_close(a, b)


def test_documents_do_not_leak() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, block_size=16, local_blocks=1, stride=4)
    cu = torch.tensor([0, 60, 150], dtype=torch.int32)
    q, k, v, _, _ = inputs(150, 150, 4, 4, 8, 8)
    before = s2_attention(q, k, v, pattern, cu_seqlens_q=cu)
    for x in (q, k, v):
        x[:, :60] = torch.randn_like(x[:, :60])
    after = s2_attention(q, k, v, pattern, cu_seqlens_q=cu)
    assert torch.equal(before[:, 60:], after[:, 60:])
    assert not torch.equal(before[:, :60], after[:, :60])
    torch.testing.assert_close(after[:, 60:], s2_attention(q[:, 60:], k[:, 60:], v[:, 60:], pattern))


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("dense_heads", [0, 1])
def test_tensor_parallel_shards_give_the_same_outputs_and_gradients(kv_heads: int, dense_heads: int) -> None:
    stride = kv_heads - dense_heads
    pattern = S2Pattern(num_heads=8, num_kv_heads=kv_heads, block_size=16, local_blocks=1, stride=stride, dense_heads=dense_heads)
    q, k, v, g, _ = inputs(150, 150, 8, kv_heads, 8, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    whole = s2_attention(*leaves, pattern)
    want = torch.autograd.grad(whole, leaves, g)
    for world in (2, 4):
        parts = []
        for rank in range(world):
            shard = pattern.shard(rank, world)
            heads = slice(shard.first_head, shard.first_head + shard.local_heads)
            kv = slice(shard.first_kv_head, shard.first_kv_head + shard.local_kv_heads)
            parts.append(s2_attention(q[:, :, heads], k[:, :, kv], v[:, :, kv], shard))
        out = torch.cat(parts, 2)
        torch.testing.assert_close(out, whole)
        for a, b in zip(torch.autograd.grad(out, leaves, g), want, strict=True):
            torch.testing.assert_close(a, b)


def test_memory_stays_far_under_the_score_matrix() -> None:
    """A packed batch of 16 rows of 512 and a long row, by what autograd saves: never tokens x tokens."""
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, block_size=16, local_blocks=2, stride=4)
    cu = torch.arange(0, 8193, 512, dtype=torch.int32)
    q, k, v, _, _ = inputs(8192, 8192, 4, 4, 16, 16, dtype=torch.float32)
    for call in ({"cu_seqlens_q": cu}, {}):
        saved: list[int] = []

        def pack(x: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = s2_attention(*(x.requires_grad_() for x in (q, k, v)), pattern, **call)
        out.sum().backward()
        assert sum(saved) < 4 * 8192 * 8192 * 4 / 8


def test_it_is_no_slower_than_torch_with_a_bool_mask() -> None:
    """At the demo's size: a training step's attention on one thread."""
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, block_size=16, local_blocks=2, stride=4)
    q, k, v, g, _ = (x.float() for x in inputs(512, 512, 4, 4, 32, 32, batch=2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = token_mask(pattern, 512, 512)[None]
    flat = [x.detach().reshape(1, 1024, 4, 32).requires_grad_() for x in leaves]
    cu = torch.tensor([0, 512, 1024], dtype=torch.int32)

    def torch_step() -> None:
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), attn_mask=mask)
        torch.autograd.grad(out.transpose(1, 2), leaves, g)

    def our_step() -> None:
        torch.autograd.grad(s2_attention(*flat, pattern, cu_seqlens_q=cu), flat, g.reshape(1, 1024, 4, 32))

    best = {torch_step: float("inf"), our_step: float("inf")}
    for _ in range(25):
        for step in best:
            start = time.perf_counter()
            step()
            best[step] = min(best[step], time.perf_counter() - start)
    assert best[our_step] < 1.1 * best[torch_step]
