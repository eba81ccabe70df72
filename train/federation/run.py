"""One site's part in a run over several sites: meetings, outer steps and what a checkpoint keeps of them, seen from one rank.

After a local step the training loop asks whether an outer step is `due`; if so the site meets the others, its senders
(`parameters.py`) exchange what they have, all sites vote, and the new weights go to every rank. A round that fails leaves the
weights as they are and is tried again when it is next due. A site that is behind (late, or started again) gets from the others
what they share in the same exchange, and takes step and schedule from them.

Created only when `federation.sites` is over 1. Every method is collective in the site.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from moe.exchange import MeetingExchange
from moe.membership import Meeting, Membership
from moe.outer import Commit, OuterReport, OuterStep
from moe.outer_flight import RoundFailed
from moe.outer_names import partition
from train.config.schema import Config
from train.data.dataset import Batch
from train.engine.masters import masters, publish
from train.engine.parallel import Ranks
from train.federation.agreement import Word, action, beginnings, complete, due, place
from train.federation.meetings import Meetings, own_address
from train.federation.parameters import SiteParameters
from train.federation.presence import Presence
from train.federation.probe import router_probe
from train.federation.residency import residency_plan
from train.federation.state import OuterKeeper, saved_in
from train.federation.weights import Seen
from train.watchdog import Watchdog

_PATIENCE = 1.5
"""How long a site waits for others that are alive but out of step with it, as a multiple of the time since it last came to a meeting."""
_PAUSE = 0.5
"""Seconds between two meetings of sites that start and wait for the rest."""
_PARTING = 10.0
"""How long a site that was asked to stop waits for the others at an outer step, in seconds."""


class Standing(Protocol):
    """The training loop's progress, of which an outer step may move the step."""

    step: int
    tokens: int


@dataclass(kw_only=True)
class _Landing:
    """A delayed outer step on its way."""

    step: int
    """The local step after which it is applied."""
    fragment: int | None
    meeting: Meeting | None
    """None once the sites have voted."""
    begun: bool
    """Whether this rank's part could begin."""
    behind: int
    """Rounds that this site was behind."""


class Federation:
    """This rank's view of its site among the others."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        ranks: Ranks,
        chunks: list[Any],
        optimizer: Any,
        watchdog: Watchdog,
        probe: Sequence[Batch] = (),
    ) -> None:
        """Heartbeats to the others begin; `start` meets them. `directory` is where this site's checkpoints lie, `probe` what the routers
        are compared on."""
        federation = config.federation
        assert federation.site is not None and federation.endpoint is not None
        self.site, self.sites = federation.site, federation.sites
        self._config, self._directory, self._ranks, self._watchdog = config, directory, ranks, watchdog
        plan = residency_plan(config)
        membership = None
        if ranks.is_first:
            membership = Membership(
                federation.endpoint,
                self.site,
                self.sites,
                quorum=federation.quorum,
                deadline=federation.deadline,
                run_id=str(config.run.name),
            )
        self._presence = Presence(self.site, self.sites, ranks)
        self._meetings = Meetings(membership, federation.endpoint, federation.quorum or self.sites, ranks, self._presence.say)
        # In mode frozen every site has every expert: all take them over from those that train them.
        self._parameters = SiteParameters(
            masters(chunks, optimizer), lambda: publish(chunks, optimizer), ranks, experts_at_all=config.moe.mode == "frozen"
        )
        self._seen = Seen(config, plan, chunks)
        self._outer: OuterStep | None = None
        self._exchange: MeetingExchange | None = None
        self._parameters.pull()
        if self._parameters.is_sender:
            self._exchange = MeetingExchange(
                self.site,
                ".".join(map(str, self._parameters.coordinate)),
                transfer=federation.transfer_dtype,
                address=own_address(federation.endpoint),
            )
            rows: Any = federation.router_rows
            self._outer = OuterStep(
                self._parameters.named,
                plan,
                self._exchange,
                federation.outer_lr,
                federation.outer_momentum,
                router_rows=rows,
                fragments=federation.fragments,
                sites=self.sites,
            )
        sends, address = self._exchange is not None, own_address(federation.endpoint)
        self._probe = router_probe(config, ranks, chunks, probe, sends, address, self._presence.say)
        self._parameters.divide(partition(self._parameters.named, plan, federation.fragments))
        self.keeper = OuterKeeper(config, plan, self._outer, self._parameters.named, self._parameters.coordinate)
        """The outer state, for `train.engine.checkpoint`."""
        self._round, self._line = 0, ""
        self._landing: _Landing | None = None
        self._first: Meeting | None = None
        self._met = time.monotonic()
        self._owed = False
        """Whether an outer step was given up because this site was asked to stop."""

    def start(self, standing: Standing) -> int | None:
        """Meet the other sites at the start of this process. Returns the step of the checkpoint to load instead of the present one.

        None: this one is right, or the others are ahead and will bring this site up to date in `join`.
        """
        saved = saved_in(self._directory) if self._ranks.is_first else ()
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            word = Word(phase="start", step=standing.step, line=self._line, tokens=standing.tokens, saved=saved, waited=waited)
            self._first = self._meetings.meet_at_start(self._round, word, lambda: self._at("waiting for the other sites", standing))
            words = _words(self._first)
            if action(words) != "start" or complete(words, self.sites, self._config.federation.deadline):
                break
            time.sleep(_PAUSE)
        if action(words) != "start":
            return None
        self._first = None
        chosen = beginnings({site: said.saved for site, said in words.items()}, self._config.checkpoint.every)[self.site]
        return chosen if chosen != standing.step and chosen is not None else None

    def join(self, standing: Standing) -> None:
        """Be one of those that train: up to date with the others, at their step if they are ahead."""
        while True:
            meeting, self._first = self._first, None
            if meeting is None:
                word = Word(phase="ready", step=standing.step, line=self._line, tokens=standing.tokens)
                meeting = self._meetings.meet_at_start(self._round, word, lambda: self._at("waiting for the other sites", standing))
            self._presence.seen(meeting, standing.step)
            if action(_words(meeting)) == "round":
                joined = self._round_of(meeting, standing)
            else:
                joined = self._catch_up(meeting, standing)
            if joined:
                break
        self._met = time.monotonic()
        if self._owed:
            self._owed = False
            self.after_step(standing)
        if self._landing is not None and standing.step >= self._config.train.steps:
            self._land(standing)

    def due(self, step: int) -> bool:
        """Whether something is to be done after local step `step`."""
        federation = self._config.federation
        landing = self._landing is not None and step >= min(self._landing.step, self._config.train.steps)
        return landing or due(step, federation.sync_every, federation.fragments)[0]

    def after_step(self, standing: Standing, stopping: bool = False) -> None:
        """Take the outer step that is due, or apply a delayed one. May move `standing` to the step of sites that are ahead.

        `stopping`: this site was asked to stop, and so were the others, perhaps: they are not waited for long, and a site that
        starts again takes the outer step that it missed so first of all.
        """
        federation, steps = self._config.federation, self._config.train.steps
        if self._landing is not None and standing.step >= min(self._landing.step, steps):
            self._land(standing)
        is_due, fragment = due(standing.step, federation.sync_every, federation.fragments)
        if is_due:
            self._at("meeting the other sites", standing)
            word = Word(phase="round", step=standing.step, line=self._line, fragment=fragment, tokens=standing.tokens)
            meeting = self._meetings.meet(
                self._round,
                word,
                lambda: self._at("meeting the other sites", standing),
                timeout=min(federation.deadline, _PARTING) if stopping else None,
                patience=0.0 if stopping else _PATIENCE * (time.monotonic() - self._met),
            )
            self._met = time.monotonic()
            if isinstance(meeting, str):
                self._presence.failed(meeting, standing.step)
                self._owed = stopping
            else:
                self._presence.seen(meeting, standing.step)
                self._round_of(meeting, standing)
            if self._landing is not None and standing.step >= steps:
                self._land(standing)

    def count(self, tokens: int) -> None:
        """A local step with so many tokens has been taken."""
        self._seen.add(tokens)

    def figures(self) -> dict[str, Any]:
        """What the outer steps since the last line moved and who took part; {} when there was none."""
        exchange = self._exchange
        moved = (exchange.bytes_sent, exchange.bytes_received, exchange.payload_bytes) if exchange is not None else None
        return self._presence.figures(moved) | self._probe.figures()

    def save(self, standing: Standing) -> dict[str, Any]:
        """Hold the state for a checkpoint (`keeper`), after the vote on a step in flight; returns its part of the manifest."""
        landing = self._landing
        if landing is not None and landing.meeting is not None:
            self._at("vote on the outer step in flight", standing)
            outer, begun = self._outer, landing.begun
            ok = self._agree(landing.meeting, lambda commit: outer.settle(commit) if outer is not None and begun else None, begun)[0]
            landing.meeting = None
            if not ok:
                self._presence.failed("not all sites had what they need", standing.step)
                self._landing = None
        flight = None
        if self._landing is not None:
            flight = {"step": self._landing.step, "fragment": self._landing.fragment, "behind": self._landing.behind}
        seen = self._seen.state_dict()
        return {
            "round": self._round,
            "line": self._line,
            "landing": flight,
            "owed": self._owed,
            "seen": seen,
            **self.keeper.about(),
            "outer": self.keeper.take(),
        }

    def loaded(self, stored: dict[str, Any]) -> None:
        """Go on from a checkpoint's part of the manifest, after `keeper` has restored its tensors."""
        self._round, self._line = int(stored["round"]), str(stored["line"])
        self._seen.load_state_dict(stored["seen"])
        self._owed = bool(stored["owed"])
        landing = stored["landing"]
        self._landing = None if landing is None else _Landing(**landing, meeting=None, begun=True)

    def stop_waiting_for_us(self) -> None:
        """This site was asked to stop: the others go on without it from now on."""
        self._meetings.retire()

    def leave(self) -> None:
        """End: part from the others once they have what they need from this site. Not collective, so that a failed rank can, too."""
        self._meetings.leave()
        self._probe.close()
        if self._exchange is not None:
            self._exchange.close()

    def _at(self, phase: str, standing: Standing) -> None:
        self._watchdog.at(phase, standing.step)

    def _round_of(self, meeting: Meeting, standing: Standing) -> bool:
        """Take part in the round that a meeting ends; whether all went well, or is on its way."""
        words = _words(meeting)
        step, fragment = place(words)
        behind = 0 if self.site in meeting.current else max(1, meeting.number - meeting.steps[self.site])
        self._at("probe of the routers", standing)
        self._probe.before(meeting)
        self._at("weights to the site's senders", standing)
        self._parameters.pull(None if behind else fragment)  # a site that is behind takes over all
        weights = self._seen.weights(fragment, self._parameters.named, self._parameters.experts)
        outer, overlap = self._outer, self._config.federation.overlap_steps
        if overlap:
            begun = self._connect(meeting)
            if outer is not None and begun:
                outer.begin(meeting.members, weights, fragment=fragment, current=meeting.current)
            self._landing = _Landing(step=step + overlap, fragment=fragment, meeting=meeting, begun=begun, behind=behind)
            self._move(standing, step)
            return True
        self._at("outer step", standing)

        def work(commit: Commit) -> OuterReport | None:
            if outer is None:
                return None
            return outer.step(meeting.members, weights, fragment=fragment, current=meeting.current, commit=commit)

        ok, report = self._agree(meeting, work, self._connect(meeting))
        if not ok:
            self._presence.failed("not all sites had what they need", standing.step)
            return False
        self._new_weights(report, fragment, behind, standing)
        self._move(standing, step)
        return True

    def _land(self, standing: Standing) -> None:
        """Apply the delayed step that is on its way."""
        landing, self._landing = self._landing, None
        assert landing is not None
        self._at("weights to the site's senders", standing)
        self._parameters.pull(None if landing.behind else landing.fragment)
        self._at("outer step", standing)
        outer = self._outer
        if landing.meeting is None:
            report = outer.finish() if outer is not None else None
        else:
            ok, report = self._agree(landing.meeting, lambda commit: outer.finish(commit) if outer is not None else None, landing.begun)
            if not ok:
                self._presence.failed("not all sites had what they need", standing.step)
                return
        self._new_weights(report, landing.fragment, landing.behind, standing)

    def _catch_up(self, meeting: Meeting, standing: Standing) -> bool:
        """Without a round: bring the members that are behind up to date."""
        if meeting.current == meeting.members:
            return True
        outer, behind = self._outer, max(0, meeting.number - meeting.steps[self.site])
        self._parameters.pull()

        def work(commit: Commit) -> Any:
            return outer.catch_up(meeting.members, meeting.current, commit=commit) if outer is not None else None

        ok, report = self._agree(meeting, work, self._connect(meeting))
        if not ok:
            self._presence.failed("not all sites had what they need", standing.step)
            return False
        if self.site not in meeting.current:
            self._new_weights(report, None, max(1, behind), standing, stepped=False)
            words = _words(meeting)
            self._move(standing, max(words[site].step for site in meeting.current))
        return True

    def _connect(self, meeting: Meeting) -> bool:
        """Connect this rank's counterparts in the other sites; whether that worked."""
        if self._exchange is None:
            return True
        try:
            self._exchange.use(meeting)
        except (RuntimeError, OSError) as error:
            self._presence.note(error)
            return False
        return True

    def _agree(self, meeting: Meeting, work: Callable[[Commit], Any], able: bool) -> tuple[bool, Any]:
        """Do a sender's `work`, which asks for the sites' vote once; on the other ranks just vote. Whether all agreed, and its answer."""
        votes: list[bool] = []

        def commit(ok: bool) -> bool:
            votes.append(self._meetings.commit(meeting, ok))
            return votes[0]

        if self._outer is None or not able:
            commit(able)
            return votes[0], None
        try:
            return True, work(commit)
        except RoundFailed as error:
            self._presence.note(error)
            return False, None

    def _new_weights(self, report: Any, fragment: int | None, behind: int, standing: Standing, *, stepped: bool = True) -> None:
        """The senders have new weights: give them to all ranks, and say what happened."""
        self._at("weights from the site's senders", standing)
        self._parameters.push(None if behind else fragment)
        if stepped:
            self._seen.mark(fragment)
        facts: list[Any] = [{"round": self._outer.round, "line": self._outer.line} if self._outer is not None else {}]
        dist.broadcast_object_list(facts)  # rank 0 sends for the first coordinate
        self._round, self._line = facts[0]["round"], facts[0]["line"]
        stayed = list(report.stayed) if behind and report is not None else []
        gathered: list[Any] = [None] * self._ranks.world
        if behind:
            dist.all_gather_object(gathered, stayed)
        orphans = getattr(report, "orphans", ())
        self._presence.done(self._round, behind, [name for names in gathered if names for name in names], orphans, standing.step)
        if stepped:
            self._at("probe of the routers", standing)
            self._probe.after()

    def _move(self, standing: Standing, step: int) -> None:
        if step > standing.step:
            self._presence.say(f"federation: site {self.site} goes on at step {step} with the others, from step {standing.step}")
            standing.step = step


def _words(meeting: Meeting) -> dict[int, Word]:
    return {site: Word.from_dict(meeting.data[site]) for site in meeting.members}
