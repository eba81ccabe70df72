"""The table of back ends: who can serve a request, in order of preference, and why the others cannot.

Decisions rest on device type, dtype, sizes and the device's abilities, never on its name. Nothing here imports torch at import time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import S2Error
from .request import Request

log = logging.getLogger("s2")
_logged: set[tuple[str, str]] = set()


def triton_device(request: Request) -> str | None:
    """Why no Triton kernel can serve the request, by device type, dtype and width."""
    if request.device != "cuda":
        return f"its kernels need a CUDA or ROCm device, not {request.device}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if request.dtype not in ("bfloat16", "float16", "float32"):
        return f"no kernel for {request.dtype}"
    if max(request.d_k, request.d_v) > 256:
        return f"head width {max(request.d_k, request.d_v)} is over 256"
    return None


def _triton(request: Request) -> str | None:
    reason = triton_device(request)
    if reason is not None:
        return reason
    if request.is_custom and request.packed and request.q_len != request.k_len:
        return "custom masks over packed documents with fewer queries than keys are not written for it"
    from .triton.probe import refusal

    return refusal(request)


def _flex(request: Request) -> str | None:
    if request.device != "cuda":
        return f"FlexAttention has no backward pass on {request.device}"
    if request.dtype not in ("bfloat16", "float16", "float32"):
        return f"no kernel for {request.dtype}"
    if min(request.d_k, request.d_v) < 16:
        return f"head width {min(request.d_k, request.d_v)} is under 16"
    if request.is_custom and request.packed:
        return "custom masks with packed documents are not written for it"
    if request.packed and request.q_len != request.k_len:
        return "packed documents with fewer queries than keys are not written for it"
    return None


def _sdpa(request: Request) -> str | None:
    if not request.is_dense:
        return "it serves dense causal attention only"
    if request.lse:
        return "torch SDPA does not return the log-sum-exp"
    return None


def _reference(request: Request) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """A row of the table: its test, and where its function `attend(q, k, v, pattern, scale, documents, return_lse)` lives."""

    name: str
    supports: Callable[[Request], str | None]
    """None when it can serve the request, else the reason."""
    module: str

    def load(self) -> Callable[..., Any]:
        """Imports and returns the back end's function."""
        attend: Callable[..., Any] = import_module(f".{self.module}", __package__).attend
        return attend


BACKENDS = (
    Backend("triton", _triton, "triton.op"),
    Backend("flex", _flex, "flex"),
    Backend("sdpa", _sdpa, "sdpa"),
    Backend("reference", _reference, "reference"),
)


@dataclass(frozen=True)
class Choice:
    """The answer of the table: which back end serves a request, and the reason of each one before it that does not."""

    request: Request
    backend: str
    refusals: dict[str, str] = field(default_factory=dict)


def choose(request: Request, backend: str = "auto", rows: tuple[Backend, ...] = BACKENDS) -> Choice:
    """Returns the first back end of the table `rows` that can serve the request; a named one that cannot is an error with its reason."""
    if backend != "auto":
        row = next((row for row in rows if row.name == backend), None)
        if row is None:
            names = ", ".join(row.name for row in rows)
            raise S2Error("backend", backend, f"is not one of auto, {names}", "choose one of these")
        reason = row.supports(request)
        if reason is not None:
            raise S2Error("backend", backend, f"cannot serve this call: {reason}", "use backend=auto")
        return Choice(request, backend)
    refusals: dict[str, str] = {}
    for row in rows:
        reason = row.supports(request) or (_slower(row.name, request) if rows is BACKENDS else None)
        if reason is None:
            for name, why in refusals.items():
                _log_once(name, why, row.name)
            return Choice(request, row.name, refusals)
        refusals[row.name] = reason
    raise S2Error("backend", backend, f"none can serve this call: {refusals}", "see the reasons")


def _slower(name: str, request: Request) -> str | None:
    """Why `auto` passes over a back end that could serve the request: another one was measured to be faster (docs/log.md)."""
    plain = request.is_dense and not request.packed and not request.lse and request.q_len == request.k_len
    return "plain causal attention is faster in torch SDPA" if plain and name in ("triton", "flex") else None


def _log_once(name: str, reason: str, instead: str) -> None:
    if (name, reason) not in _logged:
        _logged.add((name, reason))
        log.info("back end %s is not used: %s; %s runs instead", name, reason, instead)


def load(name: str) -> Callable[..., Any]:
    """Imports and returns the function of the named back end."""
    return next(row for row in BACKENDS if row.name == name).load()


def explain(requests: Iterable[Request], backend: str = "auto") -> list[Choice]:
    """For each request, the back end that would run and every refusal before it with its reason; runs nothing."""
    return [choose(request, backend) for request in requests]


def table(pattern: Any, layers: int, backend: str = "auto", **request: Any) -> list[Choice]:
    """The choices of a model's `layers` blocks for one kind of call; `request` are fields of :class:`Request`."""
    return explain((Request(pattern=pattern.for_layer(layer), **request) for layer in range(layers)), backend)
