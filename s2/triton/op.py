"""The kernels as a custom operator with fake and autograd definitions, so that compilation, recomputation and autocast work around it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import triton

from ..blockmask import BlockMask
from ..documents import Documents
from ..errors import S2Error
from ..pattern import S2Pattern
from . import descriptors
from .backward_kv import stripe_kernel, window_kernel
from .backward_q import dq_kernel, rows_kernel
from .config import Tile, Tiles, choose_tiles, padded
from .forward import forward_kernel
from .launch import LOG2_E, beside, capability, on_device, shared_memory

LARGEST_TILE = 128
"""Keys of the largest tile in `config.py`: offsets inside a tile are 32-bit."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: S2Pattern | BlockMask,
    scale: float,
    documents: Documents | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`s2.attention.s2_attention`. Document bounds that lie on the device are not checked: that would wait for it."""
    if scale < 0:
        # The kernels take the maximum of unscaled scores, and divide by the scale.
        q, scale = -q, -scale
    elif scale == 0:
        q, scale = q * 0, 1.0
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if isinstance(pattern, BlockMask):
        from .masked_op import attend as attend_masked

        return attend_masked(q, k, v, pattern, scale, documents)
    if max(k.stride(1), v.stride(1)) * pattern.stride * LARGEST_TILE >= 1 << 31:
        raise S2Error(
            "stride", pattern.stride, "makes a tile of stripe keys span 2**31 elements", "use a smaller stride or backend=reference"
        )
    residues = pattern.residues()
    group = q.shape[2] // k.shape[2]
    shared = all(len(set(residues[n : n + group])) == 1 for n in range(0, len(residues), group))
    stride = 1 if pattern.is_dense else pattern.stride
    cu_q, cu_k = (None, None) if documents is None else bounds(documents, q.device)
    table = _residue_table(residues, q.device)
    out, lse = attention(q, k, v, table, cu_q, cu_k, scale, pattern.block_size, pattern.local_blocks, stride, shared)
    return out, lse if return_lse else None


@lru_cache(maxsize=1024)
def _residue_table(residues: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(residues, dtype=torch.int32, device=device)


def bounds(documents: Documents, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The document bounds on the device; those that lie on the host are checked and copied once for all layers of a step."""
    if documents.cu_q.device == device and documents.cu_k.device == device:
        return documents.cu_q, documents.cu_k
    documents.spans()
    same = documents.cu_k is documents.cu_q
    cu_q = _copied(tuple(documents.cu_q.tolist()), device)
    return cu_q, cu_q if same else _copied(tuple(documents.cu_k.tolist()), device)


@lru_cache(maxsize=8)
def _copied(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def tiles(q: torch.Tensor, v: torch.Tensor, block: int, stride: int) -> Tiles:
    """The tiles of a call."""
    block = 128 if stride == 1 else block
    found = choose_tiles(
        padded(q.shape[3]), padded(v.shape[3]), q.element_size(), shared_memory(q.device), block, q.shape[1], capability(q.device)
    )
    assert found is not None, "backends.py refuses what does not fit"
    return found


class Call:
    """What every launch of one call shares."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor | None,
        cu_k: torch.Tensor | None,
        block: int,
        local: int,
        stride: int,
        shared: bool,
    ) -> None:
        self.batch, self.q_len, self.heads, self.d_k = q.shape
        self.k_len, self.kv_heads, self.d_v = k.shape[1], k.shape[2], v.shape[3]
        self.group = self.heads // self.kv_heads
        self.shared = shared
        self.documents = 0 if cu_q is None else cu_q.numel() - 1
        self.block, self.local, self.stride = block, local, stride
        # With tiles that end where the rows end no descriptor reads past them, and the kernels need no last tile by pointers.
        self.whole = cu_q is None and self.q_len == self.k_len and self.q_len % LARGEST_TILE == 0
        self.cu_q, self.cu_k = (q, q) if cu_q is None or cu_k is None else (cu_q, cu_k)
        self.constants: dict[str, Any] = {
            "DK": self.d_k,
            "DV": self.d_v,
            "BDK": padded(self.d_k),
            "BDV": padded(self.d_v),
            "B": block,
            "L": local,
            "S": stride,
            "DOCUMENTS": cu_q is not None,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    def pack(self, tile: Tile) -> int:
        """Query heads in a tile: the largest power of two that divides the group, when the group shares its pattern."""
        if not self.shared:
            return 1
        return min(self.group & -self.group, max(1, tile.rows // 16))

    def options(self, tile: Tile, tma: bool) -> dict[str, Any]:
        """Constants and launch options that all kernels over tiles share."""
        sizes = {"BM": tile.rows, "BN": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}
        return {"GROUP": self.group, "TMA": tma, "TAIL": tma and not self.whole, **self.constants, **sizes}

    def count(self, length: int, span: int) -> int:
        """Tiles of `span` rows that `length` rows need, documents included."""
        return length // span + self.documents if self.documents else triton.cdiv(length, span)


def _accelerated(tile: Tile, *tensors: torch.Tensor) -> list[descriptors.View] | None:
    """Views for descriptor loads, when the tile asks for them and the device and every tensor's layout allow them."""
    if not tile.tma or tensors[0].device.type != "cuda" or torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return None
    views = [descriptors.view(x) for x in tensors if padded(x.shape[3]) == x.shape[3]]
    found = [how for how in views if how is not None]
    return found if len(found) == len(tensors) else None


NO_STEPS = (0,) * 8


def key_sources(call: Call, tile: Tile, k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[Any, ...], tuple[int, ...], bool]:
    """(descriptors of k and v, their steps, whether they are used) for the kernels over tiles of queries."""
    views = _accelerated(tile, k, v)
    if views is None:
        return (k, k, v, v), NO_STEPS, False
    found: list[Any] = []
    for x, how in zip((k, v), views, strict=True):
        found += [descriptors.tile(x, how, tile.keys), descriptors.stripes(x, how, tile.keys, call.block, call.stride)]
    return tuple(found), views[0].steps + views[1].steps, True


def _query_sources(tile: Tile, q: torch.Tensor, g: torch.Tensor) -> tuple[tuple[Any, ...], tuple[int, ...], bool]:
    """(descriptors of q and g, their steps, whether they are used) for the kernels over tiles of keys."""
    views = _accelerated(tile, q, g)
    if views is None:
        return (q, g), NO_STEPS, False
    return tuple(descriptors.tile(x, how, tile.rows) for x, how in zip((q, g), views, strict=True)), views[0].steps + views[1].steps, True


def _over_queries(
    kernel: Any,
    call: Call,
    tile: Tile,
    inputs: tuple[torch.Tensor, ...],
    target: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    residues: torch.Tensor,
    scales: tuple[float, ...],
) -> None:
    """Launches a kernel over tiles of queries: `inputs` are q, k, v and perhaps g, `rows` what it reads or writes of each row."""
    pack = call.pack(tile)
    tiles = call.count(call.q_len, tile.rows // pack)
    sources, steps, tma = key_sources(call, tile, inputs[1], inputs[2])
    kernel[(tiles * call.batch * call.heads // pack,)](
        *inputs, *sources, target, *rows, residues, call.cu_q, call.cu_k,
        tiles, call.documents, call.q_len, call.k_len, call.kv_heads,
        *(step for x in (*inputs, target) for step in x.stride()[:3]), *steps, *scales, PACK=pack, **call.options(tile, tma),
    )  # fmt: skip


@torch.library.custom_op("s2::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residues: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    local: int,
    stride: int,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, q_len, heads, d_v), lse (batch, heads, q_len) float32; `shared`: the query heads of a group share their residue."""
    call = Call(q, k, v, cu_q, cu_k, block, local, stride, shared)
    out = q.new_empty(call.batch, call.q_len, call.heads, call.d_v)
    lse = q.new_empty(call.batch, call.heads, call.q_len, dtype=torch.float32)
    with on_device(q):
        _over_queries(forward_kernel, call, tiles(q, v, block, stride).forward, (q, k, v), out, (lse,), residues, (scale * LOG2_E,))
    return out, lse


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residues: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    local: int,
    stride: int,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads, _ = q.shape
    return q.new_empty(batch, q_len, heads, v.shape[3]), q.new_empty(batch, heads, q_len, dtype=torch.float32)


@torch.library.custom_op("s2::attention_backward", mutates_args=())
def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    g: torch.Tensor,
    g_lse: torch.Tensor | None,
    residues: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    local: int,
    stride: int,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtypes of q, k, v; g and g_lse are the gradients of out and lse."""
    call = Call(q, k, v, cu_q, cu_k, block, local, stride, shared)
    g = g if g.stride(-1) == 1 else g.contiguous()
    chosen = tiles(q, v, block, stride)
    with on_device(q):
        rows = row_terms(call, out, g, lse, g_lse, scale, max(chosen.dkv.rows, (chosen.stripe or chosen.dkv).rows))
        launch = partial(launch_dq, call, chosen.dq, (q, k, v, g), rows, residues, scale)
        side, dq = beside(launch, q, k, v, g, *rows, residues) if chosen.overlap else (None, launch())
        dk, dv = launch_dkv(call, chosen.dkv, (q, k, v, g), rows, residues, scale, chosen.stripe)
        if side is not None:
            torch.cuda.current_stream(q.device).wait_stream(side)
    return dq, dk, dv


def row_terms(
    call: Call, out: torch.Tensor, g: torch.Tensor, lse: torch.Tensor, g_lse: torch.Tensor | None, scale: float, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row adds to the products of the backward pass (`rows_kernel`), in buffers that tiles of `rows` rows may overrun."""
    row_lse, row_delta = row_buffers(lse, rows), row_buffers(lse, rows)
    rows_kernel[(triton.cdiv(call.q_len, 64) * call.batch * call.heads,)](
        out, g, lse, lse if g_lse is None else g_lse.contiguous(), row_lse, row_delta,
        1.0 / scale, call.batch * call.heads, call.q_len, call.heads,
        *out.stride()[:3], *g.stride()[:3],
        DV=call.d_v, BDV=padded(call.d_v), BM=64, HAS_G_LSE=g_lse is not None,
    )  # fmt: skip
    return row_lse, row_delta


def row_buffers(lse: torch.Tensor, rows: int) -> torch.Tensor:
    """A flat buffer for one number a row, with zeros after it where a tile of `rows` rows may read past the end."""
    buffer = torch.empty(lse.numel() + rows, dtype=lse.dtype, device=lse.device)
    buffer[lse.numel() :] = 0.0
    return buffer


def launch_dq(
    call: Call, tile: Tile, inputs: tuple[torch.Tensor, ...], rows: tuple[torch.Tensor, ...], residues: torch.Tensor, scale: float
) -> torch.Tensor:
    """dq; `inputs`: q, k, v, g; `rows`: the two sums of `rows_kernel`."""
    q = inputs[0]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _over_queries(dq_kernel, call, tile, inputs, dq, rows, residues, (scale * LOG2_E, scale))
    return dq


def launch_dkv(
    call: Call,
    tile: Tile,
    inputs: tuple[torch.Tensor, ...],
    rows: tuple[torch.Tensor, ...],
    residues: torch.Tensor,
    scale: float,
    stripe: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv; `stripe`: the tile of the stripes' kernel, None: `tile`.

    When the heads of a group differ in their pattern, each query head gets its own, summed here in float32.
    """
    stripe = stripe or tile
    q, _, _, g = inputs
    lse, delta = rows
    heads = call.group if call.shared else 1
    per_batch = call.heads // heads
    units = call.batch * per_batch
    wide = torch.float32 if per_batch != call.kv_heads else q.dtype
    dk = torch.empty(call.batch, call.k_len, per_batch, call.d_k, dtype=wide, device=q.device)
    dv = torch.empty(call.batch, call.k_len, per_batch, call.d_v, dtype=wide, device=q.device)
    strides = tuple(step for x in inputs for step in x.stride()[:3])
    part_dk = part_dv = delta
    splits, part_rows = 1, 0
    subs = triton.cdiv(call.block, stripe.keys)
    spans = call.count(call.k_len, subs * stripe.keys * call.stride)
    if call.stride > 1:
        splits = _splits(spans * subs * units, call.stride)
        part_rows = call.count(call.k_len, call.block * call.stride) * call.block
        part_dk, part_dv = (torch.empty(splits, units, part_rows, d, dtype=torch.float32, device=q.device) for d in (call.d_k, call.d_v))
    sizes = (call.documents, call.q_len, call.k_len, units, per_batch, part_rows)
    shared = {"HEADS": heads, "SPLITS": splits}
    if call.stride > 1:
        sources, steps, tma = _query_sources(stripe, q, g)
        stripe_kernel[(spans * subs * units * splits,)](
            *inputs, *sources, lse, delta, part_dk, part_dv, residues, call.cu_q, call.cu_k, spans, *sizes,
            *strides, *steps, scale * LOG2_E, **shared, **call.options(stripe, tma),
        )  # fmt: skip
    sources, steps, tma = _query_sources(tile, q, g)
    tiles = call.count(call.k_len, tile.keys)
    window_kernel[(tiles * units,)](
        *inputs, *sources, lse, delta, part_dk, part_dv, dk, dv, residues, call.cu_q, call.cu_k, tiles, *sizes,
        *strides, *dk.stride()[:3], *dv.stride()[:3], *steps, scale * LOG2_E, scale, **shared, **call.options(tile, tma),
    )  # fmt: skip
    if per_batch != call.kv_heads:
        dk, dv = (x.unflatten(2, (call.kv_heads, call.group)).sum(3).to(q.dtype) for x in (dk, dv))
    return dk, dv


def _splits(programs: int, stride: int) -> int:
    """Parts of a stripe's queries: enough programs to fill a device; at most stride / 2, so that the partial sums stay small."""
    return max(1, min(8, stride // 2, 1024 // programs))


@attention_backward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    g: torch.Tensor,
    g_lse: torch.Tensor | None,
    residues: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    local: int,
    stride: int,
    shared: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, residues, cu_q, cu_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, residues, cu_q, cu_k)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: torch.Tensor | None, g_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, residues, cu_q, cu_k = ctx.saved_tensors
    if g is None:
        g = torch.zeros_like(out)
    dq, dk, dv = attention_backward(q, k, v, out, lse, g, g_lse, residues, cu_q, cu_k, *ctx.numbers)
    return dq, dk, dv, None, None, None, None, None, None, None, None


attention.register_autograd(_backward, setup_context=_setup)
