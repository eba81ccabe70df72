"""What the transformer is: sizes and attention. Pure data, importable without torch.

Shapes: a block has `heads` query heads and `kv_heads` key/value heads of `head_dim`; the MLP is SwiGLU.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder. `null` fields are derived by :meth:`resolved`."""

    layers: int = 4
    """Transformer blocks."""
    width: int = 128
    """Residual width."""
    ffn_width: int | None = None
    """Inner width of the SwiGLU MLP; null: 8/3 of width, rounded up to a multiple of 64."""
    heads: int = 4
    """Query heads, over all tensor-parallel ranks."""
    kv_heads: int | None = None
    """Key/value heads (grouped-query attention); null: as many as heads."""
    head_dim: int | None = None
    """Width of one head; null: width / heads."""
    vocab_size: int | None = None
    """Vocabulary; null: the tokenizer's. Padded to the tensor-parallel size; padding is never emitted."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding."""
    tied: bool = False
    """Share the input embedding with the output head."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections use init_std / sqrt(2 * layers)."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Which attention each layer gets. See `s2.S2Pattern` for the meaning of the pattern's fields."""

    kind: str = "dense"
    """`s2` (sparsely sharded) or `dense`."""
    block_size: int = 64
    """Tokens in a block; a power of two, 16 or more."""
    local_blocks: int = 16
    """Blocks of the local window, the diagonal one included."""
    stride: int = 16
    """A head attends to every stride-th key block; 1 is dense."""
    offset: int = 0
    """Shift of the stripes."""
    step: int | None = None
    """Shift from one head to the next; null: 1 when there are at least `stride` sparse heads, else stride // heads."""
    per: str = "kv_head"
    """`kv_head` or `q_head`: which heads number the shards."""
    rotate: int = 1
    """Number of consecutive sparse layers over which the offset rotates, to cover the context together."""
    dense_layers: Any = field(default_factory=list)
    """Layers with dense attention: a list of block numbers, `first:N`, or `every:N`."""
    dense_heads: int = 0
    """Heads that attend to everything in every layer."""
    backend: str = "auto"
    """`auto`, `triton`, `flex`, `sdpa` or `reference`; a named one that cannot run is an error."""
