"""The key/value cache of decoding: it keeps only what the pattern still needs, where a kernel reads it without copies.

The rows of a sequence lie in one buffer for keys and one for values. A key/value head owns
- a ring of local_blocks blocks, the window: position t in row t modulo its length;
- one strip for each residue of its query heads: the blocks of that stripe one after another;
- or, when one of its query heads attends to everything, all positions in order, and neither ring nor strips.
Blocks that are in the window and on a stripe lie in both, so that decoding reads two unbroken runs of rows, whatever the pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .errors import S2Error
from .pattern import DENSE, S2Pattern

RING = -2
"""Stands for a residue in the table of regions: the window's ring."""
SMALLEST = 256
"""Tokens that a cache makes room for at first, unless told otherwise."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a sequence lie, for room for `blocks` blocks of each head."""

    pattern: S2Pattern
    blocks: int

    @cached_property
    def wanted(self) -> list[list[int]]:
        """For each key/value head the residues of its query heads, ascending; [DENSE] when one of them attends to everything."""
        residues, kv_heads = self.pattern.residues(), self.pattern.local_kv_heads
        group = len(residues) // kv_heads
        found = [sorted(set(residues[h * group : (h + 1) * group])) for h in range(kv_heads)]
        return [[DENSE] if DENSE in wanted else wanted for wanted in found]

    @cached_property
    def regions(self) -> list[tuple[int, int, int, int]]:
        """(key/value head, residue, DENSE or RING, first row, rows) of every region, in the order of rows."""
        block, found, row = self.pattern.block_size, [], 0
        strip = -(-self.blocks // self.pattern.stride)
        for head, wanted in enumerate(self.wanted):
            kinds = [DENSE] if wanted == [DENSE] else [RING, *wanted]
            for kind in kinds:
                rows = (self.blocks if kind == DENSE else self.pattern.local_blocks if kind == RING else strip) * block
                found.append((head, kind, row, rows))
                row += rows
        return found

    @property
    def rows(self) -> int:
        """Rows of a sequence."""
        _, _, first, rows = self.regions[-1]
        return first + rows

    @cached_property
    def heads(self) -> list[tuple[int, int, int, int]]:
        """For each query head (first row of its ring or -1, first row of its far keys, blocks between two far blocks, residue).

        A sparse head whose key/value head keeps everything has no ring: its window and its stripe lie among the rest, position 0 of which
        is `residue` blocks before its first far key.
        """
        first = {(head, kind): row for head, kind, row, _ in self.regions}
        residues, group = self.pattern.residues(), self.pattern.local_heads // self.pattern.local_kv_heads
        found = []
        for head, residue in enumerate(residues):
            kv_head = head // group
            if (kv_head, DENSE) in first:
                row = first[kv_head, DENSE]
                sparse = (-1, row + residue * self.pattern.block_size, self.pattern.stride, residue)
                found.append((-1, row, 1, DENSE) if residue == DENSE else sparse)
            else:
                found.append((first[kv_head, RING], first[kv_head, residue], 1, residue))
        return found

    def held(self, kv_head: int, length: int) -> list[tuple[int, int]]:
        """(position, row) of what the head holds of a sequence of `length` tokens, in ascending positions."""
        block, local, stride = self.pattern.block_size, self.pattern.local_blocks, self.pattern.stride
        last = (length - 1) // block
        found: dict[int, int] = {}
        for head, kind, first, rows in self.regions:
            if head != kv_head or not length:
                continue
            if kind == DENSE:
                found |= {t: first + t for t in range(length)}
            elif kind == RING:
                found |= {t: first + t % rows for t in range(max(0, last - local + 1) * block, length)}
            else:
                far = range(kind, last - local + 1, stride)
                found |= {j * block + n: first + (j // stride) * block + n for j in far for n in range(block)}
        return sorted(found.items())

    def tokens(self, kv_head: int, length: int) -> int:
        """How many keys that are."""
        if self.wanted[kv_head] == [DENSE] or not length:
            return length
        block, far_blocks = self.pattern.block_size, (length - 1) // self.pattern.block_size - self.pattern.local_blocks + 1
        far = sum(len(range(residue, far_blocks, self.pattern.stride)) for residue in self.wanted[kv_head])
        return length - max(0, far_blocks) * block + far * block


class S2Cache:
    """Keys and values of a batch of sequences, of any lengths, for one layer and one tensor-parallel rank.

    `pattern`: that layer's and rank's view. Of a sequence of n tokens the cache holds, for each key/value head, exactly the
    `pattern.kv_tokens(n)` keys that position n - 1 attends to. `capacity`: tokens a sequence to make room for at once; a longer
    sequence makes the buffers grow, which moves them: not while a CUDA graph is recorded.

    keys (batch, rows + 1, d_k) and values (batch, rows + 1, d_v) are laid out by `layout`; the last row takes what is dropped.
    `device_lengths` (batch,) int32 are the lengths as kernels read them.
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
        *,
        capacity: int = 0,
    ) -> None:
        if num_kv_heads != pattern.local_kv_heads:
            raise S2Error("num_kv_heads", num_kv_heads, f"the pattern has {pattern.local_kv_heads}", "give the layer's and rank's pattern")
        if batch < 1:
            raise S2Error("batch", batch, "must be positive", "give the number of sequences")
        self.pattern = pattern
        self.batch, self.d_k, self.d_v = batch, d_k, d_v
        self._seen = [0] * batch
        self.device_lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.layout = Layout(pattern, 0)
        self.keys = torch.empty(batch, 1, d_k, dtype=dtype, device=device)
        self.values = torch.empty(batch, 1, d_v, dtype=dtype, device=device)
        self._grow(max(capacity, SMALLEST))

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that there is room for now."""
        return self.layout.blocks * self.pattern.block_size

    @property
    def longest(self) -> int:
        """Most tokens that any sequence has had, as far as the host knows: replays of a CUDA graph are not counted."""
        return max(self._seen)

    @property
    def lengths(self) -> list[int]:
        """Tokens that each sequence has had. Waits for the device. Raises when a replayed CUDA graph has gone past the capacity."""
        lengths: list[int] = self.device_lengths.tolist()
        if max(lengths) > self.capacity:
            raise S2Error("lengths", max(lengths), f"exceeds the capacity of {self.capacity} tokens", "give S2Cache a larger capacity")
        return lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, which is what decoding a token reads. Waits for the device."""
        width = (self.d_k + self.d_v) * self.keys.element_size()
        heads = range(self.pattern.local_kv_heads)
        return sum(self.layout.tokens(head, length) for length in self.lengths for head in heads) * width

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.keys.nbytes + self.values.nbytes

    def held(self, sequence: int, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values, positions) that a head holds of a sequence, in ascending positions; copies."""
        found = self.layout.held(kv_head, self.lengths[sequence])
        positions, rows = torch.tensor(found, dtype=torch.int64, device=self.keys.device).reshape(-1, 2).unbind(1)
        return self.keys[sequence, rows], self.values[sequence, rows], positions

    def append(self, k: torch.Tensor, v: torch.Tensor, new: Sequence[int] | None = None) -> None:
        """Adds tokens: k (batch, n, kv_heads, d_k), v (batch, n, kv_heads, d_v), in the cache's dtype. A prompt, or a token at a time.

        `new`: how many of the n tokens each sequence gets, its first ones; None: all. What the next token's query cannot see is dropped.
        """
        counts = self._check(k, v, new)
        self._seen = [length + count for length, count in zip(self._seen, counts, strict=True)]
        if self.longest > self.capacity:
            self._grow(max(self.longest, 2 * self.capacity))
        k, v = k.to(self.keys.dtype), v.to(self.values.dtype)
        added = torch.tensor(counts, dtype=torch.int32, device=self.keys.device) if new is not None else None
        from .decode import kernels_refused

        if kernels_refused(self) is None:
            from .triton.decode import append

            append(self, k, v, added)
        else:
            self._scatter(k, v, added)
        self.device_lengths += k.shape[1] if added is None else added

    def _check(self, k: torch.Tensor, v: torch.Tensor, new: Sequence[int] | None) -> list[int]:
        heads = self.pattern.local_kv_heads
        fits = k.shape[0] == v.shape[0] == self.batch and k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] == heads
        if not fits or k.shape[3] != self.d_k or v.shape[3] != self.d_v:
            shapes = f"k{tuple(k.shape)} v{tuple(v.shape)}"
            rule = f"must be ({self.batch}, n, {heads}, {self.d_k}) and ({self.batch}, n, {heads}, {self.d_v})"
            raise S2Error("shapes", shapes, rule, "see S2Cache")
        counts = [k.shape[1]] * self.batch if new is None else list(new)
        if len(counts) != self.batch or any(not 0 <= count <= k.shape[1] for count in counts):
            raise S2Error("new", counts, f"must be {self.batch} numbers from 0 to {k.shape[1]}", "give how many tokens each sequence gets")
        return counts

    def _grow(self, tokens: int) -> None:
        """Makes room for at least `tokens` tokens a sequence; what is held moves along."""
        if self.keys.is_cuda and torch.cuda.is_current_stream_capturing():
            rule = "is reached while a CUDA graph is recorded"
            raise S2Error("capacity", self.capacity, rule, "give S2Cache the tokens of the longest sequence")
        layout = Layout(self.pattern, -(-tokens // self.pattern.block_size))
        for name in ("keys", "values"):
            old = getattr(self, name)
            fresh = torch.empty(self.batch, layout.rows + 1, old.shape[2], dtype=old.dtype, device=old.device)
            for (_, _, source, rows), (_, _, target, _) in zip(self.layout.regions, layout.regions, strict=True):
                if self.layout.blocks:
                    fresh[:, target : target + rows] = old[:, source : source + rows]
            setattr(self, name, fresh)
        self.layout = layout
        tables: list[list[tuple[int, ...]]] = [[region[:3] for region in layout.regions], list(layout.heads)]
        self.region_table, self.head_table = (torch.tensor(x, dtype=torch.int32, device=self.keys.device) for x in tables)

    def _scatter(self, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None) -> None:
        """Writes the tokens in plain torch, without reading anything on the host; what no region takes goes to the last row."""
        block, local, stride = self.pattern.block_size, self.pattern.local_blocks, self.pattern.stride
        tokens, device = k.shape[1], self.keys.device
        step = torch.arange(tokens, device=device)[None, :]
        count = torch.full_like(self.device_lengths, tokens) if added is None else added
        position = self.device_lengths[:, None] + step
        fresh = (step < count[:, None]) & (position < self.capacity)
        blocks = position // block
        last = (self.device_lengths + count - 1)[:, None] // block
        for head, kind, first, rows in self.layout.regions:
            keep, row = fresh, position
            if kind == RING:
                keep, row = fresh & (last - blocks < local), position % rows
            elif kind != DENSE:
                keep, row = fresh & (blocks % stride == kind), blocks // stride * block + position % block
            row = torch.where(keep, first + row, self.layout.rows).long()[:, :, None]
            self.keys.scatter_(1, row.expand(-1, -1, self.d_k), k[:, :, head])
            self.values.scatter_(1, row.expand(-1, -1, self.d_v), v[:, :, head])
