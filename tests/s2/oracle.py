"""The oracle of the attention tests: masks from the definition, dense softmax in float64."""

import torch

from s2 import BlockMask, S2Pattern


def token_mask(pattern: S2Pattern | BlockMask, q_len: int, k_len: int) -> torch.Tensor:
    """(heads, q_len, k_len) bool; the queries are the last positions."""
    size = pattern.block_size
    blocks = -(-k_len // size)
    if isinstance(pattern, BlockMask):
        mask = pattern.mask[:, :blocks, :blocks].cpu()
    else:
        mask = torch.tensor(
            [[[pattern.attends(h, i, j) for j in range(blocks)] for i in range(blocks)] for h in range(pattern.local_heads)]
        )
    mask = mask.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :k_len, :k_len]
    return (mask & torch.ones(k_len, k_len, dtype=torch.bool).tril())[:, k_len - q_len :]


def packed_mask(pattern: S2Pattern | BlockMask, cu_q: list[int], cu_k: list[int]) -> torch.Tensor:
    """(heads, queries, keys) bool, block diagonal over the documents."""
    mask = torch.zeros(pattern.local_heads, cu_q[-1], cu_k[-1], dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        if q1 > q0:
            mask[:, q0:q1, k0:k1] = token_mask(pattern, q1 - q0, k1 - k0)
    return mask


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in the dtype of the inputs; empty rows give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    mask = mask.to(q.device)
    scores = (torch.einsum("bqhd,bkhd->bhqk", q, k) * scale).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores.masked_fill(~mask.any(-1, keepdim=True), 0.0), -1) * mask
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def inputs(
    q_len: int, k_len: int, heads: int, kv_heads: int, d_k: int, d_v: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """q, k, v, and upstream gradients of out and lse. Scores reach about 10, so that a near-uniform softmax hides nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = 2.0 * draw(batch, q_len, heads, d_k), 1.3 * draw(batch, k_len, kv_heads, d_k)
    v, g, g_lse = draw(batch, k_len, kv_heads, d_v), draw(batch, q_len, heads, d_v), draw(batch, heads, q_len)
    return tuple(x.to(dtype) for x in (q, k, v, g, g_lse))


def gradients(outs: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(out * grad) in the leaves, for outputs in whatever dtype."""
    total = sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True))
    return torch.autograd.grad(total, leaves, retain_graph=True)
