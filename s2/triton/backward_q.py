"""Backward kernels over tiles of queries: the row sums that both passes need, and dq over the forward's tiles."""

import triton
import triton.language as tl

from .index import key_tiles, query_program, stripe_key
from .load import load_rows, load_stripes


@triton.jit(do_not_specialize=["rows", "q_len"])
def delta_kernel(  # type: ignore[no-untyped-def]
    out_ptr, g_ptr, g_lse_ptr, delta_ptr, rows, q_len, heads, o_sb, o_ss, o_sh, g_sb, g_ss, g_sh,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, HAS_G_LSE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * g) - g_lse, (batch, heads, q_len), of BM rows of one head: d_scores = weights * (d_weights - delta).

    Grid: cdiv(q_len, BM) * batch * heads; `rows` is batch * heads.
    """
    unit = tl.program_id(0) % rows
    first = (tl.program_id(0) // rows) * BM
    m = tl.arange(0, BM)
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    live = first + m < q_len
    dv = tl.arange(0, BDV)
    out = load_rows(out_ptr + batch * o_sb + head * o_sh, first, m, o_ss, dv, live, DV, BDV, True)
    g = load_rows(g_ptr + batch * g_sb + head * g_sh, first, m, g_ss, dv, live, DV, BDV, True)
    delta = tl.sum(out.to(tl.float32) * g.to(tl.float32), 1)
    place = (batch * heads + head) * q_len + first + m
    if HAS_G_LSE:
        delta -= tl.load(g_lse_ptr + place, mask=live, other=0.0)
    tl.store(delta_ptr + place, delta, mask=live)


@triton.jit
def _update(q, k, v, g, dq, lse2, delta, scale2, keep, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds one tile of keys to dq. `keep` (rows, keys) is read only when MASKED."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    d_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    weights = tl.math.exp2(scores * scale2 - lse2[:, None])
    if MASKED:
        weights = tl.where(keep, weights, 0.0)
    d_scores = weights * (d_weights - delta[:, None])
    return tl.dot(d_scores.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len"])
def dq_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, k_tile, k_stripe, v_tile, v_stripe, dq_ptr, lse_ptr, delta_ptr, residue_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, kv_heads,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, g_sb, g_ss, g_sh, dq_sb, dq_ss, dq_sh,
    k_rb, k_rh, k_cb, k_ch, v_rb, v_rh, v_cb, v_ch,
    scale2, scale,
    GROUP: tl.constexpr, PACK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; grid, tiles and descriptors as in `forward_kernel`."""
    R: tl.constexpr = BM // PACK
    MANY: tl.constexpr = BN > B
    batch, head, kv_head, tile, q_start, queries, k_start, keys = query_program(
        tiles, documents, q_len, k_len, kv_heads, cu_q, cu_k, GROUP, PACK, R, DOCUMENTS)  # fmt: skip
    if tile * R >= queries:
        return

    slot = tl.arange(0, BM)
    row = tile * R + slot % R
    live = row < queries
    row_head = (head + slot // R).to(tl.int64)
    shift = keys - queries
    position = row + shift
    dk, dv, n = tl.arange(0, BDK), tl.arange(0, BDV), tl.arange(0, BN)
    batch64, kv_head64 = batch.to(tl.int64), kv_head.to(tl.int64)
    q = load_rows(q_ptr + batch64 * q_sb + row_head[:, None] * q_sh, q_start + tile * R, slot % R, q_ss, dk, live, DK, BDK, True)
    g = load_rows(g_ptr + batch64 * g_sb + row_head[:, None] * g_sh, q_start + tile * R, slot % R, g_ss, dv, live, DV, BDV, True)
    k_base = k_ptr + batch64 * k_sb + kv_head64 * k_sh + tl.cast(k_start, tl.int64) * k_ss
    v_base = v_ptr + batch64 * v_sb + kv_head64 * v_sh + tl.cast(k_start, tl.int64) * v_ss
    k_row, k_column = batch * k_rb + kv_head * k_rh + k_start, batch * k_cb + kv_head * k_ch
    v_row, v_column = batch * v_rb + kv_head * v_rh + k_start, batch * v_cb + kv_head * v_ch
    place = (batch64 * (kv_heads * GROUP) + row_head) * q_len + q_start + row
    lse2 = tl.load(lse_ptr + place, mask=live, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + place, mask=live, other=0.0)

    r = tl.load(residue_ptr + head)
    last = tl.minimum(tile * R + R, queries) - 1 + shift
    local, stripe_keys, low, edges, middle_low, middles, diagonal_low, diagonals = key_tiles(tile * R + shift, last, r, B, L, S, BN)

    dq = tl.zeros([BM, BDK], tl.float32)
    whole_stripes = stripe_keys // BN
    inside = (n // B) * (S * B) + n % B
    if S > 1:
        for t in range(whole_stripes):
            start = stripe_key(t * BN, r, B, S)
            if TMA:
                k = load_stripes(k_stripe, k_row + start, k_column, BN, BDK, MANY)
                v = load_stripes(v_stripe, v_row + start, v_column, BN, BDV, MANY)
            else:
                k = load_rows(k_base, start, inside, k_ss, dk, live, DK, BDK, False)
                v = load_rows(v_base, start, inside, v_ss, dv, live, DV, BDV, False)
            dq = _update(q, k, v, g, dq, lse2, delta, scale2, live, False, PRECISION)
    for t in range(middles):
        start = middle_low + t * BN
        if TMA:
            k = k_tile.load([k_row + start, k_column])
            v = v_tile.load([v_row + start, v_column])
        else:
            k = load_rows(k_base, start, n, k_ss, dk, live, DK, BDK, False)
            v = load_rows(v_base, start, n, v_ss, dv, live, DV, BDV, False)
        dq = _update(q, k, v, g, dq, lse2, delta, scale2, live, False, PRECISION)
    rest = stripe_keys - whole_stripes * BN
    tails = tl.minimum(rest, 1)
    for t in range(tails + edges + diagonals):
        u = t - tails
        start = tl.where(u < edges, low + u * BN, diagonal_low + (u - edges) * BN)
        start = tl.where(t < tails, stripe_key(whole_stripes * BN, r, B, S), start)
        offset = tl.where(t < tails, inside, n)
        key = start + offset
        seen = tl.where(t < tails, n < rest, key < keys)
        k = load_rows(k_base, start, offset, k_ss, dk, seen, DK, BDK, True)
        v = load_rows(v_base, start, offset, v_ss, dv, seen, DV, BDV, True)
        keep = position[:, None] // B - (key // B)[None, :] < local
        if S > 1:
            keep = keep | ((key // B) % S == r)[None, :]
        keep = keep & seen[None, :] & (key[None, :] <= position[:, None])
        dq = _update(q, k, v, g, dq, lse2, delta, scale2, keep, True, PRECISION)

    base = dq_ptr + batch64 * dq_sb + (q_start + tile * R).to(tl.int64) * dq_ss + row_head[:, None] * dq_sh
    target = base + (slot % R)[:, None] * dq_ss + dk[None, :]
    tl.store(target, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live[:, None] & (dk < DK)[None, :])
