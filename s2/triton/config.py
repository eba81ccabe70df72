"""Tile sizes of the kernels by head width, dtype and block: the table's (`tuning.py`), pruned by the device's shared memory. Chosen before
a launch: no tuning inside a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .tuning import find

HOPPER = (9, 0)
"""The capability whose tiles the package's own table holds."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of one kernel's tile."""

    rows: int
    """Queries (times packed heads) of a tile."""
    keys: int
    """Keys of a tile."""
    warps: int
    """Warps of a program."""
    stages: int
    """Depth of the software pipeline over the loop's tiles."""
    tma: bool = True
    """Load by the tensor-memory accelerator where the device and the layout allow it."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of all kernels for one kind of call."""

    forward: Tile
    dq: Tile
    dkv: Tile
    stripe: Tile | None = None
    """Of the stripes' kernel; None: that of the window's, which `dkv` is."""
    overlap: bool = False
    """Run dq on a stream of its own beside dk and dv: measured by the benchmark, chosen by nothing yet."""


@dataclass(frozen=True, kw_only=True)
class DecodeTile:
    """Shape of the decoding kernel's work."""

    keys: int
    """Keys of a tile."""
    warps: int
    """Warps of a program."""
    stages: int
    """Depth of the software pipeline: tiles on their way from memory."""
    programs: int = 8
    """Chunks of work to aim at, for each multiprocessor."""
    least: int = 1
    """Fewest tiles of a chunk."""


def padded(width: int) -> int:
    """Width of a head inside the kernels: the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def _shared_bytes(kind: str, tile: Tile, d_k: int, d_v: int, size: int) -> int:
    """Estimate of a program's shared memory: the resident operands and the pipeline's stages."""
    pair = (d_k + d_v) * size
    if kind == "forward":
        return tile.rows * d_k * size + tile.stages * tile.keys * pair
    resident, streamed = (tile.rows, tile.keys) if kind == "dq" else (tile.keys, tile.rows)
    return resident * pair + tile.stages * streamed * (pair + 8)


def _fitted(kind: str, d_k: int, d_v: int, size: int, shared: int, block: int, length: int, capability: tuple[int, int]) -> Tile | None:
    """The table's tile, made smaller until it fits in `shared` bytes; None: not even the smallest does."""
    tile = Tile(**find(kind, size, max(d_k, d_v), block, length, capability))
    while _shared_bytes(kind, tile, d_k, d_v, size) > shared:
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16 and tile.keys >= tile.rows:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.rows > 16:
            tile = replace(tile, rows=tile.rows // 2, warps=4)
        else:
            return None
    return tile


@lru_cache(maxsize=256)
def choose_tiles(
    d_k: int, d_v: int, size: int, shared: int, block: int, length: int = 1 << 20, capability: tuple[int, int] = HOPPER
) -> Tiles | None:
    """Tiles for padded head widths, element size and shared memory in bytes, and the pattern's block; None when no tile fits.

    `block` is the pattern's block size, or 128 for dense attention, whose tiles any size may cut; `length` the tokens of a row.
    """
    kinds = ("forward", "dq", "dkv", "stripe")
    forward, dq, dkv, stripe = (_fitted(kind, d_k, d_v, size, shared, block, length, capability) for kind in kinds)
    if forward is None or dq is None or dkv is None or stripe is None:
        return None
    return Tiles(forward=forward, dq=dq, dkv=dkv, stripe=stripe)


@lru_cache(maxsize=256)
def choose_decode(
    d_k: int, d_v: int, size: int, shared: int, block: int = 128, length: int = 1 << 20, capability: tuple[int, int] = HOPPER
) -> DecodeTile | None:
    """The decoding tile for padded head widths, element size and shared memory in bytes; None when no tile fits.

    The compiler keeps one tile of keys and values less than `stages` in shared memory: at width 128 and 2 bytes 64 KiB, three
    programs to a multiprocessor of Hopper.
    """
    tile = DecodeTile(**find("decode", size, max(d_k, d_v), block, length, capability))
    while 16 * d_k * size + tile.stages * tile.keys * (d_k + d_v) * size > min(shared, 112 << 10):
        if tile.keys > 16:
            tile = replace(tile, keys=tile.keys // 2)
        elif tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            return None
    return tile
