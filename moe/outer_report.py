"""What an outer step, a catch-up and a hand-over say of themselves."""

from collections.abc import Callable
from dataclasses import dataclass

Commit = Callable[[bool], bool]
"""Told whether all went well here, answers whether it did everywhere: on rank 0 of a site, `Membership.vote`."""


@dataclass(frozen=True)
class OuterReport:
    """What an outer step did at this site."""

    round: int
    """Number of the round that ended, from 0."""
    parameters: int
    """Parameters exchanged with other sites."""
    alone: int
    """Parameters that this site alone holds among the members: updated without traffic."""
    orphans: tuple[tuple[int, int], ...]
    """(layer, expert) without a holder among the members: frozen until a holder is back."""
    came: tuple[str, ...] = ()
    """Names whose anchor and momentum this site got from others because it was behind."""
    stayed: tuple[str, ...] = ()
    """Where names came: those that no current site holds, which are as old as this site's own round."""


@dataclass(frozen=True)
class CatchUp:
    """What `OuterStep.catch_up` did at this site."""

    came: tuple[str, ...]
    """Names whose anchor, momentum and weights came from a current site; none at a site that is current itself."""
    stayed: tuple[str, ...]
    """At a site that was behind: names that no current site holds."""


@dataclass(frozen=True)
class HandOver:
    """Experts that changed hands, seen from this site."""

    arrived: tuple[tuple[int, int], ...]
    """(layer, expert) that this site now holds and did not."""
    left: tuple[tuple[int, int], ...]
    """(layer, expert) that it no longer holds."""
    bytes_sent: int
    """Bytes that this site sent for it."""
