"""Decoding kernels: one query token of each sequence over its cache, split over keys, and the writing of new tokens into the cache.

The work is divided on the device, from the lengths as they are: every sequence's key tiles are cut into chunks of about the same number
of tiles, so that `target` programs or a few more have work, however different the lengths. The grid depends on batch and heads alone and
the host reads nothing. A chunk leaves (accumulator, maximum, sum) in float32; `merge_kernel` adds the chunks of a head in a fixed order,
so that two runs are bitwise equal. The query heads that share a key/value head and a pattern are the rows of one product.

A head reads two runs of rows, as `s2/cache.py` lays them out: its far keys (a strip, or everything), then its ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..pattern import DENSE
from .config import choose_decode, padded
from .launch import LOG2_E, capability, on_device, shared_memory

if TYPE_CHECKING:
    from ..cache import S2Cache


@triton.jit
def _plan(  # type: ignore[no-untyped-def]
    lengths_ptr, batch, target, least, DENSE_UNITS: tl.constexpr, SPARSE_UNITS: tl.constexpr, BATCH: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For every sequence (BATCH,): tokens, the number after its last chunk, its chunks, and the chunks of one dense and one sparse unit."""
    sequence = tl.arange(0, BATCH)
    length = tl.load(lengths_ptr + sequence, mask=sequence < batch, other=0)
    dense_tiles = tl.cdiv(length, BN)
    # A residue's stripe may be a block shorter than this; its last chunk then has less to do.
    far = tl.cdiv(tl.maximum((length + B - 1) // B - L, 0), S) * B
    sparse_tiles = tl.cdiv(far, BN) + tl.cdiv(tl.minimum(length, L * B), BN)
    total = tl.sum(DENSE_UNITS * dense_tiles + SPARSE_UNITS * sparse_tiles)
    tiles = tl.maximum(tl.cdiv(total, target), least)
    dense_chunks, sparse_chunks = tl.cdiv(dense_tiles, tiles), tl.cdiv(sparse_tiles, tiles)
    chunks = DENSE_UNITS * dense_chunks + SPARSE_UNITS * sparse_chunks
    return sequence, length, tl.cumsum(chunks, 0), chunks, dense_chunks, sparse_chunks


@triton.jit
def _of(sequence, one, values):  # type: ignore[no-untyped-def]
    """The entry `one` of a vector over sequences."""
    return tl.sum(tl.where(sequence == one, values, 0))


@triton.jit(do_not_specialize=["batch", "target"])
def decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, lengths_ptr, unit_ptr, head_ptr, acc_ptr, top_ptr, total_ptr, batch, target, least,
    q_sb, q_sh, k_sb, v_sb, scale2,
    PACK: tl.constexpr, DENSE_UNITS: tl.constexpr, SPARSE_UNITS: tl.constexpr, BATCH: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of keys for the PACK query heads of a unit. Grid: at least as many programs as there can be chunks.

    unit_ptr: first query head of each unit, units with dense heads first. acc (programs, PACK, DV), top and total (programs, PACK) float32.
    """
    sequences, lengths, ends, counts, dense_chunks, sparse_chunks = _plan(
        lengths_ptr, batch, target, least, DENSE_UNITS, SPARSE_UNITS, BATCH, B, L, S, BN)  # fmt: skip
    program = tl.program_id(0)
    if program >= tl.sum(counts):
        return
    sequence = tl.sum((ends <= program).to(tl.int32))
    length = _of(sequences, sequence, lengths)
    dense, sparse = tl.maximum(_of(sequences, sequence, dense_chunks), 1), tl.maximum(_of(sequences, sequence, sparse_chunks), 1)
    place = program - _of(sequences, sequence, ends - counts)
    is_dense = place < DENSE_UNITS * dense
    place = tl.where(is_dense, place, place - DENSE_UNITS * dense)
    chunks = tl.where(is_dense, dense, sparse)
    unit = place // chunks + tl.where(is_dense, 0, DENSE_UNITS)
    head = tl.load(unit_ptr + unit)
    ring, far_row, far_step, r = (tl.load(head_ptr + head * 4 + 0), tl.load(head_ptr + head * 4 + 1),
                                  tl.load(head_ptr + head * 4 + 2), tl.load(head_ptr + head * 4 + 3))  # fmt: skip

    # The rows that the token sees: `far_rows` of the strip, then `near_rows` of the window.
    last = (length - 1) // B
    low = tl.maximum(last - L + 1, 0)
    far_rows = tl.where(r < 0, length, tl.maximum(low - r + S - 1, 0) // S * B)
    near_rows = tl.where(ring < 0, length - low * B, tl.minimum(length, L * B))
    near_rows = tl.where(r < 0, 0, near_rows)
    near_row = tl.where(ring < 0, far_row - r * B + low * B, ring)
    far_tiles = tl.cdiv(far_rows, BN)
    tiles = far_tiles + tl.cdiv(near_rows, BN)
    each = tl.cdiv(tiles, chunks)
    begin = tl.minimum((place % chunks) * each, tiles)

    m, n, dk, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BDK), tl.arange(0, BDV)
    q_base = q_ptr + sequence.to(tl.int64) * q_sb + head.to(tl.int64) * q_sh
    q = tl.load(q_base + m[:, None] * q_sh + dk[None, :], mask=(m < PACK)[:, None] & (dk < DK)[None, :], other=0.0)
    k_base, v_base = k_ptr + sequence.to(tl.int64) * k_sb, v_ptr + sequence.to(tl.int64) * v_sb
    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for t in range(begin, tl.minimum(begin + each, tiles)):
        is_far = t < far_tiles
        x = tl.where(is_far, t, t - far_tiles) * BN
        step = tl.where(is_far, far_step, 1) * B
        row = tl.where(is_far, far_row, near_row).to(tl.int64) + (x // B).to(tl.int64) * step + x % B
        inside = (n // B) * step + n % B
        # The ring's block of the newest token is written up to it; behind that lie tokens that have left the window.
        age = last % L - (x + n) // B
        age = tl.where(age < 0, age + L, age)
        unwritten = (age > last) | ((age == 0) & ((x + n) % B > (length - 1) % B))
        rows = tl.where(is_far, far_rows, near_rows)
        seen = (x + n < rows) & (is_far | (ring < 0) | (unwritten == 0))
        k = tl.load(k_base + row * DK + inside[:, None] * DK + dk[None, :], mask=seen[:, None] & (dk < DK)[None, :], other=0.0)
        v = tl.load(v_base + row * DV + inside[:, None] * DV + dv[None, :], mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.math.exp2(scores - base[:, None])
        decay = tl.math.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        top = new_top

    target_row = program.to(tl.int64) * PACK + m
    tl.store(top_ptr + target_row, top, mask=m < PACK)
    tl.store(total_ptr + target_row, total, mask=m < PACK)
    tl.store(acc_ptr + target_row[:, None] * DV + dv[None, :], acc, mask=(m < PACK)[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["batch", "target", "capacity"])
def merge_kernel(  # type: ignore[no-untyped-def]
    acc_ptr, top_ptr, total_ptr, lengths_ptr, place_ptr, out_ptr, batch, target, least, capacity, heads, o_sb, o_sh,
    PACK: tl.constexpr, DENSE_UNITS: tl.constexpr, SPARSE_UNITS: tl.constexpr, BATCH: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Adds the chunks of one query head of one sequence, BC at a time. Grid: batch * heads. place_ptr: unit * PACK + row of each head."""
    sequences, lengths, ends, counts, dense_chunks, sparse_chunks = _plan(
        lengths_ptr, batch, target, least, DENSE_UNITS, SPARSE_UNITS, BATCH, B, L, S, BN)  # fmt: skip
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    place = tl.load(place_ptr + head)
    unit = place // PACK
    dense, sparse = _of(sequences, sequence, dense_chunks), _of(sequences, sequence, sparse_chunks)
    chunks = tl.where(unit < DENSE_UNITS, dense, sparse)
    first = _of(sequences, sequence, ends - counts) + tl.minimum(unit, DENSE_UNITS) * dense + tl.maximum(unit - DENSE_UNITS, 0) * sparse
    c, dv = tl.arange(0, BC), tl.arange(0, BDV)
    acc = tl.zeros([BDV], tl.float32)
    top, total = float("-inf"), 0.0
    for start in range(0, chunks, BC):
        row = (first + start + c).to(tl.int64) * PACK + place % PACK
        live = start + c < chunks
        tops = tl.load(top_ptr + row, mask=live, other=float("-inf"))
        parts = tl.load(acc_ptr + row[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights, decay = tl.math.exp2(tops - base), tl.math.exp2(top - base)
        total = total * decay + tl.sum(weights * tl.load(total_ptr + row, mask=live, other=0.0), 0)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    # Tokens past the capacity were not stored: better no number than a wrong one.
    acc = tl.where(_of(sequences, sequence, lengths) > capacity, float("nan"), acc)
    out = out_ptr + sequence.to(tl.int64) * o_sb + head * o_sh + dv
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit(do_not_specialize=["tokens", "tiles", "capacity"])
def append_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, keys_ptr, values_ptr, lengths_ptr, added_ptr, region_ptr, tokens, tiles, regions, capacity,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, keys_sb, values_sb,
    DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Writes BT new tokens of a sequence into one region of its cache. Grid: batch * regions * tiles.

    A region is (key/value head, residue, -1 for everything or -2 for a ring, first row); see `s2/cache.py`.
    """
    tile, region = tl.program_id(0) % tiles, (tl.program_id(0) // tiles) % regions
    sequence = (tl.program_id(0) // tiles // regions).to(tl.int64)
    head, kind = tl.load(region_ptr + region * 3).to(tl.int64), tl.load(region_ptr + region * 3 + 1)
    first = tl.load(region_ptr + region * 3 + 2).to(tl.int64)
    old = tl.load(lengths_ptr + sequence)
    count = tokens
    if ADDED:
        count = tl.load(added_ptr + sequence)
    step = tile * BT + tl.arange(0, BT)
    position = old + step
    block = position // B
    keep = tl.where(kind == -2, (old + count - 1) // B - block < L, (kind < 0) | (block % S == kind))
    keep = keep & (step < count) & (position < capacity)
    row = tl.where(kind == -2, position % (L * B), tl.where(kind < 0, position, block // S * B + position % B))
    dk, dv = tl.arange(0, BDK), tl.arange(0, BDV)
    keep_k, keep_v = keep[:, None] & (dk < DK)[None, :], keep[:, None] & (dv < DV)[None, :]
    source = step.to(tl.int64)[:, None]
    k = tl.load(k_ptr + sequence * k_sb + head * k_sh + source * k_ss + dk[None, :], mask=keep_k, other=0.0)
    v = tl.load(v_ptr + sequence * v_sb + head * v_sh + source * v_ss + dv[None, :], mask=keep_v, other=0.0)
    row64 = (first + row)[:, None]
    tl.store(keys_ptr + sequence * keys_sb + row64 * DK + dk[None, :], k, mask=keep_k)
    tl.store(values_ptr + sequence * values_sb + row64 * DV + dv[None, :], v, mask=keep_v)


class _Units:
    """How a pattern's query heads are grouped into units of equal work, as device tables; made once per cache and kept with it."""

    def __init__(self, cache: S2Cache) -> None:
        residues, device = cache.pattern.residues(), cache.keys.device
        group = len(residues) // cache.pattern.local_kv_heads
        shared = all(len(set(residues[n : n + group])) == 1 for n in range(0, len(residues), group))
        self.pack = group if shared else 1
        firsts = sorted(range(0, len(residues), self.pack), key=lambda head: residues[head] != DENSE)
        self.dense = sum(residues[head] == DENSE for head in firsts)
        self.sparse = len(firsts) - self.dense
        places = {head + m: unit * self.pack + m for unit, head in enumerate(firsts) for m in range(self.pack)}
        self.firsts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self.places = torch.tensor([places[head] for head in range(len(residues))], dtype=torch.int32, device=device)


def units(cache: S2Cache) -> _Units:
    """The cache's units."""
    found: _Units | None = cache.__dict__.get("_units")
    if found is None:
        found = cache.__dict__["_units"] = _Units(cache)
    return found


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def attend(q: torch.Tensor, cache: S2Cache, scale: float) -> torch.Tensor:
    """See :func:`s2.decode.s2_decode`. Launches two kernels and reads nothing on the host."""
    pattern, plan = cache.pattern, units(cache)
    q = q if q.stride(3) == 1 else q.contiguous()
    size, shared = q.element_size(), shared_memory(q.device)
    block = 128 if pattern.is_dense else pattern.block_size
    tile = choose_decode(padded(cache.d_k), padded(cache.d_v), size, shared, block, cache.capacity, capability(q.device))
    assert tile is not None, "the table of decoders refuses what does not fit"
    target = processors(q.device) * tile.programs
    programs = target + cache.batch * (plan.dense + plan.sparse)
    acc = torch.empty(programs, plan.pack, cache.d_v, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(programs, plan.pack, dtype=torch.float32, device=q.device) for _ in range(2))
    out = torch.empty(cache.batch, 1, pattern.local_heads, cache.d_v, dtype=q.dtype, device=q.device)
    common: dict[str, Any] = {
        "PACK": plan.pack, "DENSE_UNITS": plan.dense, "SPARSE_UNITS": plan.sparse, "BATCH": triton.next_power_of_2(cache.batch),
        "DV": cache.d_v, "BDV": padded(cache.d_v), "B": pattern.block_size, "L": pattern.local_blocks, "S": pattern.stride, "BN": tile.keys,
    }  # fmt: skip
    with on_device(q):
        decode_kernel[(programs,)](
            q, cache.keys, cache.values, cache.device_lengths, plan.firsts, cache.head_table, acc, top, total,
            cache.batch, target, tile.least, q.stride(0), q.stride(2), cache.keys.stride(0), cache.values.stride(0), scale * LOG2_E,
            DK=cache.d_k, BDK=padded(cache.d_k), BM=max(16, triton.next_power_of_2(plan.pack)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages, **common,
        )  # fmt: skip
        merge_kernel[(cache.batch * pattern.local_heads,)](
            acc, top, total, cache.device_lengths, plan.places, out, cache.batch, target, tile.least, cache.capacity, pattern.local_heads,
            out.stride(0), out.stride(2), BC=32, num_warps=4, **common,
        )  # fmt: skip
    return out


def append(cache: S2Cache, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None) -> None:
    """Writes k, v (batch, n, kv_heads, d) behind what the cache holds; `added` (batch,) int32: how many of them, None: all."""
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    tokens, regions = k.shape[1], len(cache.layout.regions)
    rows = 64 if tokens > 1 else 1
    tiles = triton.cdiv(tokens, rows)
    with on_device(k):
        append_kernel[(cache.batch * regions * tiles,)](
            k, v, cache.keys, cache.values, cache.device_lengths, cache.device_lengths if added is None else added, cache.region_table,
            tokens, tiles, regions, cache.capacity, *k.stride()[:3], *v.stride()[:3], cache.keys.stride(0), cache.values.stride(0),
            DK=cache.d_k, DV=cache.d_v, BDK=padded(cache.d_k), BDV=padded(cache.d_v),
            B=cache.pattern.block_size, L=cache.pattern.local_blocks, S=cache.pattern.stride, BT=rows, ADDED=added is not None, num_warps=4,
        )  # fmt: skip
