"""When experts of a `rotating` plan change hands in a run, what is said of it, and a site that comes back afterwards.

A turn follows an outer step, in the same meeting and with a vote of its own, when the plan has other holders from then on and every
site is there and up to date; else it waits, and the old residency stays in force. A turn that fails is tried after the next step.
Every method is collective in the site.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe.exchange import MeetingExchange
from moe.membership import Meeting
from moe.outer import OuterStep
from moe.outer_names import Named
from train.federation.agreement import Word
from train.federation.meetings import Meetings
from train.federation.placement import Placement, States
from train.federation.presence import Presence
from train.federation.voting import Voting
from train.worker import Hopeless

_NAMED = 8  # experts that a line lists


class Turning:
    """This rank's part; `outer` and `exchange` are None on a rank that sends nothing."""

    def __init__(
        self,
        placement: Placement,
        meetings: Meetings,
        voting: Voting,
        presence: Presence,
        outer: OuterStep | None,
        exchange: MeetingExchange | None,
        sites: int,
    ) -> None:
        self._placement, self._meetings, self._voting, self._presence = placement, meetings, voting, presence
        self._outer, self._exchange, self._sites = outer, exchange, sites
        self._waits = False
        self.unsaved = False
        """Whether experts have changed hands since the last checkpoint."""
        self.moved = (0, 0, 0)
        """Bytes of moving experts so far at this sender: sent, received, payload."""

    def after_step(self, meeting: Meeting, round: int, step: int) -> bool:
        """`round` outer steps are done, and the last one's weights are in place: whether experts changed hands."""
        if not self._placement.due(round):
            return False
        if len(meeting.current) < self._sites:
            if not self._waits:
                self._presence.say(f"federation: step {step}: experts are to change hands, and wait until all sites are there")
            self._waits = True
            return False

        def pass_on(named: Mapping[str, Named], states: States) -> bool:
            def work(outer: OuterStep, commit: Any) -> Any:
                return outer.hand_over(named, states=states, commit=commit)

            # A vote of its own: that on the outer step has been decided.
            return self._voting.agree(replace(meeting, prefix=f"{meeting.prefix}/turn"), work, True)[0]

        before, counted = self._placement.round, self._counted()
        ok = self._placement.turn(round, pass_on)
        self.moved = tuple(  # type: ignore[assignment]
            old + now - then for old, now, then in zip(self.moved, self._counted(), counted, strict=True)
        )
        self._waits = self._waits and not ok
        self.unsaved = self.unsaved or ok
        self._presence.turned(self._placement.changes(before, round) if ok else None, self._placement.round, step)
        return ok

    def follow(self, meeting: Meeting, words: Mapping[int, Word], site: int) -> None:
        """Before this site is brought up to date: have its slots stand for the experts that the others say it has.

        Raises Hopeless, on all ranks, when nobody who is there could give it one of them.
        """
        if site in meeting.current:
            return
        residency = words[meeting.current[0]].residency
        if lacking := self._placement.lacking(residency, meeting.current):
            self._meetings.commit(meeting, False)
            raise Hopeless(
                f"federation: site {site} was away when experts changed hands (its own are those of round {self._placement.round}, the "
                f"others' of round {residency}), and no site that is there holds expert {listed(lacking)}; stop all sites and start "
                "them again: they go on from the newest round that all have saved"
            )
        if residency != self._placement.round:
            before = self._placement.round
            named = self._placement.follow(residency)
            if self._outer is not None:
                self._outer.rename(named, residency)
            self._presence.turned(self._placement.changes(before, residency), residency, words[site].step)

    def refuse_missed(self, meeting: Meeting, words: Mapping[int, Word], site: int) -> None:
        """At an outer step: raise RuntimeError, on all ranks, when this site has missed a turn, which it can only follow as it starts."""
        if site not in meeting.current and words[meeting.current[0]].residency != self._placement.round:
            raise RuntimeError("federation: this site missed that experts changed hands; it starts again from its last checkpoint")

    def take_residency(self, round: int) -> Mapping[str, Named]:
        """Before a checkpoint of `round`'s residency is loaded: name slots and parameters by it; this rank's names."""
        if round != self._placement.round:
            named = self._placement.name(round)
            if self._outer is not None:
                self._outer.rename(named, round)
        self._placement.awaited = []
        return self._placement.parameters.named

    def _counted(self) -> tuple[int, int, int]:
        exchange = self._exchange
        return (exchange.bytes_sent, exchange.bytes_received, exchange.payload_bytes) if exchange is not None else (0, 0, 0)


def listed(experts: Sequence[tuple[int, int]]) -> str:
    """Experts by (block, number) in words, the first few."""
    named = ", ".join(f"{expert} of block {layer}" for layer, expert in experts[:_NAMED])
    return named + (f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else "")
