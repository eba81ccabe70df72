"""FlexAttention (CUDA): torch's compiled block-sparse attention, its block mask built from the pattern and cached per shape."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from .blockmask import BlockMask
from .documents import Documents
from .pattern import DENSE, S2Pattern

MIN_TILE = 128
"""Side of the kernel's smallest tile: pattern blocks under it are handled inside partly masked tiles."""


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex.flex_attention, dynamic=False)


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
    if documents is None:
        mask = _block_mask(pattern, q.shape[1], k.shape[1], q.device)
    else:
        assert isinstance(pattern, S2Pattern), "backends.py sends no custom mask here"
        # The layers of a step share one mask; bounds that lie on the host are compared without waiting for the device.
        mask = _document_mask(pattern, tuple(documents.cu_q.tolist()), q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    gqa = q.shape[1] != k.shape[1]
    out, lse = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa, return_lse=True)
    return out.transpose(1, 2), lse if return_lse else None


def _mask_mod(pattern: S2Pattern | BlockMask, shift: int, device: torch.device) -> Any:
    """The token-level test; `shift` is the position of the first query."""
    if isinstance(pattern, BlockMask):
        blocks, size = pattern.mask.to(device), pattern.block_size

        def custom(b: torch.Tensor, h: torch.Tensor, t_q: torch.Tensor, t_k: torch.Tensor) -> torch.Tensor:
            return (t_k <= t_q + shift) & blocks[h, (t_q + shift) // size, t_k // size]

        return custom
    residue = torch.tensor(pattern.residues(), device=device)
    block, local, stride = pattern.block_size, pattern.local_blocks, pattern.stride

    def stripes(b: torch.Tensor, h: torch.Tensor, t_q: torch.Tensor, t_k: torch.Tensor) -> torch.Tensor:
        i, j = (t_q + shift) // block, t_k // block
        return (t_k <= t_q + shift) & ((i - j < local) | (residue[h] == DENSE) | (j % stride == residue[h]))

    return stripes


@lru_cache(maxsize=128)
def _block_mask(pattern: S2Pattern | BlockMask, q_len: int, k_len: int, device: torch.device) -> Any:
    """Block mask of one shape, built on the level of blocks: never a tensor of queries x keys."""
    shift, block = k_len - q_len, pattern.block_size
    tile = max(block, MIN_TILE)
    rows = -(-q_len // tile)
    columns = -(-k_len // tile)
    first = torch.arange(rows, device=device) * tile + shift
    last = (first + tile - 1).clamp(max=k_len - 1)
    head_blocks = _head_blocks(pattern, -(-k_len // block), device)
    some = torch.zeros(pattern.local_heads, rows, columns, dtype=torch.bool, device=device)
    every = torch.ones_like(some)
    per = tile // block
    full_columns = (torch.arange(columns, device=device) + 1) * tile - 1
    for step in range(per + 1):
        i = torch.minimum(first // block + step, last // block)
        seen = torch.nn.functional.pad(head_blocks[:, i], (0, columns * per - head_blocks.shape[2])).unflatten(2, (columns, per))
        some |= seen.any(-1)
        every &= seen.all(-1)
    every &= full_columns[None, :] <= first[:, None]
    partial = some & ~every
    kv_num, kv_indices = _index(partial)
    full_num, full_indices = _index(every)
    return flex.BlockMask.from_kv_blocks(
        kv_num, kv_indices, full_num, full_indices, BLOCK_SIZE=tile, mask_mod=_mask_mod(pattern, shift, device), seq_lengths=(q_len, k_len)
    )


def _head_blocks(pattern: S2Pattern | BlockMask, blocks: int, device: torch.device) -> torch.Tensor:
    if isinstance(pattern, BlockMask):
        return pattern.mask[:, :blocks, :blocks].to(device)
    return pattern.block_mask(blocks).to(device)


def _index(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, heads, rows) counts and (1, heads, rows, columns) indices of the set tiles, in ascending order."""
    counts = tiles.sum(-1, dtype=torch.int32)[None]
    indices = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None]
    return counts.contiguous(), indices.contiguous()


@lru_cache(maxsize=8)
def _document_mask(pattern: S2Pattern, bounds: tuple[int, ...], device: torch.device) -> Any:
    """Block mask of packed documents, evaluated by torch's compiled builder (documents cut the pattern at any position)."""
    cu = torch.tensor(bounds, device=device)
    length = bounds[-1]
    owner = torch.bucketize(torch.arange(length, device=device), cu[1:], right=True)
    start = cu[:-1][owner]
    residue = torch.tensor(pattern.residues(), device=device)
    block, local, stride = pattern.block_size, pattern.local_blocks, pattern.stride

    def stripes(b: torch.Tensor, h: torch.Tensor, t_q: torch.Tensor, t_k: torch.Tensor) -> torch.Tensor:
        i, j = (t_q - start[t_q]) // block, (t_k - start[t_k]) // block
        near = (i - j < local) | (residue[h] == DENSE) | (j % stride == residue[h])
        return (owner[t_q] == owner[t_k]) & (t_k <= t_q) & near

    return flex.create_block_mask(stripes, None, pattern.local_heads, length, length, device=device, _compile=True)
