"""Backward kernels over tiles of keys, deterministic: every sum has one owner and one order, there are no atomics.

- `stripe_kernel`: dk and dv of stripe keys from the queries whose window has left them: float32 partial sums, in stripe order
  (1 / stride of the keys), a long column split over several programs.
- `window_kernel`: dk and dv of every key from the queries whose window holds it, plus the partial sums of the stripes.
Scores are transposed, (keys, queries), so that weights feed the next product from registers. With TMA, `q_tile`, `g_tile` are
descriptors of [BM, width] tiles, rows and columns as in `forward.py`.
"""

import triton
import triton.language as tl

from .index import DENSE_LOCAL, find_document, past_the_end, stripe_key
from .load import load_rows


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, h, first, end, q_start,
    q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
    k, v, d_k, d_v, scale2, shift, key, low, high, masked,
    B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds the queries `first` to first + BM of head h, those at `end` or later left out, to (d_k, d_v) of a tile of keys.

    lse, delta (BM,) are what `rows_kernel` wrote. When `masked`, a query sees a key that is not after it and `low` to `high` - 1 blocks
    before it.
    """
    m = tl.arange(0, BM)
    live = first + m < end
    if TMA:
        q = q_tile.load([batch * q_rb + h * q_rh + q_start + first, batch * q_cb + h * q_ch])
        g = g_tile.load([batch * g_rb + h * g_rh + q_start + first, batch * g_cb + h * g_ch])
    else:
        dk, dv = tl.arange(0, BDK), tl.arange(0, BDV)
        batch64, h64 = batch.to(tl.int64), h.to(tl.int64)
        q = load_rows(q_ptr + batch64 * q_sb + h64 * q_sh, q_start + first, m, q_ss, dk, live, DK, BDK, True)
        g = load_rows(g_ptr + batch64 * g_sb + h64 * g_sh, q_start + first, m, g_ss, dv, live, DV, BDV, True)
        # Past the last row stands what another row, of another document, wrote: perhaps NaN.
        delta = tl.where(live, delta, 0.0)
    # The products start from the row terms, which so need no registers beside the accumulators.
    scores = tl.dot(k, tl.trans(q), tl.broadcast_to(lse[None, :], (BN, BM)), input_precision=PRECISION)
    if masked:
        position = (first + shift + m)[None, :]
        blocks = position // B - (key // B)[:, None]
        seen = (key[:, None] <= position) & (blocks >= low) & (blocks < high) & live[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    weights = tl.math.exp2(scores * scale2)
    d_v = tl.dot(weights.to(g.dtype), g, d_v, input_precision=PRECISION)
    d_weights = tl.dot(v, tl.trans(g), tl.broadcast_to(delta[None, :], (BN, BM)), input_precision=PRECISION)
    d_scores = weights * d_weights
    d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def _row_terms(lse_ptr, delta_ptr, batch, heads, h, q_len, row, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `rows_kernel` wrote for BM rows of head h; past the last row there is padding, in `row_buffers`."""
    place = (batch.to(tl.int64) * heads + h) * q_len + row + tl.arange(0, BM)
    return tl.load(lse_ptr + place), tl.load(delta_ptr + place)


@triton.jit
def _unit(index, units_per_batch, HEADS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(batch, first query head, key/value head) of a unit: HEADS query heads whose gradients go to one dk, dv."""
    head = (index % units_per_batch) * HEADS
    return index // units_per_batch, head, head // GROUP


@triton.jit
def _key_document(  # type: ignore[no-untyped-def]
    tile, documents, q_len, k_len, cu_q, cu_k, SPAN: tl.constexpr, PERIOD: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """The document of a tile of SPAN keys: (tile in it, first row of q, queries, first row of k, keys, its first block of partial sums)."""
    q_start, k_start, queries, keys, first_block = 0, 0, q_len, k_len, 0
    if DOCUMENTS:
        document, k_start, keys, tile = find_document(cu_k, documents, tile, SPAN)
        q_start = tl.load(cu_q + document)
        queries = tl.load(cu_q + document + 1) - q_start
        first_block = k_start // PERIOD + document
    return tile, q_start, queries, k_start, keys, first_block


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len", "partial_rows"])
def stripe_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, q_tile, g_tile, lse_ptr, delta_ptr, part_dk_ptr, part_dv_ptr, residue_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, units, units_per_batch, partial_rows,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, g_sb, g_ss, g_sh,
    q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
    scale2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Partial dk, dv of BN keys of one stripe from one of SPLITS parts of the far queries of HEADS query heads.

    Grid: units * tiles * SUBS * SPLITS, head after head, the first tiles (most queries) first. part_*: (SPLITS, units, partial_rows,
    width) float32, written wherever the window kernel reads it.
    """
    # A span of SUBS * BN stripe keys holds whole blocks, so that documents can be found by it.
    SUBS: tl.constexpr = (B + BN - 1) // BN
    index = tl.program_id(0)
    split = index % SPLITS
    sub = (index // SPLITS) % SUBS
    tile = (index // (SPLITS * SUBS)) % tiles
    unit = index // (SPLITS * SUBS * tiles)
    batch, head, kv_head = _unit(unit, units_per_batch, HEADS, GROUP)
    tile, q_start, queries, k_start, keys, first_block = _key_document(
        tile, documents, q_len, k_len, cu_q, cu_k, SUBS * BN * S, B * S, DOCUMENTS)  # fmt: skip
    r = tl.load(residue_ptr + head)
    n = tl.arange(0, BN)
    first_x = (tile * SUBS + sub) * BN
    first_key = stripe_key(first_x, r, B, S)
    if (r < 0) | (first_key >= keys):
        return

    inside = (n // B) * (S * B) + n % B
    key = first_key + inside
    seen = key < keys
    shift = keys - queries
    dk, dv = tl.arange(0, BDK), tl.arange(0, BDV)
    batch64, kv_head64 = batch.to(tl.int64), kv_head.to(tl.int64)
    k = load_rows(k_ptr + batch64 * k_sb + kv_head64 * k_sh, k_start + first_key, inside, k_ss, dk, seen, DK, BDK, True)
    v = load_rows(v_ptr + batch64 * v_sb + kv_head64 * v_sh, k_start + first_key, inside, v_ss, dv, seen, DV, BDV, True)

    # Queries are far from block j from block j + L on; a tile of several blocks has rows that are far from some of them only.
    low = tl.minimum(tl.maximum(((first_x // B) * S + r + L) * B - shift, 0), queries)
    all_far = (((first_x + BN - 1) // B) * S + r + L) * B - shift
    count = tl.cdiv(queries - low, BM)
    each = tl.cdiv(count, SPLITS)
    begin = tl.minimum(split * each, count)
    end = tl.minimum(begin + each, count)
    masked = tl.cdiv(tl.maximum(all_far - low, 0), BM)
    # The last tile belongs to the last part that has any: parts after it are empty.
    beyond = past_the_end(low, tl.where((begin < end) & (end == count), end, 0), queries, BM, TAIL)
    each_head = end - begin - beyond
    heads = units_per_batch * HEADS
    d_k, d_v = tl.zeros([BN, BDK], tl.float32), tl.zeros([BN, BDV], tl.float32)
    lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head, q_len, q_start + low + begin * BM, BM)
    for t in range(HEADS * each_head):
        u = begin + t % each_head
        d_k, d_v = _update(
            q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, head + t // each_head, low + u * BM, queries, q_start,
            q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
            k, v, d_k, d_v, scale2, shift, key, L, DENSE_LOCAL, (u < masked) | (low + u * BM + BM > queries),
            B, DK, DV, BDK, BDV, BM, BN, PRECISION, TMA)  # fmt: skip
        # The next tile's row terms are fetched here, where registers are free, by hand: the compiler does not pipeline them.
        after = tl.minimum(t + 1, HEADS * each_head - 1)
        row = q_start + low + (begin + after % each_head) * BM
        lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head + after // each_head, q_len, row, BM)
    if TAIL:
        for h in tl.range(0, HEADS * beyond, num_stages=1):
            lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head + h, q_len, q_start + low + (end - 1) * BM, BM)
            d_k, d_v = _update(
                q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, head + h, low + (end - 1) * BM, queries, q_start,
                q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
                k, v, d_k, d_v, scale2, shift, key, L, DENSE_LOCAL, True, B, DK, DV, BDK, BDV, BM, BN, PRECISION, False)  # fmt: skip
    place = (split * units + unit).to(tl.int64) * partial_rows + first_block * B + first_x
    tl.store(part_dk_ptr + place * DK + n[:, None] * DK + dk[None, :], d_k, mask=seen[:, None] & (dk < DK)[None, :])
    tl.store(part_dv_ptr + place * DV + n[:, None] * DV + dv[None, :], d_v, mask=seen[:, None] & (dv < DV)[None, :])


@triton.jit
def _window_tiles(tile, queries, keys, r, B: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries whose window holds keys of a tile, `low` to `end` - 1 in `count` tiles of BM: (low, end, count, diagonals, plain).

    The first `diagonals` tiles are masked, then come `plain` whole ones, then those that some keys' window, or the rows, have left.
    """
    shift = keys - queries
    last_block = (tl.minimum(tile * BN + BN, keys) - 1) // B
    low = tl.maximum(tile * BN - shift, 0)
    end = tl.where(r < 0, keys, tl.minimum(keys, (last_block + L) * B))
    whole_end = tl.where(r < 0, keys, tl.minimum(end, ((tile * BN) // B + L) * B))
    end, whole_end = tl.maximum(end - shift, low), tl.maximum(whole_end - shift, low)
    count = tl.cdiv(end - low, BM)
    diagonals = tl.minimum(tl.cdiv(tl.maximum(tile * BN + BN - 1 - shift - low, 0), BM), count)
    return low, end, count, diagonals, tl.maximum((whole_end - low) // BM - diagonals, 0)


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len", "partial_rows"])
def window_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, q_tile, g_tile, lse_ptr, delta_ptr, part_dk_ptr, part_dv_ptr, dk_ptr, dv_ptr, residue_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, units, units_per_batch, partial_rows,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, g_sb, g_ss, g_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh,
    q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
    scale2, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """dk, dv of BN keys from the queries whose window holds them, plus the stripes' partial sums.

    Grid: units * tiles, in key order: with dense heads the first keys have the most queries.
    """
    unit = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    batch, head, kv_head = _unit(unit, units_per_batch, HEADS, GROUP)
    tile, q_start, queries, k_start, keys, first_block = _key_document(
        tile, documents, q_len, k_len, cu_q, cu_k, BN, B * S, DOCUMENTS)  # fmt: skip
    if tile * BN >= keys:
        return

    n, dk, dv = tl.arange(0, BN), tl.arange(0, BDK), tl.arange(0, BDV)
    key = tile * BN + n
    seen = key < keys
    batch64, kv_head64 = batch.to(tl.int64), kv_head.to(tl.int64)
    k = load_rows(k_ptr + batch64 * k_sb + kv_head64 * k_sh, k_start + tile * BN, n, k_ss, dk, seen, DK, BDK, True)
    v = load_rows(v_ptr + batch64 * v_sb + kv_head64 * v_sh, k_start + tile * BN, n, v_ss, dv, seen, DV, BDV, True)

    r = tl.load(residue_ptr + head)
    local = tl.where(r < 0, DENSE_LOCAL, L)
    shift = keys - queries
    low, end, count, diagonals, plain = _window_tiles(tile, queries, keys, r, B, L, BM, BN)
    beyond = past_the_end(low, count, queries, BM, TAIL)
    inner = count - beyond
    heads = units_per_batch * HEADS
    d_k, d_v = tl.zeros([BN, BDK], tl.float32), tl.zeros([BN, BDV], tl.float32)
    # Masked tiles and plain ones have loops of their own: in one loop the products of every tile wait for the branch.
    edge = inner - plain
    for t in range(HEADS * edge):
        u = t % edge
        u = tl.where(u < diagonals, u, u + plain)
        lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head + t // edge, q_len, q_start + low + u * BM, BM)
        d_k, d_v = _update(
            q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, head + t // edge, low + u * BM, end, q_start,
            q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
            k, v, d_k, d_v, scale2, shift, key, 0, local, True, B, DK, DV, BDK, BDV, BM, BN, PRECISION, TMA)  # fmt: skip
    row = q_start + low + tl.where(plain > 0, diagonals, 0) * BM
    lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head, q_len, row, BM)
    for t in range(HEADS * plain):
        d_k, d_v = _update(
            q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, head + t // plain, low + (diagonals + t % plain) * BM, end, q_start,
            q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
            k, v, d_k, d_v, scale2, shift, key, 0, local, False, B, DK, DV, BDK, BDV, BM, BN, PRECISION, TMA)  # fmt: skip
        after = tl.minimum(t + 1, HEADS * plain - 1)
        row = q_start + low + (diagonals + after % plain) * BM
        lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head + after // plain, q_len, row, BM)
    if TAIL:
        for h in tl.range(0, HEADS * beyond, num_stages=1):
            lse, delta = _row_terms(lse_ptr, delta_ptr, batch, heads, head + h, q_len, q_start + low + inner * BM, BM)
            d_k, d_v = _update(
                q_ptr, g_ptr, q_tile, g_tile, lse, delta, batch, head + h, low + inner * BM, end, q_start,
                q_sb, q_ss, q_sh, g_sb, g_ss, g_sh, q_rb, q_rh, q_cb, q_ch, g_rb, g_rh, g_cb, g_ch,
                k, v, d_k, d_v, scale2, shift, key, 0, local, True, B, DK, DV, BDK, BDV, BM, BN, PRECISION, False)  # fmt: skip

    if S > 1:
        striped = seen & (r >= 0) & ((key // B) % S == r)
        inside = (key // B // S) * B + key % B
        for split in range(SPLITS):
            place = (split * units + unit).to(tl.int64) * partial_rows + first_block * B
            mask_k, mask_v = striped[:, None] & (dk < DK)[None, :], striped[:, None] & (dv < DV)[None, :]
            d_k += tl.load(part_dk_ptr + place * DK + inside.to(tl.int64)[:, None] * DK + dk[None, :], mask=mask_k, other=0.0)
            d_v += tl.load(part_dv_ptr + place * DV + inside.to(tl.int64)[:, None] * DV + dv[None, :], mask=mask_v, other=0.0)
    out_head = (unit % units_per_batch).to(tl.int64)
    row64 = tl.cast(k_start + tile * BN, tl.int64)
    dk_target = dk_ptr + batch64 * dk_sb + out_head * dk_sh + row64 * dk_ss + n[:, None] * dk_ss + dk[None, :]
    dv_target = dv_ptr + batch64 * dv_sb + out_head * dv_sh + row64 * dv_ss + n[:, None] * dv_ss + dv[None, :]
    tl.store(dk_target, (d_k * scale).to(dk_ptr.dtype.element_ty), mask=seen[:, None] & (dk < DK)[None, :])
    tl.store(dv_target, d_v.to(dv_ptr.dtype.element_ty), mask=seen[:, None] & (dv < DV)[None, :])
