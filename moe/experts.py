"""SwiGLU experts with stacked weights: expert e of a layer is row e of two tensors.

    h = x W_in[e]^T;  [gate; up] = h;  y = (silu(gate) * up * p) W_out[e]^T

Tokens come sorted by expert, so one grouped matrix multiply serves all experts. On CUDA in bf16 that is torch's grouped
kernel, which takes group sizes from device memory and accepts empty groups. Elsewhere it is a loop over the experts: torch
has no fast grouped multiply for the CPU, nor for fp32 on CUDA, where it would also need the sizes on the host.

Dims: T routed tokens (a token routed to k experts counts k times), E experts, H width, F inner width of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNMENT = 16  # bytes that torch's grouped kernel wants rows of each operand to be a multiple of


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of `h = [gate; up]` along the last dim; (..., 2F) -> (..., F)."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_experts(x_sorted: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, probs: Tensor | None = None) -> Tensor:
    """Outputs of the experts for tokens sorted by expert, (T, H).

    `x_sorted` (T, H); `tokens_per_expert` (E,) integers that sum to T, on any device; `w_in` (E, 2F, H), gate rows first;
    `w_out` (E, H, F); `probs` (T,) gate probability of each routed token, applied to the inner activation. No tokens at all,
    and experts without tokens, are fine: the gradients are then zeros. Raises ValueError on shapes that do not fit, on counts
    that do not sum to T (checked when they are on the host: elsewhere it would stall the device), and on CUDA in bf16 when
    H or F is not a multiple of 8.
    """
    _check(x_sorted, tokens_per_expert, w_in, w_out, probs)
    if x_sorted.is_cuda and x_sorted.dtype == torch.bfloat16:
        return _grouped(x_sorted, tokens_per_expert, w_in, w_out, probs)
    return _loop(x_sorted, tokens_per_expert, w_in, w_out, probs)


def _weighted(inner: Tensor, probs: Tensor | None) -> Tensor:
    # The product is taken in the probabilities' precision (fp32 in training) and rounded once.
    return inner if probs is None else (inner * probs.unsqueeze(-1)).to(inner.dtype)


def _grouped(x_sorted: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, probs: Tensor | None) -> Tensor:
    for name, size in (("width", w_in.shape[2]), ("ffn width of an expert", w_out.shape[2])):
        if size * w_in.element_size() % _ALIGNMENT:
            raise ValueError(
                f"{name}={size}: the grouped matrix multiply needs rows of a multiple of {_ALIGNMENT} bytes; "
                f"use a multiple of {_ALIGNMENT // w_in.element_size()}"
            )
    if x_sorted.shape[0] == 0:
        # Through expert 0 so that every operand is in the graph and gets zeros for its gradient; the kernel refuses T = 0.
        return _weighted(swiglu(x_sorted @ w_in[0].T), probs) @ w_out[0].T
    ends = tokens_per_expert.cumsum(0).to(device=x_sorted.device, dtype=torch.int32, non_blocking=True)
    # Weights go in as transposed views: the gradients then come out in the weights' own layout.
    h = F.grouped_mm(x_sorted.contiguous(), w_in.transpose(1, 2), offs=ends)
    y: Tensor = F.grouped_mm(_weighted(swiglu(h), probs), w_out.transpose(1, 2), offs=ends)
    return _ContiguousGradient.apply(y)


def _loop(x_sorted: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, probs: Tensor | None) -> Tensor:
    counts = tokens_per_expert.tolist()
    weights = (None,) * len(counts) if probs is None else probs.split(counts)
    # unbind, not indexing: its backward writes one stacked gradient instead of adding E full-sized ones.
    return torch.cat(
        [
            _weighted(swiglu(x @ w1.T), p) @ w2.T
            for x, w1, w2, p in zip(x_sorted.split(counts), w_in.unbind(), w_out.unbind(), weights, strict=True)
        ]
    )


class FreezeRows(torch.autograd.Function):
    """Identity of a stack of weights (n, ...) whose gradient is zero in the rows that are not `trainable` (n,)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, trainable: Tensor) -> Tensor:
        ctx.save_for_backward(trainable)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (trainable,) = ctx.saved_tensors
        # Chosen, not multiplied: an infinite gradient of a frozen expert is zero too.
        return torch.where(trainable.view(-1, *([1] * (grad.dim() - 1))), grad, 0.0), None


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is laid out in memory: the grouped kernel refuses expanded tensors (those of `y.sum()`)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _check(x_sorted: Tensor, tokens_per_expert: Tensor, w_in: Tensor, w_out: Tensor, probs: Tensor | None) -> None:
    experts, twice_inner, width = w_in.shape
    if tuple(w_out.shape) != (experts, width, twice_inner // 2) or twice_inner % 2:
        raise ValueError(
            f"w_in {tuple(w_in.shape)}, w_out {tuple(w_out.shape)}: must be (E, 2F, H) and (E, H, F); give both the same E, F and H"
        )
    if x_sorted.dim() != 2 or x_sorted.shape[1] != width:
        raise ValueError(f"x_sorted {tuple(x_sorted.shape)}: must be (T, {width}) as w_in has it; flatten the tokens")
    if tuple(tokens_per_expert.shape) != (experts,):
        raise ValueError(f"tokens_per_expert {tuple(tokens_per_expert.shape)}: must hold one count for each of {experts} experts")
    if probs is not None and tuple(probs.shape) != (x_sorted.shape[0],):
        raise ValueError(f"probs {tuple(probs.shape)}: must hold one probability for each of {x_sorted.shape[0]} tokens")
    if not tokens_per_expert.is_cuda and int(tokens_per_expert.sum()) != x_sorted.shape[0]:
        raise ValueError(f"tokens_per_expert sums to {int(tokens_per_expert.sum())}: must be the {x_sorted.shape[0]} tokens of x_sorted")
