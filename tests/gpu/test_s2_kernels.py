"""The kernels on a CUDA device against the float64 reference, with torch's own bf16 attention as the yardstick of error."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "s2"))
from oracle import inputs, packed_mask, token_mask

from s2 import BlockMask, Request, S2Pattern, explain, s2_attention

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": ({"num_heads": 4, "num_kv_heads": 4, "stride": 4, "local_blocks": 2}, {"q_len": 1025}),
    "block 128": ({"num_heads": 4, "num_kv_heads": 4, "stride": 4, "local_blocks": 1, "block_size": 128}, {"q_len": 1500}),
    "block 16": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 3, "block_size": 16}, {"q_len": 700}),
    "block 256": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1, "block_size": 256}, {"q_len": 2000}),
    "dense": ({"num_heads": 4, "num_kv_heads": 2, "stride": 1}, {"q_len": 777, "batch": 2}),
    "one": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, {"q_len": 1}),
    "63": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, {"q_len": 63}),
    "65": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, {"q_len": 65}),
    "127": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 1}, {"q_len": 127}),
    "group 4": ({"num_heads": 16, "num_kv_heads": 4, "stride": 4, "local_blocks": 2}, {"q_len": 1100}),
    "group 3": ({"num_heads": 6, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 600}),
    "group 7": ({"num_heads": 7, "num_kv_heads": 1, "stride": 1}, {"q_len": 300}),
    "per query head": ({"num_heads": 8, "num_kv_heads": 2, "stride": 8, "local_blocks": 2, "per": "q_head", "offset": 1}, {"q_len": 1100}),
    "dense head": ({"num_heads": 4, "num_kv_heads": 4, "stride": 3, "local_blocks": 1, "dense_heads": 1}, {"q_len": 900}),
    "few queries": ({"num_heads": 4, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 200, "k_len": 1000}),
    "one query": ({"num_heads": 4, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 1, "k_len": 1000}),
    "width 32": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 500, "d_k": 32, "d_v": 32}),
    "width 64": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 900, "d_k": 64, "d_v": 64}),
    "width 80": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 500, "d_k": 80, "d_v": 80}),
    "width 96, 40": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 500, "d_k": 96, "d_v": 40}),
    "width 192, 128": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 500, "d_k": 192, "d_v": 128}),
    "width 256": ({"num_heads": 2, "num_kv_heads": 2, "stride": 2, "local_blocks": 2}, {"q_len": 500, "d_k": 256, "d_v": 256}),
    "documents": (
        {"num_heads": 4, "num_kv_heads": 2, "stride": 2, "local_blocks": 1},
        {"cu_q": [0, 300, 300, 301, 1013, 1500], "batch": 1},
    ),
    "documents, dense": ({"num_heads": 4, "num_kv_heads": 2, "stride": 1}, {"cu_q": [0, 300, 300, 301, 1013, 1500], "batch": 1}),
    "documents, few queries": (
        {"num_heads": 4, "num_kv_heads": 4, "stride": 4, "local_blocks": 1},
        {"cu_q": [0, 100, 100, 400], "cu_k": [0, 600, 650, 1500], "batch": 1},
    ),
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float((got.double() - want).norm() / want.norm())


def all_results(call: Any, leaves: list[torch.Tensor], g: torch.Tensor, g_lse: torch.Tensor | None) -> list[torch.Tensor]:
    """[out, lse or nothing, dq, dk, dv] of one call that returns out, or (out, lse)."""
    outs = call(*leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    grads = [g.to(outs[0].dtype)] + ([g_lse.to(outs[1].dtype)] if len(outs) > 1 and g_lse is not None else [])
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_that_of_torch(name: str, dtype: torch.dtype) -> None:
    fields, sizes = CASES[name]
    if dtype is torch.float16 and name not in ("published", "documents", "width 256", "per query head"):
        pytest.skip("bf16 covers this size; float16 runs the same code")
    pattern = S2Pattern(**fields)
    cu_q, cu_k = sizes.get("cu_q"), sizes.get("cu_k", sizes.get("cu_q"))
    q_len = cu_q[-1] if cu_q else sizes["q_len"]
    k_len = cu_k[-1] if cu_k else sizes.get("k_len", q_len)
    d_k, d_v, batch = sizes.get("d_k", 128), sizes.get("d_v", 128), sizes.get("batch", 2)
    q, k, v, g, g_lse = (x.cuda() for x in inputs(q_len, k_len, pattern.num_heads, pattern.num_kv_heads, d_k, d_v, batch))
    q, k, v, g = (x.to(dtype) for x in (q, k, v, g))
    documents = {}
    if cu_q and cu_k:
        documents = {f"cu_seqlens_{x}": torch.tensor(cu, dtype=torch.int32, device="cuda") for x, cu in (("q", cu_q), ("k", cu_k))}
    mask = (packed_mask(pattern, cu_q, cu_k) if cu_q and cu_k else token_mask(pattern, q_len, k_len)).cuda()

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = all_results(lambda *x: s2_attention(*x, pattern, return_lse=True, backend="reference", **documents), wide, g, g_lse)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = all_results(lambda *x: s2_attention(*x, pattern, return_lse=True, backend="triton", **documents), leaves, g, g_lse)
    plain = all_results(lambda *x: s2_attention(*x, pattern, backend="triton", **documents), leaves, g, None)
    want_plain = all_results(lambda *x: s2_attention(*x, pattern, backend="reference", **documents), wide, g, None)

    def torch_attention(*x: torch.Tensor) -> torch.Tensor:
        a, b, c = (y.transpose(1, 2) for y in x)
        group = pattern.group
        out = scaled_dot_product_attention(a, b.repeat_interleave(group, 1), c.repeat_interleave(group, 1), attn_mask=mask[None])
        return out.transpose(1, 2)

    base = all_results(torch_attention, leaves, g, None)
    assert torch.isfinite(got[1]).all()
    torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=2e-3)
    for what, a, b, c in zip(("out", "dq", "dk", "dv"), plain, want_plain, base, strict=True):
        assert a.dtype == dtype
        error, yardstick = relative(a, b), relative(c, b)
        assert error <= 2 * yardstick + 1e-4, (what, error, yardstick)
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert relative(a, b) < 0.02, (what, relative(a, b))


def test_float32_is_exact_to_float32() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, stride=2, local_blocks=1)
    q, k, v, g, g_lse = (x.cuda() for x in inputs(500, 500, 4, 2, 64, 64))
    want = all_results(
        lambda *x: s2_attention(*x, pattern, return_lse=True, backend="reference"), [x.requires_grad_() for x in (q, k, v)], g, g_lse
    )
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    got = all_results(lambda *x: s2_attention(*x, pattern, return_lse=True, backend="triton"), leaves, g, g_lse)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-5


def bf16(q_len: int, heads: int, kv_heads: int, d: int = 128, batch: int = 1, k_len: int | None = None) -> list[torch.Tensor]:
    return [x.cuda().bfloat16() for x in inputs(q_len, k_len or q_len, heads, kv_heads, d, d, batch)[:4]]


def test_two_runs_are_bitwise_equal_and_outputs_fully_written() -> None:
    pattern = S2Pattern(num_heads=8, num_kv_heads=4, stride=4, local_blocks=2)
    q, k, v, g = bf16(3001, 8, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs = []
    for _ in range(3):
        poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(4)]
        del poison
        ones = torch.ones(1, 8, 3001, device="cuda")
        runs.append(all_results(lambda *x: s2_attention(*x, pattern, return_lse=True, backend="triton"), leaves, g, ones))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    assert all(torch.isfinite(x).all() for x in runs[0])


def test_unattended_keys_are_never_read() -> None:
    pattern = S2Pattern(num_heads=2, num_kv_heads=2, stride=2, local_blocks=2)
    q, k, v, g = bf16(64, 2, 2, k_len=1024)
    seen = token_mask(pattern, 64, 1024).any(1)
    for head in range(2):
        k[0, ~seen[head].cuda(), head] = float("nan")
        v[0, ~seen[head].cuda(), head] = float("nan")
    got = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), [x.requires_grad_() for x in (q, k, v)], g, None)
    assert all(torch.isfinite(x).all() for x in got)
    for head in range(2):
        assert (got[2][0, ~seen[head].cuda(), head] == 0).all()


@pytest.mark.parametrize("stride", [1, 4])
def test_nan_stays_in_its_document_and_its_sequence(stride: int) -> None:
    """Tiles read past a document's end by descriptor; what stands there must not reach it, as 0 times NaN would."""
    pattern = S2Pattern(num_heads=8, num_kv_heads=4, stride=stride, local_blocks=2)
    bounds = torch.tensor([0, 300, 1013, 1100], dtype=torch.int32, device="cuda")
    q, k, v, g = bf16(1100, 8, 4)
    clean = all_results(
        lambda *x: s2_attention(*x, pattern, cu_seqlens_q=bounds, backend="triton"), [x.requires_grad_() for x in (q, k, v)], g, None
    )
    spoiled = [x.detach().clone() for x in (q, k, v)]
    upstream = g.clone()
    for x in (*spoiled, upstream):
        x[:, 300:1013] = float("nan")
    leaves = [x.requires_grad_() for x in spoiled]
    got = all_results(lambda *x: s2_attention(*x, pattern, cu_seqlens_q=bounds, backend="triton"), leaves, upstream, None)
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[:, :300], b[:, :300])
        assert torch.equal(a[:, 1013:], b[:, 1013:])
    pair = [torch.cat([x.detach(), torch.full_like(x, float("nan"))]) for x in (q, k, v, g)]
    leaves = [x.requires_grad_() for x in pair[:3]]
    alone = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), [x.requires_grad_() for x in (q, k, v)], g, None)
    both = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), leaves, pair[3], None)
    assert all(torch.equal(a[:1], b) for a, b in zip(both, alone, strict=True))


def test_strided_inputs_and_gradients() -> None:
    """Megatron's [s, b, h, d], a fused qkv, and an expanded upstream gradient."""
    pattern = S2Pattern(num_heads=8, num_kv_heads=4, stride=4, local_blocks=2)
    q, k, v, g = bf16(900, 8, 4, batch=2)
    want = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), [x.requires_grad_() for x in (q, k, v)], g, None)
    sbhd = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    odd = g.transpose(1, 3).contiguous().transpose(1, 3)
    fused = torch.cat([q.unflatten(2, (4, 2)), k[:, :, :, None], v[:, :, :, None]], 3).detach()
    parts = [fused[:, :, :, :2].flatten(2, 3), fused[:, :, :, 2], fused[:, :, :, 3]]
    assert not parts[2].is_contiguous()
    for leaves, upstream in ((sbhd, odd), ([x.requires_grad_() for x in parts], g)):
        got = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), leaves, upstream, None)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ones = [x.detach().requires_grad_() for x in (q, k, v)]
    s2_attention(*ones, pattern, backend="triton").sum().backward()
    same = torch.autograd.grad(s2_attention(*ones, pattern, backend="triton"), ones, torch.ones_like(g))
    assert all(torch.equal(a.grad, b) for a, b in zip(ones, same, strict=True))


def test_compile_autocast_recompute_and_new_lengths() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=4, local_blocks=2)

    def call(*x: torch.Tensor) -> Any:
        return s2_attention(*x, pattern, backend="triton")

    q, k, v, g = bf16(600, 4, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = all_results(call, leaves, g, None)
    for other in (torch.compile(call), lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)):
        assert all(torch.equal(a, b) for a, b in zip(all_results(other, leaves, g, None), want, strict=True))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = call(q.float(), k.float(), v.float())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want[0])

    from s2.triton.forward import forward_kernel

    before = sum(len(cache[0]) for cache in forward_kernel.device_caches.values())
    for length in (601, 613, 1000, 1):
        call(*bf16(length, 4, 4)[:3])
    assert sum(len(cache[0]) for cache in forward_kernel.device_caches.values()) == before
    for length in (1024, 1152, 2048):  # whole tiles: one more kernel, for all of them
        call(*bf16(length, 4, 4)[:3])
    assert sum(len(cache[0]) for cache in forward_kernel.device_caches.values()) == before + 1


def test_offsets_past_two_to_the_31_and_wide_grids() -> None:
    """A row of 2.4 G elements, 65,536 programs or more: the last rows equal those computed alone."""
    pattern = S2Pattern(num_heads=64, num_kv_heads=64, stride=64, local_blocks=2)
    length = 300_000
    q, k, v = (torch.randn(1, length, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 1 << 31
    out = s2_attention(q, k, v, pattern, backend="triton")
    tail = s2_attention(q[:, -40:], k, v, pattern, backend="triton")
    torch.testing.assert_close(out[:, -40:], tail, rtol=2e-2, atol=2e-3)
    exact = s2_attention(q[:, -40:].float(), k.float()[:, :, :], v.float(), pattern, backend="reference")
    assert relative(tail, exact.double()) < 0.01


def test_extra_memory_is_linear() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=4, local_blocks=2)
    peaks = []
    for length in (16384, 32768):
        q, k, v, g = (torch.randn(1, length, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), leaves, g, None)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        results = all_results(lambda *x: s2_attention(*x, pattern, backend="triton"), leaves, g, None)
        peaks.append(torch.cuda.max_memory_allocated() - start)
        del results
    assert peaks[1] <= 2.1 * peaks[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stride", [1, 4])
def test_flex_agrees(stride: int, packed: bool) -> None:
    pattern = S2Pattern(num_heads=8, num_kv_heads=4, stride=stride, local_blocks=2)
    q, k, v, g = bf16(1024, 8, 4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call: dict[str, Any] = {"return_lse": True}
    if packed:
        call["cu_seqlens_q"] = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
    g_lse = torch.randn(1, 8, 1024, device="cuda")
    first = all_results(lambda *x: s2_attention(*x, pattern, backend="flex", **call), leaves, g, g_lse)
    second = all_results(lambda *x: s2_attention(*x, pattern, backend="reference", **call), leaves, g, g_lse)
    for a, b in zip(first, second, strict=True):
        assert relative(a, b.double()) < 0.01


def test_flex_with_a_custom_mask_and_fewer_queries() -> None:
    mask = torch.rand(4, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    custom = BlockMask(mask | torch.eye(16, dtype=torch.bool), 64)
    for q_len in (1024, 500):
        q, k, v, g = bf16(q_len, 4, 4, k_len=1024)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        first = all_results(lambda *x: s2_attention(*x, custom, backend="flex"), leaves, g, None)
        second = all_results(lambda *x: s2_attention(*x, custom, backend="reference"), leaves, g, None)
        for a, b in zip(first, second, strict=True):
            assert relative(a, b.double()) < 0.01


def test_the_table_chooses_the_kernels() -> None:
    pattern = S2Pattern(num_heads=4, num_kv_heads=4, stride=4)
    (choice,) = explain([Request(pattern=pattern, device="cuda", dtype="bfloat16", kv_heads=4, d_k=128, d_v=128, packed=True)])
    assert choice.backend == "triton"


MASKED: dict[str, dict[str, Any]] = {
    "block 64": {"q_len": 1000, "block": 64},
    "block 16": {"q_len": 300, "block": 16},
    "block 256": {"q_len": 1500, "block": 256},
    "fewer queries": {"q_len": 300, "k_len": 1000, "block": 64},
    "group": {"q_len": 700, "block": 128, "kv_heads": 2},
    "documents": {"q_len": 1013, "block": 64, "bounds": [0, 300, 300, 301, 1013]},
    "width 80": {"q_len": 500, "block": 64, "d": 80},
    "width 256": {"q_len": 500, "block": 64, "d": 256},
}


@pytest.mark.parametrize("name", MASKED)
def test_custom_masks_with_empty_rows_and_columns(name: str) -> None:
    case = MASKED[name]
    q_len, block, kv_heads = case["q_len"], case["block"], case.get("kv_heads", 4)
    k_len = case.get("k_len", q_len)
    blocks = -(-k_len // block)
    mask = torch.rand(4, blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 1], mask[:, :, 2], mask[-1] = False, False, False
    custom = BlockMask(mask.cuda(), block)
    q, k, v, g = bf16(q_len, 4, kv_heads, case.get("d", 128), k_len=k_len)
    call: dict[str, Any] = {"return_lse": True}
    if "bounds" in case:
        call["cu_seqlens_q"] = torch.tensor(case["bounds"], dtype=torch.int32, device="cuda")
    results = []
    for backend in ("triton", "reference"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = s2_attention(*leaves, custom, backend=backend, **call)
        results.append([out, lse, *torch.autograd.grad(out, leaves, g)])
    empty = results[1][1] == float("-inf")
    assert empty.any()
    assert torch.equal(results[0][1] == float("-inf"), empty)
    assert not results[0][0].transpose(1, 2)[empty].any()
    for n, (a, b) in enumerate(zip(*results, strict=True)):
        a, b = (x.masked_fill(empty, 0.0) if n == 1 else x for x in (a, b))
        assert torch.isfinite(a).all()
        assert relative(a, b.double()) < 0.01
