"""What every launch needs of its device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

LOG2_E = 1.4426950408889634
CPU_SHARED = 1 << 17
"""Shared memory assumed by the interpreter."""


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return CPU_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def on_device(x: torch.Tensor) -> Any:
    """A context in which kernels are launched on the device of x."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; that of the table for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def beside(launch: Callable[[], torch.Tensor], *used: torch.Tensor) -> tuple[torch.cuda.Stream, torch.Tensor]:
    """Launches on a stream of its own, which the caller waits for: (the stream, the result)."""
    main, side = torch.cuda.current_stream(used[0].device), _side_stream(used[0].device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = launch()
    for x in used:
        x.record_stream(side)
    result.record_stream(main)
    return side, result
