"""Rotary positions for Megatron-core's attention: one kernel a tensor on a GPU, angles that restart with each document.

Core without Transformer Engine turns queries and keys with a dozen elementwise kernels and takes cosines anew in every layer: 12 % of
a 1.2 B-parameter step on an H200. `install()` puts :func:`rotate` in that place. The model computes cosines and sines once per
micro-batch and hands them on as core's `rotary_pos_emb`.
"""

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def cos_sin(positions: Tensor, head_dim: int, base: float) -> Tensor:
    """(s, b, 1, d) float32 of positions (b, s): the cosines of the d/2 angles, then their sines.

    Pair j of a head is (j, j + d/2) and turns by position * base^(-2j/d). Source: Su et al., "RoFormer" (arXiv 2104.09864).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.transpose(0, 1).float()[..., None] * base**-exponent
    return torch.cat((angles.cos(), angles.sin()), dim=-1)[:, :, None, :]


def _turn(x: Tensor, table: Tensor, sign: float) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = table.chunk(2, -1)
    sin = sin * sign
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@lru_cache(maxsize=1)
def _compiled() -> Callable[[Tensor, Tensor, float], Tensor]:
    return torch.compile(_turn)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return (_compiled() if x.is_cuda else _turn)(x, table, 1.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        # A rotation's gradient is turned back by the same angles.
        (table,) = ctx.saved_tensors
        (g,) = upstream
        return (_compiled() if g.is_cuda else _turn)(g, table, -1.0), None


def rotate(t: Tensor, freqs: Tensor, config: Any = None, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **_: Any) -> Tensor:
    """Turn t (s, b, heads, d) by the table (s, b, 1, d) of :func:`cos_sin`; computed in float32, returned in t's dtype.

    The other arguments are core's; those that would ask for something else raise ValueError.
    """
    if cu_seqlens is not None or mscale != 1.0:
        raise ValueError(f"cu_seqlens={cu_seqlens}, mscale={mscale}: positions restart in the table itself and are not scaled")
    rotated: Tensor = _Rotate.apply(t, freqs)
    return rotated


def install() -> None:
    """Have core's attention turn queries and keys with :func:`rotate`."""
    importlib.import_module("megatron.core.transformer.attention").apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]
