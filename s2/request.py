"""What one call of the attention asks for, in words that a back end can refuse. Pure data, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .blockmask import BlockMask
    from .pattern import S2Pattern


@dataclass(frozen=True, kw_only=True)
class Request:
    """One attention call: pattern, device, dtype and sizes. Lengths are the longest ones; None: not known yet."""

    pattern: S2Pattern | BlockMask
    """The layer's and rank's view of the pattern, or a custom mask."""
    device: str = "cpu"
    """Device type: `cpu`, `cuda` (also ROCm), ..."""
    dtype: str = "float32"
    """Name of the dtype of q, k and v."""
    kv_heads: int = 1
    """Key/value heads of this rank."""
    d_k: int = 64
    """Width of a query and key head."""
    d_v: int = 64
    """Width of a value head."""
    q_len: int | None = None
    """Queries in a sequence."""
    k_len: int | None = None
    """Keys in a sequence."""
    packed: bool = False
    """Documents given by cumulative lengths."""
    lse: bool = False
    """The log-sum-exp is asked for."""

    @property
    def is_dense(self) -> bool:
        """Plain causal attention in every head."""
        return bool(getattr(self.pattern, "is_dense", False))

    @property
    def is_custom(self) -> bool:
        """The pattern is a user's own mask."""
        return hasattr(self.pattern, "mask")
