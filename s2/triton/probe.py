"""Whether this device can run the kernels: its abilities and shared memory, never its name."""

from __future__ import annotations

import torch

from ..request import Request
from .config import choose_decode, choose_tiles, padded
from .launch import shared_memory

ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}


def _device_refusal() -> str | None:
    if not torch.cuda.is_available():
        return "no device is visible"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {torch.cuda.get_device_capability()} is under 8.0"
    return None


def _shared() -> int:
    return shared_memory(torch.device("cuda", torch.cuda.current_device()))


def decode_refusal(request: Request) -> str | None:
    """The reason why the current CUDA or ROCm device cannot decode for the request, or None."""
    reason = _device_refusal()
    if reason is None and choose_decode(padded(request.d_k), padded(request.d_v), ELEMENT[request.dtype], _shared()) is None:
        return f"no tile for head widths {request.d_k} and {request.d_v} fits in {_shared()} bytes of shared memory"
    return reason


def refusal(request: Request) -> str | None:
    """The reason why the current CUDA or ROCm device cannot serve the request, or None."""
    reason = _device_refusal()
    if reason is not None:
        return reason
    shared = _shared()
    if choose_tiles(padded(request.d_k), padded(request.d_v), ELEMENT[request.dtype], shared, request.pattern.block_size) is None:
        return f"no tile for head widths {request.d_k} and {request.d_v} fits in {shared} bytes of shared memory"
    return None
