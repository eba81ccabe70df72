"""Dense causal attention through torch's scaled_dot_product_attention, packed documents one group of equal lengths at a time."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .blockmask import BlockMask
from .documents import Documents
from .packing import each_group
from .pattern import S2Pattern


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: S2Pattern | BlockMask,
    scale: float,
    documents: Documents | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :func:`s2.attention.s2_attention`; the pattern is dense and no lse is asked for (`backends.py` sees to it)."""
    return each_group(q, k, v, documents, lambda a, b, c: _causal(a, b, c, scale)), None


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of (batch, length, heads, width) tensors, the queries being the last positions."""
    gqa = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[2] == k.shape[2]:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        bias = causal_lower_right(q.shape[2], k.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)
