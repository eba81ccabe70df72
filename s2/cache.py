"""Decoding: a key/value cache that keeps only what the pattern still needs, and attention of one new token per sequence over it.

Off the stripe a key block is dropped after `local_blocks` blocks, so that a head keeps about local_blocks * block_size + length / stride
keys. Plain torch on any device: it defines what a faster kernel must compute.
"""

from __future__ import annotations

import math

import torch

from .errors import S2Error
from .pattern import DENSE, S2Pattern


class S2Cache:
    """Keys and values of a batch of sequences, of any lengths, for one layer and one tensor-parallel rank.

    `pattern`: that layer's and rank's view. Of a sequence of n tokens the cache holds, for each key/value head, exactly the
    `pattern.kv_tokens(n)` keys that position n - 1 attends to. Window and stripe of a head lie in one buffer, oldest key first.
    """

    def __init__(
        self,
        pattern: S2Pattern,
        batch: int,
        num_kv_heads: int,
        d_k: int,
        d_v: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_kv_heads != pattern.local_kv_heads:
            raise S2Error("num_kv_heads", num_kv_heads, f"the pattern has {pattern.local_kv_heads}", "give the layer's and rank's pattern")
        if batch < 1:
            raise S2Error("batch", batch, "must be positive", "give the number of sequences")
        self.pattern = pattern
        self.lengths = [0] * batch
        """Tokens that each sequence has had."""
        group = pattern.local_heads // num_kv_heads
        residues = pattern.residues()
        self._wanted = [set(residues[h * group : (h + 1) * group]) for h in range(num_kv_heads)]
        self._keys = [[torch.empty(0, d_k, dtype=dtype, device=device) for _ in range(num_kv_heads)] for _ in range(batch)]
        self._values = [[torch.empty(0, d_v, dtype=dtype, device=device) for _ in range(num_kv_heads)] for _ in range(batch)]
        self._positions = [[torch.empty(0, dtype=torch.int64, device=device) for _ in range(num_kv_heads)] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(x.numel() * x.element_size() for side in (self._keys, self._values) for row in side for x in row)

    def held(self, sequence: int, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values, positions) that a head holds of a sequence, in ascending positions."""
        return self._keys[sequence][kv_head], self._values[sequence][kv_head], self._positions[sequence][kv_head]

    def append(self, k: torch.Tensor, v: torch.Tensor, new: list[int] | None = None) -> None:
        """Adds tokens: k (batch, n, kv_heads, d_k), v (batch, n, kv_heads, d_v), in the cache's dtype. A prompt, or a token at a time.

        `new`: how many of the n tokens each sequence gets, its first ones; None: all. What the next token's query cannot see is dropped.
        """
        batch, heads = len(self.lengths), len(self._wanted)
        like_k, like_v = self._keys[0][0], self._values[0][0]
        fits = k.shape[0] == v.shape[0] == batch and k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] == heads
        if not fits or k.shape[3] != like_k.shape[1] or v.shape[3] != like_v.shape[1]:
            shapes = f"k{tuple(k.shape)} v{tuple(v.shape)}"
            rule = f"must be ({batch}, n, {heads}, {like_k.shape[1]}) and ({batch}, n, {heads}, {like_v.shape[1]})"
            raise S2Error("shapes", shapes, rule, "see S2Cache")
        counts = [k.shape[1]] * batch if new is None else list(new)
        if len(counts) != batch or any(not 0 <= count <= k.shape[1] for count in counts):
            raise S2Error("new", counts, f"must be {batch} numbers from 0 to {k.shape[1]}", "give how many tokens each sequence gets")
        for sequence, count in enumerate(counts):
            start = self.lengths[sequence]
            self.lengths[sequence] = start + count
            fresh = torch.arange(start, start + count, device=like_k.device)
            for head in range(heads) if count else ():
                self._extend(sequence, head, k[sequence, :count, head], v[sequence, :count, head], fresh)

    def _extend(self, sequence: int, head: int, k: torch.Tensor, v: torch.Tensor, fresh: torch.Tensor) -> None:
        keys, values, positions = self.held(sequence, head)
        positions = torch.cat([positions, fresh])
        keep = self._needed(head, positions, self.lengths[sequence] - 1)
        self._positions[sequence][head] = positions[keep]
        self._keys[sequence][head] = torch.cat([keys, k.to(keys.dtype)])[keep]
        self._values[sequence][head] = torch.cat([values, v.to(values.dtype)])[keep]

    def _needed(self, head: int, positions: torch.Tensor, last: int) -> torch.Tensor:
        """Which of the positions the query at position `last`, or any later one, attends to in some head of the group."""
        blocks, size = positions // self.pattern.block_size, self.pattern.block_size
        keep = last // size - blocks < self.pattern.local_blocks
        for residue in self._wanted[head]:
            keep |= torch.ones_like(keep) if residue == DENSE else blocks % self.pattern.stride == residue
        return keep


def s2_decode(q: torch.Tensor, cache: S2Cache, *, scale: float | None = None) -> torch.Tensor:
    """Attention of the newest token of each sequence: q (batch, 1, heads, d_k) -> (batch, 1, heads, d_v).

    The token's own key and value have been appended. Equals the last row of `s2_attention` over the whole sequence. Sums are float32.

    >>> pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    >>> cache = S2Cache(pattern, batch=1, num_kv_heads=2, d_k=8, d_v=8)
    >>> cache.append(torch.randn(1, 100, 2, 8), torch.randn(1, 100, 2, 8))
    >>> s2_decode(torch.randn(1, 1, 2, 8), cache).shape, cache.nbytes == int(pattern.kv_tokens(100).sum()) * 16 * 4
    (torch.Size([1, 1, 2, 8]), True)
    """
    pattern, batch = cache.pattern, len(cache.lengths)
    if q.dim() != 4 or q.shape[0] != batch or q.shape[1] != 1 or q.shape[2] != pattern.local_heads:
        raise S2Error("q", tuple(q.shape), f"must be ({batch}, 1, {pattern.local_heads}, d_k)", "one new token for each sequence")
    if min(cache.lengths) == 0:
        raise S2Error("lengths", cache.lengths, "a sequence has no token yet", "append its keys and values first")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    residues, group = pattern.residues(), pattern.local_heads // pattern.local_kv_heads
    rows = []
    for sequence, length in enumerate(cache.lengths):
        heads = []
        for kv_head in range(pattern.local_kv_heads):
            keys, values, positions = cache.held(sequence, kv_head)
            mine = residues[kv_head * group : (kv_head + 1) * group]
            scores = (q[sequence, 0, kv_head * group : (kv_head + 1) * group].to(wide) @ keys.to(wide).T) * scale
            if len(set(mine)) > 1:
                blocks = positions // pattern.block_size
                residue = torch.tensor(mine, device=q.device)[:, None]
                near = (length - 1) // pattern.block_size - blocks < pattern.local_blocks
                scores = scores.masked_fill(~(near | (residue == DENSE) | (blocks % pattern.stride == residue)), float("-inf"))
            heads.append(torch.softmax(scores, -1) @ values.to(wide))
        rows.append(torch.cat(heads))
    return torch.stack(rows)[:, None].to(q.dtype)
