"""Grouped experts on a GPU: the bf16 kernel against an fp32 loop, outputs and every gradient."""

import pytest
import torch
from torch import Tensor

from moe.experts import _loop, grouped_experts

pytestmark = pytest.mark.gpu


def leaves(counts: list[int], width: int, inner: int) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((sum(counts), width), (len(counts), 2 * inner, width), (len(counts), width, inner), (sum(counts),))
    scales = (1.0, width**-0.5, inner**-0.5, 1.0)
    return [(torch.randn(s, device="cuda") * k).bfloat16().requires_grad_() for s, k in zip(shapes, scales, strict=True)]


# Odd group sizes: the kernel aligns rows, never groups. Empty groups first, last and in the middle.
@pytest.mark.parametrize("counts", [[3, 1, 9, 130], [0, 517, 0, 2, 0], [0, 0, 7], [64] * 8, [1]])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_kernel_equals_an_fp32_loop(counts: list[int], on_host: bool) -> None:
    inputs = leaves(counts, width=136, inner=72)
    x, w_in, w_out, p = inputs
    # Freed memory full of NaN: rows or groups that the kernel forgets to write would show.
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
    del poison
    sizes = torch.tensor(counts) if on_host else torch.tensor(counts, device="cuda")
    y = grouped_experts(x, sizes, w_in, w_out, p.float())
    exact = [t.detach().float().requires_grad_() for t in inputs]
    wanted = _loop(exact[0], torch.tensor(counts), exact[1], exact[2], exact[3])
    assert y.dtype == torch.bfloat16
    assert (y.float() - wanted).norm() <= 1e-2 * wanted.norm()
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=5e-2)  # one element's rounding at most; a wrong row is 1 off
    up = torch.randn_like(wanted)
    got = torch.autograd.grad(y, inputs, up.bfloat16())
    for g, w in zip(got, torch.autograd.grad(wanted, exact, up.bfloat16().float()), strict=True):
        assert (g.float() - w).norm() <= 1e-2 * w.norm() + 1e-6


def test_no_tokens_give_zero_gradients() -> None:
    x, w_in, w_out, p = leaves([0, 0], width=64, inner=32)
    grouped_experts(x, torch.tensor([0, 0]), w_in, w_out, p.float()).sum().backward()
    for weight in (w_in, w_out):
        assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad.abs().max() == 0


def test_fp32_takes_the_loop() -> None:
    inputs = [t.detach().float() for t in leaves([5, 0, 3], width=20, inner=12)]
    x, w_in, w_out, p = inputs
    y = grouped_experts(x, torch.tensor([5, 0, 3]), w_in, w_out, p)
    wanted = grouped_experts(x.cpu(), torch.tensor([5, 0, 3]), w_in.cpu(), w_out.cpu(), p.cpu())
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-3)
