"""Meetings seen from all ranks of a site: rank 0 speaks for the site, the others hear what it heard.

Every method is collective in the site. `Membership` (`moe/membership.py`) is on rank 0 only.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe.lighthouse import split_address
from moe.membership import Meeting, Membership, NoMeeting
from moe.store import address_towards
from train.engine.parallel import Ranks
from train.federation.agreement import Word
from train.meeting import sites_there
from train.worker import Hopeless

_TRY_SECONDS = 30.0
"""How long one try to meet at the start lasts; the other ranks hear of each."""
_ALONE_SECONDS = 600.0
"""How long a site that starts waits for any sign of another one."""


class Meetings:
    """A site's meetings with the others. `say` prints a line on rank 0."""

    def __init__(self, membership: Membership | None, endpoint: str, needed: int, ranks: Ranks, say: Callable[[str], None]) -> None:
        """`membership` is None on all ranks but the first; `endpoint` is where its lighthouse is, `needed` the fewest sites that meet."""
        self._membership, self._ranks, self._say = membership, ranks, say
        self._endpoint = endpoint if ranks.is_first else None
        self._needed = needed

    def meet(
        self, round: int, word: Word, waiting: Callable[[], None], *, timeout: float | None = None, patience: float = 0.0
    ) -> Meeting | str:
        """Meet the others after `round` outer steps; the reason in words when too few came in `timeout` seconds (None: as configured).

        While enough sites are alive they are only out of step with this one: it then waits up to `patience` seconds in all, or each would
        come when the other has just given up. `waiting` is called now and then.
        """
        began = time.monotonic()
        meeting = self._try(round, word, timeout)
        while isinstance(meeting, str):
            left = [patience - (time.monotonic() - began)]
            dist.broadcast_object_list(left)
            if left[0] <= 0 or self._alive() < self._needed:
                break
            waiting()
            meeting = self._try(round, word, min(left[0], _TRY_SECONDS))
        return meeting

    def meet_at_start(self, round: int, word: Word, waiting: Callable[[], None]) -> Meeting:
        """Meet the others as soon as they come, since they may be in the middle of a round. `waiting` is called now and then.

        Raises Hopeless, on all ranks, when no other site has been heard of for ten minutes.
        """
        began = heard = time.monotonic()
        while True:
            waiting()
            meeting = self._try(round, word, _TRY_SECONDS)
            if isinstance(meeting, Meeting):
                return meeting
            now = time.monotonic()
            self._say(f"federation: waiting for the other sites since {now - began:.0f} s ({meeting})")
            heard = now if self._alive() > 1 else heard
            alone = [now - heard > _ALONE_SECONDS]
            dist.broadcast_object_list(alone)
            if alone[0]:
                raise Hopeless(
                    f"federation: no other site was heard of for {now - heard:.0f} s; start all sites of the run, or go on with all"
                )

    def _alive(self) -> int:
        """Sites that send heartbeats, this one included, as rank 0 finds them where sites meet."""
        told = [1]
        if self._endpoint is not None:
            with contextlib.suppress(ValueError):
                told[0] = max(1, sites_there(self._endpoint) or 0)
        dist.broadcast_object_list(told)
        return told[0]

    def _try(self, round: int, word: Word, timeout: float | None) -> Meeting | str:
        outcome: list[Any] = [None]
        if self._membership is not None:
            try:
                outcome[0] = {"meeting": self._membership.meet(round, word.to_dict(), timeout=timeout).to_dict()}
            except NoMeeting as error:
                outcome[0] = {"reason": str(error)}
            except ValueError as error:
                outcome[0] = {"error": str(error)}
        dist.broadcast_object_list(outcome)
        if "error" in outcome[0]:
            raise ValueError(outcome[0]["error"])
        return Meeting.from_dict(outcome[0]["meeting"]) if "meeting" in outcome[0] else str(outcome[0]["reason"])

    def commit(self, meeting: Meeting, ok: bool, patience: float | None = None) -> bool:
        """Whether all went well on every rank of every site of `meeting`: the vote of the sites, awaited for `patience` seconds.

        None: as long as configured. A site that needs longer has voted no.
        """
        fine = torch.tensor([float(ok)], device=self._ranks.device)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        outcome = [bool(fine.item())]
        if self._membership is not None:
            outcome[0] = self._membership.vote(meeting, outcome[0], timeout=patience)
        dist.broadcast_object_list(outcome)
        return outcome[0]

    def retire(self) -> None:
        """Have the others no longer wait for this site; votes that are under way can still be held."""
        if self._membership is not None:
            self._membership.leave()

    def leave(self) -> None:
        """Part from the others, once they have read the outcome of the last vote."""
        if self._membership is not None:
            self._membership.close()


def own_address(endpoint: str) -> str:
    """This host's address on the way to `endpoint`, which is where the other sites' connections arrive."""
    return address_towards(*split_address(endpoint))
