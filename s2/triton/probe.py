"""Whether this device can run the kernels: its abilities and shared memory, never its name."""

from __future__ import annotations

import torch

from ..request import Request
from .config import choose_tiles, padded
from .op import shared_memory

ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}


def refusal(request: Request) -> str | None:
    """The reason why the current CUDA or ROCm device cannot serve the request, or None."""
    if not torch.cuda.is_available():
        return "no device is visible"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {torch.cuda.get_device_capability()} is under 8.0"
    shared = shared_memory(torch.device("cuda", torch.cuda.current_device()))
    if choose_tiles(padded(request.d_k), padded(request.d_v), ELEMENT[request.dtype], shared, request.pattern.block_size) is None:
        return f"no tile for head widths {request.d_k} and {request.d_v} fits in {shared} bytes of shared memory"
    return None
