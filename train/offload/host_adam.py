"""The Adam that runs on the host's cores: torch's fused AdamW, or DeepSpeed's CPU Adam.

Both have the same arithmetic, bias correction and decay included; they differ in the order of operations, so in last bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from train.offload import deepspeed

CHOICES = ("torch", "deepspeed", "auto")

Update = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], Sequence[Tensor], dict[str, Any]], None]
"""Updates (weights, gradients, first moments, second moments) in place, all fp32 and flat, at (steps, a parameter group's settings)."""


def host_adam(name: str) -> Update:
    """The update of a choice of `CHOICES`. `auto`: DeepSpeed's where it can be had, else torch's with one line that says why.

    Raises ValueError for another name, and for `deepspeed` where it cannot work.
    """
    if name == "torch":
        return torch_adam
    if name not in CHOICES:
        raise ValueError(f"cpu_adam={name}: there is no such choice; choose one of {', '.join(CHOICES)}")
    try:
        return DeepSpeedAdam(deepspeed.load())
    except deepspeed.Unavailable as reason:
        if name == "deepspeed":
            raise ValueError(f"cpu_adam=deepspeed: {reason}; use cpu_adam=torch") from reason
        print(f"offload.cpu_adam=auto: the host updates with torch's fused AdamW, because {reason}", flush=True)
        return torch_adam


def torch_adam(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: Sequence[Tensor],
    group: dict[str, Any],
) -> None:
    """torch's fused AdamW, on any device."""
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
        list(steps),
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


class DeepSpeedAdam:
    """DeepSpeed's operation. Its objects in C++ have numbers; this one's is freed with it."""

    # DeepSpeed's own optimisers count from 0 upwards.
    _next = 1_000_000

    def __init__(self, operation: Any) -> None:
        self._operation, self._number = operation, DeepSpeedAdam._next
        DeepSpeedAdam._next += 1
        operation.create_adam(self._number, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)

    def __del__(self) -> None:
        self._operation.destroy_adam(self._number)

    def __call__(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        steps: Sequence[Tensor],
        group: dict[str, Any],
    ) -> None:
        """Update on the CPU."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        for weight, gradient, mean, square, step in zip(weights, gradients, first, second, steps, strict=True):
            self._operation.adam_update(
                self._number, int(step), lr, beta1, beta2, group["eps"], group["weight_decay"], True, weight, gradient, mean, square
            )
