"""Loading tiles of rows: by pointers with masks, or by the tensor-memory accelerator when the device has one and the layout allows it."""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, start, offsets, stride, columns, valid, D: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `start + offsets` of width D, padded with zeros to BD; when CHECK, rows that are not `valid` are zeros.

    `start` is a scalar and goes into the 64-bit base; offsets inside a tile stay in 32 bits.
    """
    pointers = base + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns[None, :]
    if CHECK and BD != D:
        return tl.load(pointers, mask=valid[:, None] & (columns < D)[None, :], other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    elif BD != D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_stripes(descriptor, row, column, ROWS: tl.constexpr, BD: tl.constexpr, MANY: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of stripe keys by one descriptor load: MANY blocks, one stride apart, when a block is smaller than a tile."""
    if MANY:
        return descriptor.load([0, row, column]).reshape(ROWS, BD)
    else:
        return descriptor.load([row, column])
