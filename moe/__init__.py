"""Mixture of Experts: grouped experts, and experts partitioned over loosely connected sites.

Usable without the rest of the repository and without Megatron-core (`moe.megatron` binds it). Names are loaded on first use, so
that `import moe` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cost import Sizes, comm_bytes
    from .exchange import Exchange, GlooExchange, Hub, MeetingExchange, ThreadExchange
    from .experts import grouped_experts
    from .membership import Meeting, Membership, NoMeeting
    from .outer import OuterStep
    from .outer_flight import RoundFailed
    from .outer_names import Named
    from .outer_report import CatchUp, HandOver, OuterReport
    from .residency import ResidencyPlan
    from .skip import Router, SkipMoE, SkipStats, StackedExperts

_HOME = {
    "Sizes": "cost",
    "comm_bytes": "cost",
    "Exchange": "exchange",
    "GlooExchange": "exchange",
    "Hub": "exchange",
    "MeetingExchange": "exchange",
    "ThreadExchange": "exchange",
    "grouped_experts": "experts",
    "Meeting": "membership",
    "Membership": "membership",
    "NoMeeting": "membership",
    "CatchUp": "outer_report",
    "HandOver": "outer_report",
    "OuterReport": "outer_report",
    "OuterStep": "outer",
    "RoundFailed": "outer_flight",
    "Named": "outer_names",
    "ResidencyPlan": "residency",
    "Router": "skip",
    "SkipMoE": "skip",
    "SkipStats": "skip",
    "StackedExperts": "skip",
}

__all__ = [
    "CatchUp",
    "Exchange",
    "GlooExchange",
    "HandOver",
    "Hub",
    "Meeting",
    "MeetingExchange",
    "Membership",
    "Named",
    "NoMeeting",
    "OuterReport",
    "OuterStep",
    "ResidencyPlan",
    "RoundFailed",
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
