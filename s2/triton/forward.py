"""Forward kernel: streaming softmax over exactly the key tiles that a tile of queries needs.

A program owns BM rows: R = BM / PACK positions of PACK query heads that share a key/value head and a pattern (row // R is the head), so
that a key tile is read once for all of them. Stripe tiles gather several key blocks when a block is smaller than a tile. Only tiles on the
diagonal, at the window's edge and the last stripe tile compute a mask. Softmax is in base 2 with float32 sums.

With TMA, `k_tile`, `v_tile` are descriptors of [BN, width] tiles and `k_stripe`, `v_stripe` of stripe tiles; a tile's row is
batch * rb + head * rh + key and its column batch * cb + head * ch, with (rb, rh, cb, ch) from `descriptors.py`.
"""

import triton
import triton.language as tl

from .index import key_tile, key_tiles, past_the_end, query_program, query_rows, stripe_key, token_mask
from .load import key_origin, load_keys, load_rows


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    q, k, v, acc, top, total, scale2, position, key, seen, local, r,
    B: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: new (acc, running maximum, running sum). The pattern is evaluated, token by token, only when MASKED."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(token_mask(position[:, None], key[None, :], seen[None, :], local, r, B, S), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale2)
    base = new_top
    if MASKED:
        # A row that has seen no key yet keeps -inf; subtracting 0 instead gives weights of 0, not NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.math.exp2(scores * scale2 - base[:, None])
    decay = tl.math.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len"])
def forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_tile, k_stripe, v_tile, v_stripe, out_ptr, lse_ptr, residue_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, kv_heads,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, o_sb, o_ss, o_sh,
    k_rb, k_rh, k_cb, k_ch, v_rb, v_rh, v_cb, v_ch,
    scale2,
    GROUP: tl.constexpr, PACK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries. Grid: tiles * batch * heads / PACK."""
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
    q_base = q_ptr + batch64 * q_sb + row_head[:, None] * q_sh
    q = load_rows(q_base, q_start + tile * R, slot, q_ss, dk, live, DK, BDK, True)
    k_base, k_row, k_column = key_origin(k_ptr, batch, kv_head, k_start, k_sb, k_ss, k_sh, k_rb, k_rh, k_cb, k_ch)
    v_base, v_row, v_column = key_origin(v_ptr, batch, kv_head, k_start, v_sb, v_ss, v_sh, v_rb, v_rh, v_cb, v_ch)

    r = tl.load(residue_ptr + head)
    last = tl.minimum(tile * R + R, queries) - 1 + shift
    local, stripe_keys, low, edges, middle_low, middles, diagonal_low, diagonals = key_tiles(tile * R + shift, last, r, B, L, S, BN)

    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    stripes = stripe_keys // BN
    # A stripe tile of several blocks has a layout of its own, and the last one may be short; otherwise one loop takes all whole tiles.
    if MANY:
        inside = (n // B) * (S * B) + n % B
        for t in range(stripes):
            start = stripe_key(t * BN, r, B, S)
            k = load_keys(k_stripe, k_base, k_row, k_column, start, inside, k_ss, dk, live, DK, BDK, BN, False, TMA, True)
            v = load_keys(v_stripe, v_base, v_row, v_column, start, inside, v_ss, dv, live, DV, BDV, BN, False, TMA, True)
            acc, top, total = _update(q, k, v, acc, top, total, scale2, position, n, n, local, r, B, S, PRECISION, False)
        rest = stripe_keys - stripes * BN
        for _tail in range(tl.minimum(rest, 1)):
            start = stripe_key(stripes * BN, r, B, S)
            k = load_rows(k_base, start, inside, k_ss, dk, n < rest, DK, BDK, True)
            v = load_rows(v_base, start, inside, v_ss, dv, n < rest, DV, BDV, True)
            key = start + inside
            acc, top, total = _update(q, k, v, acc, top, total, scale2, position, key, n < rest, local, r, B, S, PRECISION, True)
        stripes = 0
    for t in range(stripes + middles):
        start, _masked = key_tile(t, stripes, middles, edges, low, middle_low, diagonal_low, r, B, S, BN)
        k = load_keys(k_tile, k_base, k_row, k_column, start, n, k_ss, dk, live, DK, BDK, BN, False, TMA, False)
        v = load_keys(v_tile, v_base, v_row, v_column, start, n, v_ss, dv, live, DV, BDV, BN, False, TMA, False)
        acc, top, total = _update(q, k, v, acc, top, total, scale2, position, n, n, local, r, B, S, PRECISION, False)
    end = stripes + middles + edges + diagonals
    beyond = past_the_end(diagonal_low, diagonals, keys, BN, TAIL)
    for t in range(stripes + middles, end - beyond):
        start, _masked = key_tile(t, stripes, middles, edges, low, middle_low, diagonal_low, r, B, S, BN)
        key = start + n
        k = load_keys(k_tile, k_base, k_row, k_column, start, n, k_ss, dk, key < keys, DK, BDK, BN, True, TMA, False)
        v = load_keys(v_tile, v_base, v_row, v_column, start, n, v_ss, dv, key < keys, DV, BDV, BN, True, TMA, False)
        acc, top, total = _update(q, k, v, acc, top, total, scale2, position, key, key < keys, local, r, B, S, PRECISION, True)
    if TAIL:
        for t in tl.range(end - beyond, end, num_stages=1):
            start, _masked = key_tile(t, stripes, middles, edges, low, middle_low, diagonal_low, r, B, S, BN)
            key = start + n
            k = load_rows(k_base, start, n, k_ss, dk, key < keys, DK, BDK, True)
            v = load_rows(v_base, start, n, v_ss, dv, key < keys, DV, BDV, True)
            acc, top, total = _update(q, k, v, acc, top, total, scale2, position, key, key < keys, local, r, B, S, PRECISION, True)

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out_ptr + batch64 * o_sb + (q_start + tile * R).to(tl.int64) * o_ss + row_head[:, None] * o_sh
    out = place + slot[:, None] * o_ss + dv[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    lse_row = (batch64 * (kv_heads * GROUP) + row_head) * q_len + q_start + row
    tl.store(lse_ptr + lse_row, top * 0.6931471805599453 + tl.log(total), mask=live)
