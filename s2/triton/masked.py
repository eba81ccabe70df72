"""Kernels of custom block masks: forward, dq and dk/dv over lists of blocks, with the tiles' arithmetic of the pattern's kernels.

Every query block of every head has the ascending list of its key blocks, every key block that of its query blocks (`BlockMask.index`).
Tiles lie inside a block, so that all rows of a tile have one list, and only the diagonal block, the last or first of a list, needs a
mask. An empty list costs nothing and gives zeros. Positions, and with them blocks, count from the document's first key.
"""

import triton
import triton.language as tl

from .backward_q import _update as update_dq
from .forward import _update as update_out
from .index import DENSE_LOCAL, find_document, query_program
from .load import key_origin, load_keys, load_rows


@triton.jit
def _first_at_least(list_ptr, low, high, value):  # type: ignore[no-untyped-def]
    """Where in the ascending entries `low` to `high` - 1 the first one of at least `value` stands; `high` when there is none."""
    while low < high:
        middle = (low + high) // 2
        if tl.load(list_ptr + middle) < value:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _query_tile(  # type: ignore[no-untyped-def]
    starts_ptr, columns_ptr, head, tile, queries, keys, blocks, B: tl.constexpr, BM: tl.constexpr
):
    """Tiles are counted from the position that is a multiple of BM at or before the first query.

    Returns (row of the first slot, perhaps negative; its position; whether each slot has a row; its block; the block's first entry; the
    entries before the diagonal's; 1 when the diagonal is among them, else 0).
    """
    shift = keys - queries
    first = (shift // BM + tile) * BM
    row = first - shift + tl.arange(0, BM)
    block = first // B
    inside = tl.minimum(block, blocks - 1)
    begin, end = tl.load(starts_ptr + head * blocks + inside), tl.load(starts_ptr + head * blocks + inside + 1)
    end = tl.where(first < keys, end, begin)
    diagonal = 0
    if end > begin:
        diagonal = (tl.load(columns_ptr + end - 1) == block).to(tl.int32)
    return first - shift, first, (row >= 0) & (row < queries), block, begin, end - begin - diagonal, diagonal


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len", "blocks"])
def masked_forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_tile, v_tile, out_ptr, lse_ptr, starts_ptr, columns_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, kv_heads, blocks,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, o_sb, o_ss, o_sh,
    k_rb, k_rh, k_cb, k_ch, v_rb, v_rh, v_cb, v_ch, scale2,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out and lse of BM queries of one head. Grid: tiles * batch * heads."""
    batch, head, kv_head, tile, q_start, queries, k_start, keys = query_program(
        tiles, documents, q_len, k_len, kv_heads, cu_q, cu_k, GROUP, 1, BM, DOCUMENTS)  # fmt: skip
    first_row, first, live, block, entry, others, diagonal = _query_tile(starts_ptr, columns_ptr, head, tile, queries, keys, blocks, B, BM)
    if first >= keys:
        return
    m, n, dk, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BDK), tl.arange(0, BDV)
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    q = load_rows(q_ptr + batch64 * q_sb + head64 * q_sh, q_start + first_row, m, q_ss, dk, live, DK, BDK, True)
    k_base, k_row, k_column = key_origin(k_ptr, batch, kv_head, k_start, k_sb, k_ss, k_sh, k_rb, k_rh, k_cb, k_ch)
    v_base, v_row, v_column = key_origin(v_ptr, batch, kv_head, k_start, v_sb, v_ss, v_sh, v_rb, v_rh, v_cb, v_ch)
    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    # Whole blocks before the diagonal: every key is there, every row sees it.
    for t in range(others * (B // BN)):
        start = tl.load(columns_ptr + entry + t // (B // BN)) * B + t % (B // BN) * BN
        k = load_keys(k_tile, k_base, k_row, k_column, start, n, k_ss, dk, live, DK, BDK, BN, False, TMA, False)
        v = load_keys(v_tile, v_base, v_row, v_column, start, n, v_ss, dv, live, DV, BDV, BN, False, TMA, False)
        acc, top, total = update_out(q, k, v, acc, top, total, scale2, m, n, n, DENSE_LOCAL, 0, B, 1, PRECISION, False)
    for t in range(diagonal * tl.cdiv(first + BM - block * B, BN)):
        key = block * B + t * BN + n
        k = load_rows(k_base, block * B + t * BN, n, k_ss, dk, key < keys, DK, BDK, True)
        v = load_rows(v_base, block * B + t * BN, n, v_ss, dv, key < keys, DV, BDV, True)
        acc, top, total = update_out(q, k, v, acc, top, total, scale2, first + m, key, key < keys, DENSE_LOCAL, 0, B, 1, PRECISION, True)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = out_ptr + batch64 * o_sb + head64 * o_sh + tl.cast(q_start + first_row, tl.int64) * o_ss + m[:, None] * o_ss + dv[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])
    place = (batch64 * (kv_heads * GROUP) + head64) * q_len + q_start + first_row + m
    tl.store(lse_ptr + place, top * 0.6931471805599453 + tl.log(total), mask=live)


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len", "blocks"])
def masked_dq_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, k_tile, v_tile, dq_ptr, lse_ptr, delta_ptr, starts_ptr, columns_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, kv_heads, blocks,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, g_sb, g_ss, g_sh, dq_sb, dq_ss, dq_sh,
    k_rb, k_rh, k_cb, k_ch, v_rb, v_rh, v_cb, v_ch, scale2, scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq of BM queries of one head; grid and tiles as in `masked_forward_kernel`."""
    batch, head, kv_head, tile, q_start, queries, k_start, keys = query_program(
        tiles, documents, q_len, k_len, kv_heads, cu_q, cu_k, GROUP, 1, BM, DOCUMENTS)  # fmt: skip
    first_row, first, live, block, entry, others, diagonal = _query_tile(starts_ptr, columns_ptr, head, tile, queries, keys, blocks, B, BM)
    if first >= keys:
        return
    m, n, dk, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BDK), tl.arange(0, BDV)
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    q = load_rows(q_ptr + batch64 * q_sb + head64 * q_sh, q_start + first_row, m, q_ss, dk, live, DK, BDK, True)
    g = load_rows(g_ptr + batch64 * g_sb + head64 * g_sh, q_start + first_row, m, g_ss, dv, live, DV, BDV, True)
    k_base, k_row, k_column = key_origin(k_ptr, batch, kv_head, k_start, k_sb, k_ss, k_sh, k_rb, k_rh, k_cb, k_ch)
    v_base, v_row, v_column = key_origin(v_ptr, batch, kv_head, k_start, v_sb, v_ss, v_sh, v_rb, v_rh, v_cb, v_ch)
    place = (batch64 * (kv_heads * GROUP) + head64) * q_len + q_start + first_row + m
    lse2 = tl.load(lse_ptr + place, mask=live, other=float("-inf")) * scale2
    delta = tl.load(delta_ptr + place, mask=live, other=0.0)
    dq = tl.zeros([BM, BDK], tl.float32)
    for t in range(others * (B // BN)):
        start = tl.load(columns_ptr + entry + t // (B // BN)) * B + t % (B // BN) * BN
        k = load_keys(k_tile, k_base, k_row, k_column, start, n, k_ss, dk, live, DK, BDK, BN, False, TMA, False)
        v = load_keys(v_tile, v_base, v_row, v_column, start, n, v_ss, dv, live, DV, BDV, BN, False, TMA, False)
        dq = update_dq(q, k, v, g, dq, lse2, delta, scale2, m, n, n, DENSE_LOCAL, 0, False, B, 1, PRECISION)
    for t in range(diagonal * tl.cdiv(first + BM - block * B, BN)):
        key = block * B + t * BN + n
        k = load_rows(k_base, block * B + t * BN, n, k_ss, dk, key < keys, DK, BDK, True)
        v = load_rows(v_base, block * B + t * BN, n, v_ss, dv, key < keys, DV, BDV, True)
        dq = update_dq(q, k, v, g, dq, lse2, delta, scale2, first + m, key, key < keys, DENSE_LOCAL, 0, True, B, 1, PRECISION)
    target = dq_ptr + batch64 * dq_sb + head64 * dq_sh + tl.cast(q_start + first_row, tl.int64) * dq_ss + m[:, None] * dq_ss + dk[None, :]
    tl.store(target, (dq * scale).to(dq_ptr.dtype.element_ty), mask=live[:, None] & (dk < DK)[None, :])


@triton.jit(do_not_specialize=["tiles", "documents", "q_len", "k_len", "blocks"])
def masked_dkv_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, starts_ptr, rows_ptr, cu_q, cu_k,
    tiles, documents, q_len, k_len, heads, blocks,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, g_sb, g_ss, g_sh, dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, scale2, scale,
    GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BN keys from one query head. Grid: tiles * batch * heads. The sum over a group's heads is left to the caller."""
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch64, head = (unit // heads).to(tl.int64), unit % heads
    q_start, k_start, queries, keys = 0, 0, q_len, k_len
    if DOCUMENTS:
        document, k_start, keys, tile = find_document(cu_k, documents, tile, BN)
        q_start = tl.load(cu_q + document)
        queries = tl.load(cu_q + document + 1) - q_start
    if tile * BN >= keys:
        return
    shift = keys - queries
    m, n, dk, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BDK), tl.arange(0, BDV)
    key = tile * BN + n
    seen = key < keys
    head64 = head.to(tl.int64)
    k_base = k_ptr + batch64 * k_sb + head64 // GROUP * k_sh
    v_base = v_ptr + batch64 * v_sb + head64 // GROUP * v_sh
    k = load_rows(k_base, k_start + tile * BN, n, k_ss, dk, seen, DK, BDK, True)
    v = load_rows(v_base, k_start + tile * BN, n, v_ss, dv, seen, DV, BDV, True)
    q_base, g_base = q_ptr + batch64 * q_sb + head64 * q_sh, g_ptr + batch64 * g_sb + head64 * g_sh
    row_base = (batch64 * heads + head64) * q_len + q_start

    column = head * blocks + tile * BN // B
    low, high = tl.load(starts_ptr + column), tl.load(starts_ptr + column + 1)
    low = _first_at_least(rows_ptr, low, high, shift // B)
    high = _first_at_least(rows_ptr, low, high, tl.cdiv(keys, B))
    d_k = tl.zeros([BN, BDK], tl.float32)
    d_v = tl.zeros([BN, BDV], tl.float32)
    for t in range((high - low) * (B // BM)):
        position = tl.load(rows_ptr + low + t // (B // BM)) * B + t % (B // BM) * BM
        row = position - shift + m
        live = (row >= 0) & (row < queries)
        q = load_rows(q_base, q_start + position - shift, m, q_ss, dk, live, DK, BDK, True)
        g = load_rows(g_base, q_start + position - shift, m, g_ss, dv, live, DV, BDV, True)
        lse = tl.load(lse_ptr + row_base + row, mask=live, other=0.0)
        delta = tl.load(delta_ptr + row_base + row, mask=live, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) + lse[None, :]
        if (position < tile * BN + BN) | (position < shift) | (position + BM > keys):
            scores = tl.where((key[:, None] <= (position + m)[None, :]) & live[None, :], scores, float("-inf"))
        weights = tl.math.exp2(scores * scale2)
        d_v = tl.dot(weights.to(g.dtype), g, d_v, input_precision=PRECISION)
        d_scores = weights * (tl.dot(v, tl.trans(g), input_precision=PRECISION) + delta[None, :])
        d_k = tl.dot(d_scores.to(q.dtype), q, d_k, input_precision=PRECISION)
    row64 = tl.cast(k_start + tile * BN, tl.int64)
    dk_target = dk_ptr + batch64 * dk_sb + head64 * dk_sh + row64 * dk_ss + n[:, None] * dk_ss + dk[None, :]
    dv_target = dv_ptr + batch64 * dv_sb + head64 * dv_sh + row64 * dv_ss + n[:, None] * dv_ss + dv[None, :]
    tl.store(dk_target, (d_k * scale).to(dk_ptr.dtype.element_ty), mask=seen[:, None] & (dk < DK)[None, :])
    tl.store(dv_target, d_v.to(dv_ptr.dtype.element_ty), mask=seen[:, None] & (dv < DV)[None, :])
