"""Mixture of Experts: grouped experts, and experts partitioned over loosely connected sites.

Usable without the rest of the repository and without Megatron-core (`moe.megatron` binds it). Names are loaded on first use, so
that `import moe` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cost import Sizes, comm_bytes
    from .exchange import Exchange, GlooExchange, Hub, ThreadExchange
    from .experts import grouped_experts
    from .outer import Named, OuterReport, OuterStep
    from .residency import ResidencyPlan
    from .skip import Router, SkipMoE, SkipStats, StackedExperts

_HOME = {
    "Sizes": "cost",
    "comm_bytes": "cost",
    "Exchange": "exchange",
    "GlooExchange": "exchange",
    "Hub": "exchange",
    "ThreadExchange": "exchange",
    "grouped_experts": "experts",
    "Named": "outer",
    "OuterReport": "outer",
    "OuterStep": "outer",
    "ResidencyPlan": "residency",
    "Router": "skip",
    "SkipMoE": "skip",
    "SkipStats": "skip",
    "StackedExperts": "skip",
}

__all__ = [
    "Exchange",
    "GlooExchange",
    "Hub",
    "Named",
    "OuterReport",
    "OuterStep",
    "ResidencyPlan",
    "Router",
    "Sizes",
    "SkipMoE",
    "SkipStats",
    "StackedExperts",
    "ThreadExchange",
    "comm_bytes",
    "grouped_experts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
