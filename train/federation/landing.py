"""A delayed outer step on its way: when it is applied, how long its vote may wait, and what a checkpoint says of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe.membership import Meeting
from train.config.schema import Config

_PATIENCE = 1.5
"""How long a vote waits for slower sites, as a multiple of the time since the step began."""
_SLACK = 30.0
"""Seconds that a vote stays below the limits after which the other ranks of a site give up."""


class Standing(Protocol):
    """The training loop's progress, of which an outer step may move the step."""

    step: int
    tokens: int


@dataclass(kw_only=True)
class Landing:
    """A delayed outer step on its way, as every rank of a site knows it."""

    step: int
    """The local step after which it is applied."""
    fragment: int | None
    meeting: Meeting | None
    """None once the sites have voted."""
    begun: bool
    """Whether this rank's part could begin."""
    behind: int
    """Rounds that this site was behind."""
    since: float = field(default_factory=time.monotonic)
    """When it began."""

    def is_due(self, step: int, steps: int) -> bool:
        """Whether it is applied after local step `step` of `steps` at the latest."""
        return step >= min(self.step, steps)

    def patience(self, config: Config) -> float:
        """Seconds to wait for the others' votes: slower sites come to the landing later, by as much as the steps since take them longer."""
        limits = [limit - _SLACK for limit in (config.train.timeout, config.train.hang_timeout) if limit]
        return min(max(config.federation.deadline, _PATIENCE * (time.monotonic() - self.since)), *limits)

    def stored(self) -> dict[str, Any]:
        """What a checkpoint keeps of it once the sites have voted."""
        return {"step": self.step, "fragment": self.fragment, "behind": self.behind}

    @staticmethod
    def restored(stored: Mapping[str, Any] | None) -> "Landing | None":
        """The landing of `stored`; None when there was none."""
        return None if stored is None else Landing(**stored, meeting=None, begun=True)
