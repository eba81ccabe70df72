"""Tensor descriptors for the tensor-memory accelerator: views of (batch, length, heads, width) tensors of any stride order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class View:
    """How a (batch, length, heads, width) tensor lies in rows: row batch * rb + head * rh + t, column batch * cb + head * ch."""

    rows: int
    columns: int
    stride: int
    rb: int
    rh: int
    cb: int
    ch: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What the kernels take: (rb, rh, cb, ch)."""
        return self.rb, self.rh, self.cb, self.ch


def view(x: torch.Tensor) -> View | None:
    """The view, or None where the accelerator cannot read x: alignment of 16 bytes, unit stride in the width, whole row strides."""
    batch, length, heads, width = x.shape
    stride = x.stride(1)
    align = 16 // x.element_size()
    if x.stride(3) != 1 or x.data_ptr() % 16 or stride % align or stride < width:
        return None
    steps: list[tuple[int, int]] = []
    for size, step in ((batch, x.stride(0)), (heads, x.stride(2))):
        if size == 1:
            steps.append((0, 0))
        elif step < stride:
            steps.append((0, step))
        elif step % stride == 0:
            steps.append((step // stride, 0))
        else:
            return None
    (rb, cb), (rh, ch) = steps
    rows = (batch - 1) * rb + (heads - 1) * rh + length
    columns = (batch - 1) * cb + (heads - 1) * ch + width
    return View(rows, columns, stride, rb, rh, cb, ch) if max(rows, columns) < 1 << 31 else None


def tile(x: torch.Tensor, how: View, rows: int) -> Any:
    """Descriptor of tiles of `rows` rows of x, the whole width."""
    return TensorDescriptor(x, [how.rows, how.columns], [how.stride, 1], [rows, x.shape[3]])


def stripes(x: torch.Tensor, how: View, keys: int, block: int, stride: int) -> Any:
    """Descriptor of tiles of `keys` stripe keys: blocks of `block` rows, `stride` blocks apart.

    The first dimension steps over blocks by an overlapping stride; a tile must lie inside x.
    """
    if keys <= block:
        return tile(x, how, keys)
    shape = [keys // block, how.rows, how.columns]
    return TensorDescriptor(x, shape, [stride * block * how.stride, how.stride, 1], [keys // block, block, x.shape[3]])
