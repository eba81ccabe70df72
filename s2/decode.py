"""Attention of the newest token of each sequence over an `S2Cache`: the call, its table of back ends, the definition in plain torch."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from .backends import Backend, Choice, choose, triton_device
from .errors import S2Error
from .pattern import DENSE
from .request import Request

if TYPE_CHECKING:
    from .cache import S2Cache


def _triton(request: Request) -> str | None:
    reason = triton_device(request)
    if reason is not None:
        return reason
    from .triton.probe import decode_refusal

    return decode_refusal(request)


DECODERS = (Backend("triton", _triton, "triton.decode"), Backend("reference", lambda request: None, "decode"))
"""Who can decode, in order of preference; a back end's function is `attend(q, cache, scale)`."""


def decode_request(cache: S2Cache) -> Request:
    """What decoding over the cache asks of a back end."""
    return Request(
        pattern=cache.pattern,
        device=cache.keys.device.type,
        dtype=str(cache.keys.dtype).removeprefix("torch."),
        kv_heads=cache.pattern.local_kv_heads,
        d_k=cache.d_k,
        d_v=cache.d_v,
        q_len=1,
    )


def kernels_refused(cache: S2Cache) -> str | None:
    """Why the kernels cannot serve the cache; None when they can."""
    return DECODERS[0].supports(decode_request(cache))


def explain_decode(request: Request, backend: str = "auto") -> Choice:
    """The back end that would decode, and every refusal before it with its reason; runs nothing."""
    return choose(request, backend, DECODERS)


def s2_decode(q: torch.Tensor, cache: S2Cache, *, scale: float | None = None, backend: str = "auto") -> torch.Tensor:
    """Attention of the newest token of each sequence: q (batch, 1, heads, d_k) -> (batch, 1, heads, d_v).

    The token's own key and value have been appended. Equals the last row of `s2_attention` over the whole sequence. Sums are float32.
    `scale`: None is 1 / sqrt(d_k). A sequence without tokens gives 0.

    `backend`: auto, triton or reference; a named one that cannot serve raises with the reason. The kernels read nothing on the host:
    a CUDA graph of `append` and `s2_decode` can be recorded, and replayed while there is capacity; past it the output is NaN.

    >>> from s2 import S2Cache, S2Pattern
    >>> pattern = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=1, stride=2)
    >>> cache = S2Cache(pattern, batch=1, num_kv_heads=2, d_k=8, d_v=8)
    >>> cache.append(torch.randn(1, 100, 2, 8), torch.randn(1, 100, 2, 8))
    >>> s2_decode(torch.randn(1, 1, 2, 8), cache).shape, cache.nbytes == int(pattern.kv_tokens(100).sum()) * 16 * 4
    (torch.Size([1, 1, 2, 8]), True)
    """
    pattern = cache.pattern
    if q.dim() != 4 or q.shape != (cache.batch, 1, pattern.local_heads, cache.d_k):
        rule = f"must be ({cache.batch}, 1, {pattern.local_heads}, {cache.d_k})"
        raise S2Error("q", tuple(q.shape), rule, "one new token for each sequence")
    if cache.longest == 0:
        raise S2Error("lengths", [0] * cache.batch, "no sequence has a token yet", "append keys and values first")
    chosen = choose(decode_request(cache), backend, DECODERS).backend
    if q.dtype != cache.keys.dtype and chosen != "reference":
        raise S2Error("dtype", q.dtype, f"the cache has {cache.keys.dtype}", "cast the query")
    module = next(row.module for row in DECODERS if row.name == chosen)
    out: torch.Tensor = import_module(f".{module}", __package__).attend(q, cache, 1.0 / math.sqrt(cache.d_k) if scale is None else scale)
    return out


def attend(q: torch.Tensor, cache: S2Cache, scale: float) -> torch.Tensor:
    """The definition: a loop over sequences and heads, over copies of what they hold."""
    pattern = cache.pattern
    wide = torch.promote_types(q.dtype, torch.float32)
    residues, group = pattern.residues(), pattern.local_heads // pattern.local_kv_heads
    out = q.new_zeros(cache.batch, 1, pattern.local_heads, cache.d_v)
    for sequence, length in enumerate(cache.lengths):
        for kv_head in range(pattern.local_kv_heads) if length else ():
            keys, values, positions = cache.held(sequence, kv_head)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = (q[sequence, 0, heads].to(wide) @ keys.to(wide).T) * scale
            mine = residues[heads]
            if len(set(mine)) > 1:
                blocks = positions // pattern.block_size
                residue = torch.tensor(mine, device=q.device)[:, None]
                near = (length - 1) // pattern.block_size - blocks < pattern.local_blocks
                scores = scores.masked_fill(~(near | (residue == DENSE) | (blocks % pattern.stride == residue)), float("-inf"))
            out[sequence, 0, heads] = (torch.softmax(scores, -1) @ values.to(wide)).to(q.dtype)
    return out
