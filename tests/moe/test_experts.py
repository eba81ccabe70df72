"""Grouped experts against a naive loop over tokens: outputs and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe import experts
from moe.experts import grouped_experts


def naive(x: Tensor, counts: list[int], w_in: Tensor, w_out: Tensor, probs: Tensor | None) -> Tensor:
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = []
    for t, e in enumerate(owners):
        inner = w_in.shape[1] // 2
        gate, up = w_in[e, :inner] @ x[t], w_in[e, inner:] @ x[t]
        a = gate / (1 + torch.exp(-gate)) * up
        rows.append(w_out[e] @ (a if probs is None else a * probs[t]))
    return torch.stack(rows) if rows else x.new_zeros(0, w_in.shape[2])


def leaves(counts: list[int], width: int, inner: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = ((sum(counts), width), (len(counts), 2 * inner, width), (len(counts), width, inner), (sum(counts),))
    return tuple(torch.randn(s, dtype=dtype).requires_grad_() for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("counts", [[3, 1, 4], [0, 5, 0, 2], [0, 0, 7], [1], [6, 0]])
@pytest.mark.parametrize("gated", [True, False])
def test_equals_the_naive_loop_in_output_and_every_gradient(counts: list[int], gated: bool) -> None:
    x, w_in, w_out, p = leaves(counts, width=5, inner=7)
    probs = p if gated else None
    wanted = naive(x, counts, w_in, w_out, probs)
    y = grouped_experts(x, torch.tensor(counts), w_in, w_out, probs)
    torch.testing.assert_close(y, wanted)
    up = torch.randn_like(y)
    inputs = [x, w_in, w_out] + ([p] if gated else [])
    for got, want in zip(torch.autograd.grad(y, inputs, up), torch.autograd.grad(wanted, inputs, up), strict=True):
        torch.testing.assert_close(got, want)


def test_experts_without_tokens_get_zero_gradients() -> None:
    x, w_in, w_out, _ = leaves([0, 3, 0], width=4, inner=2)
    grouped_experts(x, torch.tensor([0, 3, 0]), w_in, w_out).sum().backward()
    for weight in (w_in, w_out):
        assert weight.grad is not None
        assert weight.grad[[0, 2]].abs().max() == 0 and weight.grad[1].abs().max() > 0


@pytest.mark.parametrize("path", [grouped_experts, experts._grouped])
@pytest.mark.parametrize("gated", [True, False])
def test_no_tokens_at_all(gated: bool, path: Any) -> None:
    x, w_in, w_out, p = leaves([0, 0], width=8, inner=4)
    y = path(x, torch.tensor([0, 0]), w_in, w_out, p if gated else None)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 8)
    for weight in (w_in, w_out):
        assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad.abs().max() == 0


@pytest.mark.parametrize("counts", [[3, 1, 9], [0, 5, 0, 2], [0, 0, 7]])
def test_the_grouped_path_equals_the_loop(counts: list[int]) -> None:
    # torch emulates its CUDA kernel on the CPU with the same rules for shapes and strides.
    x, w_in, w_out, p = leaves(counts, width=16, inner=24, dtype=torch.float32)
    arguments = (x, torch.tensor(counts), w_in, w_out, p)
    y, wanted = experts._grouped(*arguments), experts._loop(*arguments)
    torch.testing.assert_close(y, wanted)
    inputs = [x, w_in, w_out, p]
    # The gradient of a sum is an expanded tensor, which the kernel refuses unless it is laid out first.
    for got, want in zip(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(wanted.sum(), inputs), strict=True):
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()


def test_probabilities_in_fp32_keep_a_bf16_output() -> None:
    x, w_in, w_out, p = leaves([2, 3], width=8, inner=8, dtype=torch.bfloat16)
    y = grouped_experts(x, torch.tensor([2, 3]), w_in, w_out, p.detach().float().requires_grad_())
    assert y.dtype == torch.bfloat16


def test_the_loop_is_swiglu_with_the_gate_first() -> None:
    x, w_in, w_out, _ = leaves([2], width=3, inner=4)
    gate, up = w_in[0, :4], w_in[0, 4:]
    wanted = (F.silu(x @ gate.T) * (x @ up.T)) @ w_out[0].T
    torch.testing.assert_close(grouped_experts(x, torch.tensor([2]), w_in, w_out), wanted)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, w_in, w_out, p = leaves([2, 3], width=4, inner=6)
    counts = torch.tensor([2, 3])
    with pytest.raises(ValueError, match=r"sums to 4: must be the 5 tokens"):
        grouped_experts(x, torch.tensor([2, 2]), w_in, w_out)
    with pytest.raises(ValueError, match="one count for each of 2 experts"):
        grouped_experts(x, torch.tensor([5]), w_in, w_out)
    with pytest.raises(ValueError, match=r"must be \(T, 4\)"):
        grouped_experts(x[:, :3], counts, w_in, w_out)
    with pytest.raises(ValueError, match="give both the same E, F and H"):
        grouped_experts(x, counts, w_in, w_out[:, :, :5])
    with pytest.raises(ValueError, match="one probability for each of 5 tokens"):
        grouped_experts(x, counts, w_in, w_out, p[:4])
    with pytest.raises(ValueError, match=r"width=4.*multiple of 16 bytes"):
        experts._grouped(x.bfloat16(), counts, w_in.bfloat16(), w_out.bfloat16(), None)
