"""The S2 pattern: which key blocks a head attends to, as arithmetic on (head, query block, key block).

Every head sees a local window and its own vertical stripe of the past; the stripes of all heads together are the whole context
(arXiv 2407.17678). With block size b, L local blocks, stride s, offset o and global head number h:

    attends(h, i, j) = j <= i  and  (i - j < L  or  (j + h*step + o) mod s == 0),   and t_k <= t_q inside the diagonal block

Nothing here imports torch (but :meth:`S2Pattern.block_mask`, when called), so that a configuration is checked in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .errors import S2Error

if TYPE_CHECKING:
    import torch

DENSE = -1
"""Residue of a head that attends to everything."""


def _whole(key: str, value: object, low: int, remedy: str) -> int:
    """Returns `value` as an int of at least `low`, or raises."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise S2Error(key, value, f"must be a whole number of at least {low}", remedy)
    return int(value)


def _dense_layer_spec(value: object) -> str | tuple[int, ...]:
    """Checks `first:N`, `every:N` or a list of block numbers; returns the string, or the numbers sorted."""
    remedy = "write first:N, every:N or a list of 0-based block numbers"
    if isinstance(value, str):
        kind, _, count = value.partition(":")
        if kind not in ("first", "every") or not count.isascii() or not count.isdigit() or (kind == "every" and int(count) == 0):
            raise S2Error("dense_layers", value, "is not a layer specification", remedy)
        return value
    if not isinstance(value, Iterable):
        raise S2Error("dense_layers", value, "is not a layer specification", remedy)
    layers = [_whole("dense_layers", layer, 0, remedy) for layer in value]
    if len(set(layers)) != len(layers):
        raise S2Error("dense_layers", value, "names a layer twice", remedy)
    return tuple(sorted(layers))


@lru_cache(maxsize=1024)
def _rotation(sparse_heads: int, step: int, stride: int, layers: int) -> tuple[int, tuple[int, ...]]:
    """Returns the shift of the offset from one sparse layer to the next, and the residues that `layers` layers never reach.

    The shift is the smallest one with which the layers reach the most residues. Residues are relative to offset 0.
    """
    one = {-h * step % stride for h in range(sparse_heads)}
    best_shift, best = 1, set(one)
    for shift in range(1, stride):
        reached = {(residue - n * shift) % stride for residue in one for n in range(layers)}
        if len(reached) > len(best):
            best_shift, best = shift, reached
    return best_shift, tuple(sorted(set(range(stride)) - best))


def _steps_sum(count: int, stride: int) -> int:
    """Sum of `m // stride + 1` over m in [0, count)."""
    whole, rest = divmod(count, stride)
    return stride * whole * (whole + 1) // 2 + rest * (whole + 1)


@dataclass(frozen=True, kw_only=True)
class S2Pattern:
    """A model's attention pattern, or the view of it that one layer and one tensor-parallel rank have.

    The fields always describe the *whole* model; :meth:`for_layer` and :meth:`shard` set the view. Methods that speak of heads mean
    the heads of the view.

    >>> pattern = S2Pattern(num_heads=8, num_kv_heads=4, block_size=16, local_blocks=2, stride=4)
    >>> pattern.shard(1, 2).residues()
    (2, 2, 1, 1)
    >>> round(pattern.density(1024), 3)
    0.285
    """

    num_heads: int
    """Query heads of the model."""
    num_kv_heads: int
    """Key/value heads of the model; divides `num_heads`."""
    block_size: int = 64
    """Tokens in a block: a power of two, 16 or more."""
    local_blocks: int = 16
    """Blocks of the local window, the diagonal one counted."""
    stride: int = 16
    """A head attends to one in `stride` of the older key blocks; 1 is dense causal attention."""
    offset: int = 0
    """Shift of all the stripes."""
    step: int | None = None
    """Shift of the stripe from one sparse head to the next; None: 1 when there are `stride` sparse heads or more, else stride // heads."""
    dense_heads: int = 0
    """Heads (of the kind that `per` names) that attend to everything, spread evenly over the heads."""
    per: str = "kv_head"
    """What numbers the stripes: `kv_head` (the query heads of a group share one) or `q_head`."""
    dense_layers: str | tuple[int, ...] = ()
    """Layers with dense attention: `first:N`, `every:N` (the N-th, 2N-th, ... layer) or 0-based global block numbers."""
    rotate: int = 1
    """Number of consecutive sparse layers that shift the offset so that together they reach the whole context."""
    layer: int | None = None
    """View: global 0-based number of the layer; None: the offset as it is."""
    rank: int = 0
    """View: tensor-parallel rank."""
    world: int = 1
    """View: tensor-parallel ranks."""

    def __post_init__(self) -> None:
        heads = _whole("num_heads", self.num_heads, 1, "give the model's query heads")
        kv_heads = _whole("num_kv_heads", self.num_kv_heads, 1, "give the model's key/value heads")
        if heads % kv_heads:
            raise S2Error("num_kv_heads", kv_heads, f"must divide num_heads={heads}", "choose a divisor")
        block = _whole("block_size", self.block_size, 16, "use 64 or 128")
        if block & (block - 1):
            raise S2Error("block_size", block, "must be a power of two", "use 64 or 128")
        _whole("local_blocks", self.local_blocks, 1, "1 keeps the diagonal block only")
        stride = _whole("stride", self.stride, 1, "1 is dense attention")
        _whole("offset", self.offset, 0, f"use a residue from 0 to {stride - 1}")
        if self.step is not None:
            _whole("step", self.step, 1, "leave it out for the default")
        if self.per not in ("kv_head", "q_head"):
            raise S2Error("per", self.per, "must be kv_head or q_head", "use kv_head, unless the weights were trained with q_head")
        if _whole("dense_heads", self.dense_heads, 0, "0 makes every head sparse") > self._units:
            raise S2Error("dense_heads", self.dense_heads, f"exceeds the {self._units} heads", "use fewer, or stride=1 for dense attention")
        if _whole("rotate", self.rotate, 1, "1 keeps the offset in every layer") > stride:
            raise S2Error("rotate", self.rotate, f"exceeds stride={stride}", "a rotation longer than the stride repeats itself")
        object.__setattr__(self, "dense_layers", _dense_layer_spec(self.dense_layers))
        if self.layer is not None:
            _whole("layer", self.layer, 0, "give the global 0-based block number")
        self._check_shard()
        missing = self.missing_residues(all_layers=True)
        if missing:
            layers = self._covering_rotation()
            remedy = f"use a stride of at most {self._sparse_units}" + (f", or rotate={layers}" if layers else ", or leave step out")
            rule = f"residues {_ranges(missing)} modulo {stride} are reached by none of the {self._sparse_units} sparse heads"
            raise S2Error("stride", stride, f"{rule} (step={self.head_step}, rotate={self.rotate})", remedy)

    def _covering_rotation(self) -> int | None:
        """Smallest `rotate` with which the layers reach every residue; None: no rotation up to the stride does."""
        counts = range(1, self.stride + 1)
        return next((n for n in counts if not _rotation(self._sparse_units, self.head_step, self.stride, n)[1]), None)

    def _check_shard(self) -> None:
        world = _whole("world", self.world, 1, "give the tensor-parallel size")
        rank = _whole("rank", self.rank, 0, "give the tensor-parallel rank")
        if rank >= world:
            raise S2Error("rank", rank, f"must be under the tensor-parallel size {world}", "ranks count from 0")
        if self.num_heads % world:
            raise S2Error("world", world, f"must divide num_heads={self.num_heads}", "choose another tensor-parallel size")
        if self.num_kv_heads % world and world % self.num_kv_heads:
            rule = f"must divide num_kv_heads={self.num_kv_heads} or be a multiple of it"
            raise S2Error("world", world, rule, "choose another tensor-parallel size")

    # ---- what the fields mean

    @property
    def _units(self) -> int:
        return self.num_kv_heads if self.per == "kv_head" else self.num_heads

    @property
    def _sparse_units(self) -> int:
        return self._units - self.dense_heads

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_step(self) -> int:
        """Shift of the stripe from one sparse head to the next, the default filled in."""
        if self.step is not None:
            return self.step
        return 1 if self._sparse_units >= self.stride or self._sparse_units == 0 else self.stride // self._sparse_units

    @property
    def local_heads(self) -> int:
        """Query heads of this view."""
        return self.num_heads // self.world

    @property
    def local_kv_heads(self) -> int:
        """Key/value heads of this view; 1, a replicated one, when there are more ranks than heads."""
        return max(1, self.num_kv_heads // self.world)

    @property
    def first_head(self) -> int:
        """Global number of the view's first query head."""
        return self.rank * self.local_heads

    @property
    def first_kv_head(self) -> int:
        """Global number of the view's first key/value head."""
        return self.first_head // self.group

    def is_dense_layer(self, layer: int) -> bool:
        """Whether the 0-based global block `layer` has dense attention."""
        return self._dense_before(layer + 1) > self._dense_before(layer)

    def _dense_before(self, layer: int) -> int:
        """Dense layers among the first `layer` ones."""
        if isinstance(self.dense_layers, str):
            kind, _, count = self.dense_layers.partition(":")
            return min(layer, int(count)) if kind == "first" else layer // int(count)
        return sum(number < layer for number in self.dense_layers)

    @property
    def is_dense(self) -> bool:
        """Whether every head of the view attends to the whole past."""
        return all(residue == DENSE for residue in self.residues())

    def dense_units(self) -> tuple[int, ...]:
        """Global numbers (of the kind that `per` names) of the dense heads: floor((i + 1/2) * heads / n)."""
        return tuple((2 * i + 1) * self._units // (2 * self.dense_heads) for i in range(self.dense_heads))

    def layer_offset(self) -> int:
        """Offset of this view's layer: `offset`, plus the rotation's shift for each sparse layer before it, modulo `rotate` of them."""
        if self.layer is None or self.rotate == 1:
            return self.offset
        sparse_before = self.layer - self._dense_before(self.layer)
        shift, _ = _rotation(self._sparse_units, self.head_step, self.stride, self.rotate)
        return self.offset + sparse_before % self.rotate * shift

    def residues(self) -> tuple[int, ...]:
        """For each query head of the view: r such that it attends to the key blocks j with j mod stride == r, or `DENSE`."""
        return _residues(self)

    def missing_residues(self, all_layers: bool = False) -> tuple[int, ...]:
        """Residues of key blocks modulo `stride` that no sparse head of the model reaches: () when the union is the whole context.

        `all_layers`: over the layers of one rotation, else for this layer alone. No sparse head at all: ().
        """
        if self.stride == 1 or self._sparse_units == 0 or (not all_layers and self.layer is not None and self.is_dense_layer(self.layer)):
            return ()
        layers, offset = (self.rotate, self.offset) if all_layers else (1, self.layer_offset())
        _, missing = _rotation(self._sparse_units, self.head_step, self.stride, layers)
        return tuple(sorted((residue - offset) % self.stride for residue in missing))

    def check_layers(self, num_layers: int) -> None:
        """Raises when a model of `num_layers` blocks has no such dense layer, or too few sparse ones for the rotation."""
        if isinstance(self.dense_layers, tuple) and self.dense_layers and self.dense_layers[-1] >= num_layers:
            raise S2Error("dense_layers", list(self.dense_layers), f"the model has blocks 0 to {num_layers - 1}", "name these only")
        sparse = num_layers - self._dense_before(num_layers)
        if self.stride > 1 and 0 < sparse < self.rotate:
            _, missing = _rotation(self._sparse_units, self.head_step, self.stride, sparse)
            if missing:
                rule = f"the model has only {sparse} sparse layers, which leave {len(missing)} of {self.stride} residues unreached"
                raise S2Error("rotate", self.rotate, rule, "use a smaller stride, or fewer dense layers")

    # ---- views

    def for_layer(self, layer: int) -> S2Pattern:
        """The pattern of the 0-based global block `layer`: its rotated offset, or dense."""
        return replace(self, layer=layer)

    def shard(self, rank: int, world: int) -> S2Pattern:
        """The heads that tensor-parallel rank `rank` of `world` owns, in the same global pattern."""
        if self.world != 1:
            raise S2Error("shard", (rank, world), f"the pattern is already rank {self.rank} of {self.world}", "shard the whole pattern")
        return replace(self, rank=rank, world=world)

    # ---- counting

    def attends(self, head: int, query_block: int, key_block: int) -> bool:
        """Whether the view's query head attends to the key block from the query block (inside the diagonal block: causally)."""
        if key_block < 0 or key_block > query_block:
            return False
        residue = self.residues()[head]
        return residue == DENSE or query_block - key_block < self.local_blocks or key_block % self.stride == residue

    def _stripes(self, residue: int, last_block: int) -> int:
        """Key blocks of one stripe among blocks 0 to `last_block`."""
        return (last_block - residue) // self.stride + 1 if last_block >= residue else 0

    def pairs(self, seq_len: int) -> np.ndarray:
        """(heads,) int64: (query, key) token pairs that each query head of the view keeps in a causal sequence of `seq_len` tokens."""
        _whole("seq_len", seq_len, 1, "give a length in tokens")
        counts = {residue: self._pairs(residue, seq_len) for residue in set(self.residues())}
        return np.array([counts[residue] for residue in self.residues()], dtype=np.int64)

    def _pairs(self, residue: int, seq_len: int) -> int:
        if residue == DENSE:
            return seq_len * (seq_len + 1) // 2
        block, local = self.block_size, self.local_blocks
        full, rest = divmod(seq_len, block)
        near = min(full, local)
        window_blocks = near * (near - 1) // 2 + (full - near) * (local - 1)
        stripe_blocks = _steps_sum(max(0, full - local - residue), self.stride)
        total = full * (block * (block + 1) // 2) + (window_blocks + stripe_blocks) * block * block
        if rest:
            total += rest * (rest + 1) // 2 + rest * block * (min(full, local - 1) + self._stripes(residue, full - local))
        return total

    def density(self, seq_len: int) -> float:
        """Fraction of the causal token pairs of `seq_len` tokens that is kept, exact, mean over the view's query heads."""
        return int(self.pairs(seq_len).sum()) / (self.local_heads * (seq_len * (seq_len + 1) // 2))

    def kv_tokens(self, seq_len: int) -> np.ndarray:
        """(kv_heads,) int64: keys that position `seq_len - 1` attends to, union over the query heads of each key/value head."""
        _whole("seq_len", seq_len, 1, "give a length in tokens")
        last = (seq_len - 1) // self.block_size
        window = seq_len - last * self.block_size + min(last, self.local_blocks - 1) * self.block_size
        residues, per_kv = self.residues(), self.local_heads // self.local_kv_heads
        counts = []
        for start in range(0, self.local_heads, per_kv):
            group = set(residues[start : start + per_kv])
            stripes = sum(self._stripes(residue, last - self.local_blocks) for residue in group if residue != DENSE)
            counts.append(seq_len if DENSE in group else window + stripes * self.block_size)
        return np.array(counts, dtype=np.int64)

    def block_mask(self, num_q_blocks: int, num_k_blocks: int | None = None) -> torch.Tensor:
        """(heads, q_blocks, k_blocks) bool tensor of the blocks attended to; the query blocks are the last ones. For tests and pictures."""
        import torch

        num_k_blocks = num_q_blocks if num_k_blocks is None else num_k_blocks
        if num_q_blocks > num_k_blocks:
            rule = f"exceeds num_k_blocks={num_k_blocks}"
            raise S2Error("num_q_blocks", num_q_blocks, rule, "queries are the last positions of the keys")
        i = torch.arange(num_k_blocks - num_q_blocks, num_k_blocks)[None, :, None]
        j = torch.arange(num_k_blocks)[None, None, :]
        residue = torch.tensor(self.residues())[:, None, None]
        return (j <= i) & ((i - j < self.local_blocks) | (residue == DENSE) | (j % self.stride == residue))


@lru_cache(maxsize=4096)
def _residues(pattern: S2Pattern) -> tuple[int, ...]:
    """See :meth:`S2Pattern.residues`; cached, as every call of the attention asks."""
    heads = range(pattern.first_head, pattern.first_head + pattern.local_heads)
    if pattern.stride == 1 or (pattern.layer is not None and pattern.is_dense_layer(pattern.layer)):
        return (DENSE,) * len(heads)
    dense = pattern.dense_units()
    offset, step, stride = pattern.layer_offset(), pattern.head_step, pattern.stride
    units = (head if pattern.per == "q_head" else head // pattern.group for head in heads)
    return tuple(DENSE if unit in dense else -((unit - sum(d < unit for d in dense)) * step + offset) % stride for unit in units)


def _ranges(numbers: tuple[int, ...]) -> str:
    """`1, 3 to 5` for (1, 3, 4, 5)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
