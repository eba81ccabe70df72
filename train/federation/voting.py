"""What the senders of all sites do together in a meeting, and the sites' vote on it. Every method is collective in the site."""

from collections.abc import Callable
from typing import Any

from moe.exchange import MeetingExchange
from moe.membership import Meeting
from moe.outer import Commit, OuterStep
from moe.outer_flight import RoundFailed
from train.federation.meetings import Meetings
from train.federation.presence import Presence


class Voting:
    """This rank's part; `outer` and `exchange` are None on a rank that sends nothing."""

    def __init__(self, meetings: Meetings, presence: Presence, outer: OuterStep | None, exchange: MeetingExchange | None) -> None:
        self._meetings, self._presence, self._outer, self._exchange = meetings, presence, outer, exchange

    def connect(self, meeting: Meeting) -> bool:
        """Connect this rank's counterparts in the other sites; whether that worked."""
        if self._exchange is None:
            return True
        try:
            self._exchange.use(meeting)
        except (RuntimeError, OSError) as error:
            self._presence.note(error)
            return False
        return True

    def agree(
        self, meeting: Meeting, work: Callable[[OuterStep, Commit], Any], able: bool, patience: float | None = None
    ) -> tuple[bool, Any]:
        """Do a sender's `work`, which asks for the sites' vote once; on the other ranks just vote. Whether all agreed, and its answer.

        A rank that is not `able` votes no. The vote waits `patience` seconds for the other sites (None: the deadline).
        """
        votes: list[bool] = []

        def commit(ok: bool) -> bool:
            votes.append(self._meetings.commit(meeting, ok, patience))
            return votes[0]

        if self._outer is None or not able:
            commit(able)
            return votes[0], None
        try:
            return True, work(self._outer, commit)
        except RoundFailed as error:
            self._presence.note(error)
            return False, None
