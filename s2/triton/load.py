"""Loading a tile of rows by pointers, where the tensor-memory accelerator does not serve."""

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
