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


@triton.jit
def key_origin(pointer, batch, head, start, sb, ss, sh, rb, rh, cb, ch):  # type: ignore[no-untyped-def]
    """Where the keys from row `start` on of a key/value head begin: (address, row and column of a descriptor's view)."""
    base = pointer + batch.to(tl.int64) * sb + head.to(tl.int64) * sh + tl.cast(start, tl.int64) * ss
    return base, batch * rb + head * rh + start, batch * cb + head * ch


@triton.jit
def load_keys(  # type: ignore[no-untyped-def]
    tile, base, origin_row, origin_column, start, offsets, stride, columns, valid,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr, STRIPES: tl.constexpr,
):  # fmt: skip
    """BN keys or values, from `start` on, by descriptor, which may read past the last one, or by pointer; STRIPES: blocks of a stripe."""
    if TMA and STRIPES:
        return tile.load([0, origin_row + start, origin_column]).reshape(BN, BD)
    elif TMA:
        return tile.load([origin_row + start, origin_column])
    else:
        return load_rows(base, start, offsets, stride, columns, valid, D, BD, CHECK)
