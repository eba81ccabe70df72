"""Index arithmetic of the kernels: documents of a packed row, and the key tiles that a tile of queries needs.

Forward and backward share these functions, so that they cannot choose different tiles. All positions are relative to the document.
Names: B tokens in a block, L local blocks, S stride, r a head's residue (negative: dense), BN keys in a tile.
"""

import triton
import triton.language as tl

DENSE_LOCAL = tl.constexpr(1 << 24)
"""Local blocks of a dense head: more than any sequence has."""


@triton.jit
def find_document(cu, documents, tile, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Document of a tile of SPAN rows, when document d owns the tiles from cu[d] // SPAN + d on: enough for its rows.

    Returns (document, its first row, its rows, the tile's number inside it); the tile may lie past the document's end.
    """
    low = 0
    high = documents - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu + middle) // SPAN + middle <= tile:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu + low)
    return low, start, tl.load(cu + low + 1) - start, tile - (start // SPAN + low)


@triton.jit
def query_program(  # type: ignore[no-untyped-def]
    tiles, documents, q_len, k_len, kv_heads, cu_q, cu_k, GROUP: tl.constexpr, PACK: tl.constexpr, R: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """The work of one program over tiles of R queries of PACK heads: head after head, so that its keys stay in the cache, and in each the
    last tiles (most keys) first.

    Returns (batch, first head, key/value head, tile in the document, first row of q, queries, first row of k, keys).
    """
    SUBS: tl.constexpr = GROUP // PACK
    unit = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    kv_head = (unit // SUBS) % kv_heads
    batch = unit // (SUBS * kv_heads)
    head = kv_head * GROUP + (unit % SUBS) * PACK
    q_start, k_start, queries, keys = 0, 0, q_len, k_len
    if DOCUMENTS:
        document, q_start, queries, tile = find_document(cu_q, documents, tile, R)
        k_start = tl.load(cu_k + document)
        keys = tl.load(cu_k + document + 1) - k_start
    return batch, head, kv_head, tile, q_start, queries, k_start, keys


@triton.jit
def query_rows(head, tile, queries, R: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the BM slots of a tile of R queries of BM / R heads: (row in the tile, row, whether it exists, query head in 64 bits)."""
    slot = tl.arange(0, BM)
    row = tile * R + slot % R
    return slot % R, row, row < queries, (head + slot // R).to(tl.int64)


@triton.jit
def stripe_key(x, r, B: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Position of the x-th key on the stripe of residue r."""
    return ((x // B) * S + r) * B + x % B


@triton.jit
def key_tiles(first, last, r, B: tl.constexpr, L: tl.constexpr, S: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The key tiles of the queries at positions first to last.

    Returns (local, stripe_keys, low, edges, middle_low, middles, diagonal_low, diagonals): `stripe_keys` keys on the stripe and older than
    any query's window are seen by all the queries; then, from key `low` on, `edges` tiles that some queries' windows have left, from
    `middle_low` on `middles` tiles that all see whole, and from `diagonal_low` on `diagonals` tiles that end with the last query.
    """
    local = tl.where(r < 0, DENSE_LOCAL, L)
    first_block = first // B
    near = tl.maximum(first_block - local + 1, 0)
    stripes = tl.where(r < 0, 0, tl.maximum(near - r + S - 1, 0) // S)
    low = near * B
    edges = tl.cdiv(tl.maximum(last // B - local + 1, 0) * B - low, BN)
    middle_low = low + edges * BN
    middles = tl.maximum(first_block * B - middle_low, 0) // BN
    diagonal_low = middle_low + middles * BN
    diagonals = tl.cdiv(tl.maximum(last + 1 - diagonal_low, 0), BN)
    return local, stripes * B, low, edges, middle_low, middles, diagonal_low, diagonals


@triton.jit
def key_tile(  # type: ignore[no-untyped-def]
    t, stripes, middles, edges, low, middle_low, diagonal_low, r, B: tl.constexpr, S: tl.constexpr, BN: tl.constexpr
):
    """(first key, whether it needs the mask) of the t-th tile of a row of tiles: stripes, middles, edges, then diagonals."""
    plain = stripes + middles
    start = tl.where(t < plain + edges, low + (t - plain) * BN, diagonal_low + (t - plain - edges) * BN)
    start = tl.where(t < plain, middle_low + (t - stripes) * BN, start)
    if S > 1:
        start = tl.where(t < stripes, stripe_key(t * BN, r, B, S), start)
    return start, t >= plain


@triton.jit
def past_the_end(low, tiles, rows, SIZE: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 when the last of the `tiles` from row `low` on must not be loaded by a descriptor, as it goes past the last of the `rows`, else 0.

    What lies there belongs to another document, head or sequence. Its weight is 0, but 0 times a NaN is NaN.
    """
    beyond = 0
    if TAIL:
        beyond = (low + tiles * SIZE > rows).to(tl.int32)
    return beyond


@triton.jit
def token_mask(position, key, seen, local, r, B: tl.constexpr, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pattern's definition for query positions and keys of broadcastable shapes; `seen`: the key exists."""
    near = position // B - key // B < local
    if S > 1:
        near = near | ((key // B) % S == r)
    return seen & (key <= position) & near
