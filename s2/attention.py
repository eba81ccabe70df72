"""The public call: `s2_attention(q, k, v, pattern)` with the best back end that can serve it.

Shapes: q (batch, q_len, heads, d_k); k (batch, k_len, kv_heads, d_k); v (batch, k_len, kv_heads, d_v); out (batch, q_len, heads, d_v).
"""

from __future__ import annotations

import math

import torch

from .backends import BACKENDS, Choice, choose, explain, load, table
from .blockmask import BlockMask
from .documents import make
from .errors import S2Error
from .pattern import S2Pattern
from .request import Request

__all__ = ["BACKENDS", "Choice", "explain", "s2_attention", "table"]


def s2_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: S2Pattern | BlockMask,
    *,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in which each head attends to the blocks of `pattern`; differentiable in q, k, v and through the lse.

    q (batch, q_len, heads, d_k), k (batch, k_len, kv_heads, d_k), v (batch, k_len, kv_heads, d_v); query head n uses key/value head
    n // (heads / kv_heads). When q_len < k_len the queries are the last q_len positions. `scale` multiplies the scores; None:
    1 / sqrt(d_k). `cu_seqlens_*`: (n + 1,) int32 document bounds of a batch of 1; the pattern restarts with each document.

    Returns out (batch, q_len, heads, d_v) in the dtype of q and, when asked, lse (batch, heads, q_len): the natural logarithm of the sum of
    exp(score) over the attended keys, float32 (float64 for float64 inputs). A row that attends to nothing: output 0, lse -inf,
    gradients 0. Under autocast the inputs are cast to its dtype first, as torch's own attention does.

    `backend`: auto, triton, flex, sdpa or reference; a named one that cannot serve the call raises with the reason.

    >>> pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    >>> import torch
    >>> q, k, v = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 2, 8)
    >>> s2_attention(q, k, v, pattern).shape
    torch.Size([1, 40, 4, 8])
    """
    _check(q, k, v, pattern)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    documents = make(cu_seqlens_q, cu_seqlens_k, q.shape[0], q.shape[1], k.shape[1])
    if documents is None and q.shape[1] > k.shape[1]:
        raise S2Error("q_len", q.shape[1], f"exceeds k_len={k.shape[1]}", "the queries are the last positions of the keys")
    request = Request(
        pattern=pattern,
        device=device,
        dtype=str(q.dtype).removeprefix("torch."),
        kv_heads=k.shape[2],
        d_k=q.shape[3],
        d_v=v.shape[3],
        q_len=q.shape[1],
        k_len=k.shape[1],
        packed=documents is not None,
        lse=return_lse,
    )
    attend = load(choose(request, backend).backend)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    with torch.autocast(device, enabled=False):
        out, lse = attend(q, k, v, pattern, scale, documents, return_lse)
    return (out, lse) if return_lse else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: S2Pattern | BlockMask) -> None:
    """Refuses shapes, dtypes and devices that do not fit together."""
    shapes = f"q{tuple(q.shape)} k{tuple(k.shape)} v{tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise S2Error("shapes", shapes, "must be (batch, length, heads, width) each", "add or remove dimensions")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise S2Error("shapes", shapes, "batch, key length, key/value heads or head width do not agree", "see the shapes of s2_attention")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise S2Error("dtype", f"{q.dtype} {k.dtype} {v.dtype}", "q, k and v must have one floating dtype", "cast them")
    if not q.device == k.device == v.device:
        raise S2Error("device", f"{q.device} {k.device} {v.device}", "q, k and v must lie on one device", "move them")
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise S2Error("shapes", shapes, "every size must be positive", "leave the call out for an empty batch")
    if q.shape[2] % k.shape[2]:
        raise S2Error("heads", q.shape[2], f"must be a multiple of the {k.shape[2]} key/value heads", "see the shapes of s2_attention")
    if pattern.local_heads != q.shape[2]:
        raise S2Error("heads", q.shape[2], f"the pattern has {pattern.local_heads} query heads", "shard the pattern as q is sharded")
    if isinstance(pattern, S2Pattern) and pattern.local_kv_heads != k.shape[2]:
        rule = f"the pattern has {pattern.local_kv_heads} key/value heads"
        raise S2Error("kv_heads", k.shape[2], rule, "shard the pattern as k is sharded")
    if isinstance(pattern, BlockMask) and pattern.blocks * pattern.block_size < k.shape[1]:
        rule = f"the mask describes {pattern.blocks * pattern.block_size} positions only"
        raise S2Error("k_len", k.shape[1], rule, "give a mask of more blocks")
