"""Parameters of awkward sizes, their gradients by step, and the reference: torch's fused AdamW over fp32 masters, whole tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SHAPES = ((300, 7), (1,), (0,), (63,), (64,), (5, 13, 11), (2049,))
BUCKET = 512
"""Small enough that parameters span buckets and buckets span parameters and groups."""


def parameters(dtypes: Sequence[torch.dtype], device: str = "cpu") -> list[torch.nn.Parameter]:
    """One parameter for each of SHAPES, dtypes in rotation; the same values each time."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=generator).to(device, dtypes[number % len(dtypes)])
        made.append(torch.nn.Parameter(value))
    return made


def groups(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Two groups whose members alternate, with settings of their own."""
    return [
        {"params": list(params[::2]), "lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
        {"params": list(params[1::2]), "lr": 1e-2, "weight_decay": 0.0, "eps": 1e-6},
    ]


def set_gradients(params: Sequence[Tensor], step: int, main_grads: bool = False, missing: Sequence[int] = ()) -> None:
    """Gradients of `step`, in the parameter's dtype or, as main gradients, in fp32; `missing` parameters get none."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, param in enumerate(params):
        value = torch.randn(param.shape, generator=generator) * 10.0 ** (number - 3)
        value = None if number in missing else value.to(param.device)
        if main_grads:
            param.decoupled_grad = value  # type: ignore[attr-defined]
        else:
            param.grad = None if value is None else value.to(param.dtype)


class Reference:
    """The same updates by `torch.optim.AdamW(fused=True)`."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.weights = [param.detach().clone() for param in params]
        self.masters = [torch.nn.Parameter(weight.float()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(groups(self.masters), fused=True)

    def step(self, params: Sequence[Tensor]) -> None:
        """Update with the gradients that `params` have."""
        for master, param in zip(self.masters, params, strict=True):
            gradient = getattr(param, "decoupled_grad", None)
            gradient = param.grad if gradient is None else gradient
            master.grad = None if gradient is None else gradient.float()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master.detach())
