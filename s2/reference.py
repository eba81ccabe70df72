"""The specification in plain torch, on any device; also the training path on CPUs.

Two forms of the same arithmetic, both in float32 (float64 for float64 inputs) whatever the dtype of the inputs:
- short sequences on a CPU, as many queries as keys, without lse: torch's fused attention over tiles of rows with cached additive masks;
- everything else: explicit tiles of scores, recomputed in the backward pass, so that memory is a few tiles and not T x T.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .blockmask import BlockMask
from .documents import Documents, groups
from .packing import each_group
from .pattern import DENSE, S2Pattern

TILE_ROWS = 128
"""Query rows of a tile on the fused path; tiles start at multiples of it, so that masks can be cached."""
FUSED_SCORES = 1 << 24
"""Most scores (heads x queries x keys) of one sequence on the fused path: its masks and probabilities are kept in memory."""
TILE_SCORES = 1 << 22
"""Scores of one tile on the explicit path."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: S2Pattern | BlockMask,
    scale: float,
    documents: Documents | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`s2.attention.s2_attention`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    spans = [(0, q.shape[1], 0, k.shape[1])] if documents is None else documents.spans()
    if isinstance(pattern, S2Pattern) and not return_lse and q.device.type == "cpu" and _can_fuse(pattern, spans):
        out = each_group(q.to(wide), k.to(wide), v.to(wide), documents, lambda a, b, c: _fused(a, b, c, pattern, scale))
        return out.to(q.dtype), None
    out, lse = _Explicit.apply(q, k, v, pattern, scale, spans)
    return out, lse


# ---- masks


def allowed(pattern: S2Pattern | BlockMask, rows: tuple[int, int], keys: int, device: torch.device) -> torch.Tensor:
    """(heads, rows, keys) bool: whether the query at position rows[0] + r attends to key c < keys; positions count in the document."""
    t_q = torch.arange(*rows, device=device)[None, :, None]
    t_k = torch.arange(keys, device=device)[None, None, :]
    if isinstance(pattern, BlockMask):
        i, j = t_q[0, :, 0] // pattern.block_size, t_k[0, 0] // pattern.block_size
        return pattern.mask.to(device)[:, i][:, :, j] & (t_k <= t_q)
    i, j = t_q // pattern.block_size, t_k // pattern.block_size
    residue = torch.tensor(pattern.residues(), device=device)[:, None, None]
    return (t_k <= t_q) & ((i - j < pattern.local_blocks) | (residue == DENSE) | (j % pattern.stride == residue))


@lru_cache(maxsize=64)
def _additive_tile(pattern: S2Pattern, tile: int, dtype: torch.dtype) -> torch.Tensor:
    """(1, heads, TILE_ROWS, keys) 0 or -inf for the rows of one tile and the keys up to its end."""
    end = (tile + 1) * TILE_ROWS
    keep = allowed(pattern, (tile * TILE_ROWS, end), end, torch.device("cpu"))
    return torch.zeros(keep.shape, dtype=dtype).masked_fill_(~keep, float("-inf"))[None]


# ---- the fused path


def _can_fuse(pattern: S2Pattern, spans: list[tuple[int, int, int, int]]) -> bool:
    """Every query attends to something and every key is attended to: an S2 pattern with as many queries as keys, short enough."""
    longest = max((keys for _, _, _, keys in spans), default=0)
    square = all(queries == keys for _, queries, _, keys in spans)
    return square and pattern.local_heads * longest * longest <= FUSED_SCORES


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: S2Pattern, scale: float) -> torch.Tensor:
    """Attention of (batch, length, heads, width) tensors of one length."""
    gqa = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    outs = []
    for tile, rows in enumerate(q.split(TILE_ROWS, dim=2)):
        end = tile * TILE_ROWS + rows.shape[2]
        mask = _additive_tile(pattern, tile, q.dtype)[:, :, : rows.shape[2], :end]
        outs.append(scaled_dot_product_attention(rows, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale, enable_gqa=gqa))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.transpose(1, 2)


# ---- the explicit path


class _Explicit(torch.autograd.Function):
    """Attention by tiles of scores; saves q, k, v, out and lse, recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pattern: S2Pattern | BlockMask,
        scale: float,
        spans: list[tuple[int, int, int, int]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=wide)
        for batch in _batches(q, k, v, spans):
            for rows, scores, _, values in _tiles(batch, q, k, v, pattern, scale):
                row_lse = scores.logsumexp(-1, keepdim=True)
                weights = (scores - row_lse).exp_().nan_to_num_(nan=0.0)
                batch.put(out, rows, weights.flatten(2, 3) @ values)
                batch.put_lse(lse, rows, row_lse.squeeze(-1))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pattern, ctx.scale, ctx.spans = pattern, scale, spans
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out, grad_lse = grads[0].to(out.dtype), grads[1]
        delta = (out * grad_out).sum(-1) - grad_lse.transpose(1, 2)
        dq, dk, dv = (torch.zeros(x.shape, dtype=out.dtype, device=x.device) for x in (q, k, v))
        for batch in _batches(q, k, v, ctx.spans):
            for rows, scores, keys_k, values in _tiles(batch, q, k, v, ctx.pattern, ctx.scale):
                keys, shape = scores.shape[-1], scores.shape
                weights = (scores - batch.rows_of(lse.transpose(1, 2), rows).unsqueeze(-1)).exp_().nan_to_num_(nan=0.0)
                g = batch.rows_of(grad_out, rows).flatten(2, 3)
                d_weights = (g @ values.transpose(-1, -2)).view(shape)
                d_scores = (d_weights - batch.rows_of(delta, rows).unsqueeze(-1)).mul_(weights).mul_(ctx.scale).flatten(2, 3)
                batch.add(dv, keys, weights.flatten(2, 3).transpose(-1, -2) @ g)
                batch.add(dk, keys, d_scores.transpose(-1, -2) @ batch.rows_of(q, rows).to(out.dtype).flatten(2, 3))
                batch.put(dq, rows, d_scores @ keys_k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class _Batch:
    """Documents of one size as a batch: gathers their rows as (n, kv_heads, group, rows, width), and scatters results back."""

    def __init__(self, starts: list[tuple[int, int]], queries: int, keys: int, kv_heads: int, whole: bool) -> None:
        self.starts, self.queries, self.keys, self.kv_heads, self.whole = starts, queries, keys, kv_heads, whole

    def rows_of(self, x: torch.Tensor, rows: tuple[int, int]) -> torch.Tensor:
        """Rows [rows[0], rows[1]) of each document of x (batch, q_len, heads, ...): (n, kv_heads, group, rows, ...)."""
        part = x[:, slice(*rows)] if self.whole else torch.stack([x[0, q0 + rows[0] : q0 + rows[1]] for q0, _ in self.starts])
        return part.unflatten(2, (self.kv_heads, -1)).movedim(1, 3)

    def keys_of(self, x: torch.Tensor, keys: int) -> torch.Tensor:
        """The first `keys` keys of each document of x (batch, k_len, kv_heads, width): (n, kv_heads, keys, width)."""
        part = x[:, :keys] if self.whole else torch.stack([x[0, k0 : k0 + keys] for _, k0 in self.starts])
        return part.transpose(1, 2)

    def put(self, target: torch.Tensor, rows: tuple[int, int], value: torch.Tensor) -> None:
        """Writes value (n, kv_heads, group * rows, width) to the rows of target (batch, q_len, heads, width)."""
        value = value.unflatten(2, (-1, rows[1] - rows[0])).movedim(3, 1).flatten(2, 3)
        if self.whole:
            target[:, slice(*rows)] = value
            return
        for (q0, _), part in zip(self.starts, value, strict=True):
            target[0, q0 + rows[0] : q0 + rows[1]] = part

    def put_lse(self, lse: torch.Tensor, rows: tuple[int, int], value: torch.Tensor) -> None:
        """Writes value (n, kv_heads, group, rows) to lse (batch, heads, q_len)."""
        value = value.flatten(1, 2)
        if self.whole:
            lse[:, :, slice(*rows)] = value
            return
        for (q0, _), part in zip(self.starts, value, strict=True):
            lse[0, :, q0 + rows[0] : q0 + rows[1]] = part

    def add(self, target: torch.Tensor, keys: int, value: torch.Tensor) -> None:
        """Adds value (n, kv_heads, keys, width) to the first keys of each document of target (batch, k_len, kv_heads, width)."""
        value = value.transpose(1, 2)
        if self.whole:
            target[:, :keys] += value
            return
        for (_, k0), part in zip(self.starts, value, strict=True):
            target[0, k0 : k0 + keys] += part


def _batches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[tuple[int, int, int, int]]) -> list[_Batch]:
    whole = len(spans) == 1 and spans[0][1] == q.shape[1] and spans[0][3] == k.shape[1]
    return [
        _Batch([(spans[i][0], spans[i][2]) for i in members], queries, keys, k.shape[2], whole)
        for (queries, keys), members in groups(spans).items()
    ]


def _tiles(
    batch: _Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: S2Pattern | BlockMask, scale: float
) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields (rows, scores, keys, values) per tile of rows.

    rows: the query rows of the document; scores (n, kv_heads, group, rows, keys), -inf where masked; keys and values
    (n, kv_heads, keys, width). Keys that no row of the tile attends to are zeros, so that whatever they hold (NaN) has no effect.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    first, n = batch.keys - batch.queries, q.shape[0] if batch.whole else len(batch.starts)
    height = max(16, min(512, TILE_SCORES // (n * q.shape[2] * batch.keys)))
    for start in range(0, batch.queries, height):
        rows = (start, min(start + height, batch.queries))
        keys = first + rows[1]
        keep = allowed(pattern, (first + rows[0], first + rows[1]), keys, q.device).unflatten(0, (k.shape[2], -1))
        unseen = ~keep.any(dim=2).any(dim=1)[:, :, None]
        rows_q = batch.rows_of(q, rows).to(wide)
        keys_k, values = (batch.keys_of(x, keys).to(wide).masked_fill(unseen, 0.0) for x in (k, v))
        scores = (rows_q.flatten(2, 3) @ keys_k.transpose(-1, -2)).view(*rows_q.shape[:4], keys)
        yield rows, scores.mul_(scale).masked_fill_(~keep, float("-inf")), keys_k, values
