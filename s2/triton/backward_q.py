"""Backward kernels over tiles of queries: the row sums that both passes need, and dq over the forward's tiles."""

import triton
import triton.language as tl

from .index import key_tile, key_tiles, past_the_end, query_program, query_rows, stripe_key, token_mask
from .load import key_origin, load_keys, load_rows


@triton.jit(do_not_specialize=["rows", "q_len"])
def rows_kernel(  # type: ignore[no-untyped-def]
    out_ptr, g_ptr, lse_ptr, g_lse_ptr, row_lse_ptr, row_delta_ptr, inverse_scale, rows, q_len, heads, o_sb, o_ss, o_sh, g_sb, g_ss, g_sh,
    DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, HAS_G_LSE: tl.constexpr,
):  # fmt: skip
    """What each row adds to the products, (batch, heads, q_len), for BM rows of one head: -lse / scale and g_lse - rowsum(out * g).

    weights = exp(scale * (q k + row_lse)) and d_scores = weights * (g v + row_delta). Grid: cdiv(q_len, BM) * rows, with rows =
    batch * heads.
    """
    unit = tl.program_id(0) % rows
    first = (tl.program_id(0) // rows) * BM
    m = tl.arange(0, BM)
    batch, head = (unit // heads).to(tl.int64), (unit % heads).to(tl.int64)
    live = first + m < q_len
    dv = tl.arange(0, BDV)
    out = load_rows(out_ptr + batch * o_sb + head * o_sh, first, m, o_ss, dv, live, DV, BDV, True)
    g = load_rows(g_ptr + batch * g_sb + head * g_sh, first, m, g_ss, dv, live, DV, BDV, True)
    delta = -tl.sum(out.to(tl.float32) * g.to(tl.float32), 1)
    place = (batch * heads + head) * q_len + first + m
    if HAS_G_LSE:
        delta += tl.load(g_lse_ptr + place, mask=live, other=0.0)
    tl.store(row_delta_ptr + place, delta, mask=live)
    tl.store(row_lse_ptr + place, -inverse_scale * tl.load(lse_ptr + place, mask=live, other=0.0), mask=live)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    q, k, v, g, dq, lse2, delta, scale2, position, key, seen, local, r, masked, B: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr
):
    """Adds one tile of keys to dq. The pattern is evaluated, token by token, only when `masked`."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    d_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    if masked:
        scores = tl.where(token_mask(position[:, None], key[None, :], seen[None, :], local, r, B, S), scores, float("-inf"))
    weights = tl.math.exp2(scores * scale2 + lse2[:, None])
    d_scores = weights * (d_weights + delta[:, None])
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
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; grid, tiles and descriptors as in `forward_kernel`."""
    R: tl.constexpr = BM // PACK
    MANY: tl.constexpr = S > 1 and BN > B
    batch, head, kv_head, tile, q_start, queries, k_start, keys = query_program(
        tiles, documents, q_len, k_len, kv_heads, cu_q, cu_k, GROUP, PACK, R, DOCUMENTS)  # fmt: skip
    if tile * R >= queries:
        return

    slot, row, live, row_head = query_rows(head, tile, queries, R, BM)
    shift = keys - queries
    position = row + shift
    dk, dv, n = tl.arange(0, BDK), tl.arange(0, BDV), tl.arange(0, BN)
    batch64 = batch.to(tl.int64)
    q = load_rows(q_ptr + batch64 * q_sb + row_head[:, None] * q_sh, q_start + tile * R, slot, q_ss, dk, live, DK, BDK, True)
    g = load_rows(g_ptr + batch64 * g_sb + row_head[:, None] * g_sh, q_start + tile * R, slot, g_ss, dv, live, DV, BDV, True)
    k_base, k_row, k_column = key_origin(k_ptr, batch, kv_head, k_start, k_sb, k_ss, k_sh, k_rb, k_rh, k_cb, k_ch)
    v_base, v_row, v_column = key_origin(v_ptr, batch, kv_head, k_start, v_sb, v_ss, v_sh, v_rb, v_rh, v_cb, v_ch)
    place = (batch64 * (kv_heads * GROUP) + row_head) * q_len + q_start + row
    lse2 = tl.load(lse_ptr + place, mask=live, other=float("-inf")) * scale2
    delta = tl.load(delta_ptr + place, mask=live, other=0.0)

    r = tl.load(residue_ptr + head)
    last = tl.minimum(tile * R + R, queries) - 1 + shift
    local, stripe_keys, low, edges, middle_low, middles, diagonal_low, diagonals = key_tiles(tile * R + shift, last, r, B, L, S, BN)

    dq = tl.zeros([BM, BDK], tl.float32)
    stripes = stripe_keys // BN
    if MANY:
        inside = (n // B) * (S * B) + n % B
        for t in range(stripes):
            start = stripe_key(t * BN, r, B, S)
            k = load_keys(k_stripe, k_base, k_row, k_column, start, inside, k_ss, dk, live, DK, BDK, BN, False, TMA, True)
            v = load_keys(v_stripe, v_base, v_row, v_column, start, inside, v_ss, dv, live, DV, BDV, BN, False, TMA, True)
            dq = _update(q, k, v, g, dq, lse2, delta, scale2, position, n, n, local, r, False, B, S, PRECISION)
        rest = stripe_keys - stripes * BN
        for _tail in range(tl.minimum(rest, 1)):
            start = stripe_key(stripes * BN, r, B, S)
            k = load_rows(k_base, start, inside, k_ss, dk, n < rest, DK, BDK, True)
            v = load_rows(v_base, start, inside, v_ss, dv, n < rest, DV, BDV, True)
            dq = _update(q, k, v, g, dq, lse2, delta, scale2, position, start + inside, n < rest, local, r, True, B, S, PRECISION)
        stripes = 0
    end = stripes + middles + edges + diagonals
    beyond = past_the_end(diagonal_low, diagonals, keys, BN, TAIL)
    for t in range(end - beyond):
        start, masked = key_tile(t, stripes, middles, edges, low, middle_low, diagonal_low, r, B, S, BN)
        key = start + n
        k = load_keys(k_tile, k_base, k_row, k_column, start, n, k_ss, dk, key < keys, DK, BDK, BN, True, TMA, False)
        v = load_keys(v_tile, v_base, v_row, v_column, start, n, v_ss, dv, key < keys, DV, BDV, BN, True, TMA, False)
        dq = _update(q, k, v, g, dq, lse2, delta, scale2, position, key, key < keys, local, r, masked, B, S, PRECISION)
    if TAIL:
        for t in tl.range(end - beyond, end, num_stages=1):
            start, _masked = key_tile(t, stripes, middles, edges, low, middle_low, diagonal_low, r, B, S, BN)
            key = start + n
            k = load_rows(k_base, start, n, k_ss, dk, key < keys, DK, BDK, True)
            v = load_rows(v_base, start, n, v_ss, dv, key < keys, DV, BDV, True)
            dq = _update(q, k, v, g, dq, lse2, delta, scale2, position, key, key < keys, local, r, True, B, S, PRECISION)

    base = dq_ptr + batch64 * dq_sb + (q_start + tile * R).to(tl.int64) * dq_ss + row_head[:, None] * dq_sh
    target = base + slot[:, None] * dq_ss + dk[None, :]
    tl.store(target, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live[:, None] & (dk < DK)[None, :])
