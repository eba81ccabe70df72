"""Whether attention runs here: each path compiled and run once at a small size, and compared with the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .attention import s2_attention
from .backends import Choice, choose
from .blockmask import BlockMask
from .cache import S2Cache
from .decode import decode_request, explain_decode, s2_decode
from .pattern import S2Pattern
from .request import Request

TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}
"""Largest relative error of a path that works, by dtype."""
LENGTH = 300


@dataclass(frozen=True)
class Finding:
    """What one path did."""

    path: str
    choice: Choice
    error: float | None
    """Norm of the difference over the norm of the float64 result; None: it did not run."""
    seconds: float
    """Time of the first run, with compiling."""
    failure: str = ""

    @property
    def works(self) -> bool:
        """It ran and is right."""
        return self.error is not None and self.error <= TOLERANCE[getattr(torch, self.choice.request.dtype)]


def probe(device: str, dtype: torch.dtype, width: int = 64) -> Iterator[Finding]:
    """Runs forward, backward, packed documents, a custom mask and decoding on `device` with the back ends that `auto` takes."""
    pattern = S2Pattern(num_heads=4, num_kv_heads=2, block_size=64, local_blocks=2, stride=2)
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, LENGTH, heads, width, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4))
    bounds = torch.tensor([0, 100, LENGTH], dtype=torch.int32, device=device)
    mask = BlockMask(torch.rand(4, 5, 5, generator=generator).to(device) < 0.5, 64)

    def attention(inputs: tuple[torch.Tensor, ...], pattern: Any = pattern, **options: Any) -> list[torch.Tensor]:
        out = s2_attention(inputs[0], inputs[1], inputs[2], pattern, **options)
        assert isinstance(out, torch.Tensor)
        return [out.detach()]

    def gradients(inputs: tuple[torch.Tensor, ...], pattern: Any = pattern, **options: Any) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = s2_attention(leaves[0], leaves[1], leaves[2], pattern, **options)
        assert isinstance(out, torch.Tensor)
        return list(torch.autograd.grad(out, leaves, g.to(out.dtype)))

    def request(**change: Any) -> Request:
        fields: dict[str, Any] = {
            "pattern": pattern,
            "device": torch.device(device).type,
            "dtype": str(dtype).removeprefix("torch."),
            "kv_heads": 2,
        }
        return Request(**{**fields, "d_k": width, "d_v": width, "q_len": LENGTH, "k_len": LENGTH, **change})

    calls: list[tuple[str, Callable[..., list[torch.Tensor]], dict[str, Any], Request]] = [
        ("forward", attention, {}, request()),
        ("backward", gradients, {}, request()),
        ("documents", gradients, {"cu_seqlens_q": bounds}, request(packed=True)),
        ("custom mask", gradients, {"pattern": mask}, request(pattern=mask)),
    ]
    for path, call, options, asked in calls:
        yield _try(path, choose(asked), partial(_error, call, (q, k, v), options))
    cache = S2Cache(pattern, 1, 2, width, width, dtype, device)
    cache.append(k, v)

    def decoding() -> tuple[float, float]:
        began = time.perf_counter()
        got = s2_decode(q[:, -1:], cache).double()
        seconds = time.perf_counter() - began
        want = s2_decode(q[:, -1:].double(), cache, backend="reference")
        return float((got - want).norm() / want.norm()), seconds

    yield _try("decoding", explain_decode(decode_request(cache)), decoding)


def _error(call: Callable[..., list[torch.Tensor]], inputs: tuple[torch.Tensor, ...], options: dict[str, Any]) -> tuple[float, float]:
    began = time.perf_counter()
    got = [x.double() for x in call(inputs, **options)]
    float(got[0].sum())  # waits for the device
    seconds = time.perf_counter() - began
    want = call(tuple(x.double() for x in inputs), **options, backend="reference")
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)), seconds


def _try(path: str, choice: Choice, run: Callable[[], tuple[float, float]]) -> Finding:
    try:
        error, seconds = run()
    except Exception as failure:  # a compiler or a driver may raise anything: the finding is that it does not run, and why
        return Finding(path, choice, None, 0.0, f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}")
    return Finding(path, choice, error, seconds)
