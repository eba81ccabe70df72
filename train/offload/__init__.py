"""Optimiser states on the host: AdamW whose masters and moments are streamed to the GPU, or updated by the CPU.

`OffloadedAdam` is a `torch.optim.Optimizer` for any torch model. Importing this package does not import torch.
"""

from typing import Any

__all__ = ["OffloadedAdam"]


def __getattr__(name: str) -> Any:
    if name == "OffloadedAdam":
        from train.offload.adam import OffloadedAdam

        return OffloadedAdam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
