"""The kernels of custom block masks as a custom operator, beside that of the pattern in `op.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..blockmask import BlockMask
from ..documents import Documents
from . import op
from .config import Tile
from .launch import LOG2_E, on_device
from .masked import masked_dkv_kernel, masked_dq_kernel, masked_forward_kernel

SPARSE = 2
"""Any stride but 1, which stands for dense attention and its tiles: a mask takes the tiles of its block size."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float, documents: Documents | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of tensors whose last dimension has unit stride; `scale` is positive."""
    cu_q, cu_k = (None, None) if documents is None else op.bounds(documents, q.device)
    out, lse = block_attention(q, k, v, *mask.index(q.device), cu_q, cu_k, scale, mask.block_size, mask.blocks)
    return out, lse


def _inside(tile: Tile, block: int) -> Tile:
    """The tile, no larger than a block on either side."""
    rows, keys = min(tile.rows, block), min(tile.keys, block)
    return replace(tile, rows=rows, keys=keys, warps=min(tile.warps, 8 if rows * keys >= 64 * 64 else 4))


class _Launch:
    """What the launches of one call share."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor | None,
        cu_k: torch.Tensor | None,
        block: int,
        blocks: int,
    ) -> None:
        self.call = op.Call(q, k, v, cu_q, cu_k, block, 1, 1, False)
        self.block, self.blocks = block, blocks
        names = ("DK", "DV", "BDK", "BDV", "B", "DOCUMENTS", "PRECISION")
        self.constants = {"GROUP": self.call.group, **{name: self.call.constants[name] for name in names}}

    def options(self, tile: Tile) -> dict[str, Any]:
        """Constants and launch options of a tile."""
        return {"BM": tile.rows, "BN": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages, **self.constants}

    def over_queries(
        self,
        kernel: Any,
        tile: Tile,
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor,
        rows: tuple[torch.Tensor, ...],
        index: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[float, ...],
    ) -> None:
        """Launches a kernel over tiles of queries; as in `op.py`."""
        call, tile = self.call, _inside(tile, self.block)
        tiles = call.count(call.q_len + (call.k_len - call.q_len) % tile.rows, tile.rows)
        (k_tile, _, v_tile, _), steps, tma = op.key_sources(call, tile, inputs[1], inputs[2])
        kernel[(tiles * call.batch * call.heads,)](
            *inputs, k_tile, v_tile, target, *rows, *index, call.cu_q, call.cu_k,
            tiles, call.documents, call.q_len, call.k_len, call.kv_heads, self.blocks,
            *(step for x in (*inputs, target) for step in x.stride()[:3]), *steps, *scales, TMA=tma, **self.options(tile),
        )  # fmt: skip

    def dkv(
        self,
        tile: Tile,
        inputs: tuple[torch.Tensor, ...],
        rows: tuple[torch.Tensor, ...],
        index: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv: one of each query head, summed over a group in float32."""
        call, tile, like = self.call, _inside(tile, self.block), inputs[0]
        wide = like.dtype if call.group == 1 else torch.float32
        dk, dv = (torch.empty(call.batch, call.k_len, call.heads, d, dtype=wide, device=like.device) for d in (call.d_k, call.d_v))
        tiles = call.count(call.k_len, tile.keys)
        masked_dkv_kernel[(tiles * call.batch * call.heads,)](
            *inputs, *rows, dk, dv, *index, call.cu_q, call.cu_k,
            tiles, call.documents, call.q_len, call.k_len, call.heads, self.blocks,
            *(step for x in (*inputs, dk, dv) for step in x.stride()[:3]), scale * LOG2_E, scale, **self.options(tile),
        )  # fmt: skip
        if call.group > 1:
            dk, dv = (x.unflatten(2, (call.kv_heads, call.group)).sum(3).to(like.dtype) for x in (dk, dv))
        return dk, dv


@torch.library.custom_op("s2::block_attention", mutates_args=())
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    columns: torch.Tensor,
    column_starts: torch.Tensor,
    rows: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, q_len, heads, d_v), lse (batch, heads, q_len) float32; the lists are those of `BlockMask.index`."""
    launch = _Launch(q, k, v, cu_q, cu_k, block, blocks)
    call = launch.call
    out = q.new_empty(call.batch, call.q_len, call.heads, call.d_v)
    lse = q.new_empty(call.batch, call.heads, call.q_len, dtype=torch.float32)
    with on_device(q):
        tile = op.tiles(q, v, block, SPARSE).forward
        launch.over_queries(masked_forward_kernel, tile, (q, k, v), out, (lse,), (row_starts, columns), (scale * LOG2_E,))
    return out, lse


@block_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads, _ = q.shape
    return q.new_empty(batch, q_len, heads, v.shape[3]), q.new_empty(batch, heads, q_len, dtype=torch.float32)


@torch.library.custom_op("s2::block_attention_backward", mutates_args=())
def block_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    g: torch.Tensor,
    g_lse: torch.Tensor | None,
    row_starts: torch.Tensor,
    columns: torch.Tensor,
    column_starts: torch.Tensor,
    rows: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    scale: float,
    block: int,
    blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtypes of q, k, v."""
    launch = _Launch(q, k, v, cu_q, cu_k, block, blocks)
    g = g if g.stride(-1) == 1 else g.contiguous()
    tiles = op.tiles(q, v, block, SPARSE)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with on_device(q):
        terms = op.row_terms(launch.call, out, g, lse, g_lse, scale, tiles.dkv.rows)
        scales = (scale * LOG2_E, scale)
        launch.over_queries(masked_dq_kernel, tiles.dq, (q, k, v, g), dq, terms, (row_starts, columns), scales)
        dk, dv = launch.dkv(tiles.dkv, (q, k, v, g), terms, (column_starts, rows), scale)
    return dq, dk, dv


@block_attention_backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *lists = inputs[:9]
    ctx.save_for_backward(q, k, v, *output, *lists)
    ctx.numbers = inputs[9:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: torch.Tensor | None, g_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *lists = ctx.saved_tensors
    g = torch.zeros_like(out) if g is None else g
    return *block_attention_backward(q, k, v, out, lse, g, g_lse, *lists, *ctx.numbers), *(None,) * 9


block_attention.register_autograd(_backward, setup_context=_setup)
