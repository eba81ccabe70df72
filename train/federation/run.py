"""One site's part in a run over several sites: meetings, outer steps and what a checkpoint keeps of them, seen from one rank.

After a local step the training loop asks whether an outer step is `due`; if so the site meets the others, its senders
(`parameters.py`) exchange what they have, all sites vote, and the new weights go to every rank. A round that fails leaves the
weights as they are and is tried again when it is next due. A site that is behind (late, or started again) gets from the others
what they share in the same exchange, and takes step and schedule from them.

Created only when `federation.sites` is over 1. Every method is collective in the site.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe.exchange import MeetingExchange
from moe.membership import Meeting, Membership
from moe.outer import CatchUp, Commit, OuterReport, OuterStep
from train.config.schema import Config
from train.data.dataset import Batch
from train.engine.parallel import Ranks
from train.federation.agreement import (
    Phase,
    Word,
    action,
    beginnings,
    complete,
    disagreements,
    due,
    fingerprints,
    place,
    words_of,
)
from train.federation.landing import Landing, Standing
from train.federation.meetings import Meetings, own_address
from train.federation.parameters import SiteParameters
from train.federation.placement import Placement
from train.federation.presence import Presence
from train.federation.probe import router_probe
from train.federation.residency import residency_plan
from train.federation.state import OuterKeeper, saved_in
from train.federation.turning import Turning
from train.federation.voting import Voting
from train.federation.weights import Seen
from train.watchdog import Watchdog
from train.worker import Hopeless

_PATIENCE = 1.5
"""How long a site waits for others that are alive but out of step with it, as a multiple of the time since it last came to a meeting."""
_PAUSE = 0.5
"""Seconds between two meetings of sites that start and wait for the rest."""
_PARTING = 10.0
"""How long a site that was asked to stop waits for the others at an outer step, in seconds."""


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
        self._presence = Presence(config, ranks)
        self._meetings = Meetings(membership, federation.endpoint, federation.quorum or self.sites, ranks, self._presence.say)
        self._placement = Placement(config, plan, chunks, optimizer, ranks)
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
        self._voting = Voting(self._meetings, self._presence, self._outer, self._exchange)
        sends, address = self._exchange is not None, own_address(federation.endpoint)
        self._probe = router_probe(config, ranks, chunks, probe, sends, address, self._presence.say)
        self._turning = Turning(self._placement, self._meetings, self._voting, self._presence, self._outer, self._exchange, self.sites)
        self.keeper = OuterKeeper(config, plan, self._outer, self._parameters.named, self._parameters.coordinate)
        """The outer state, for `train.engine.checkpoint`."""
        self.keeper.take_residency = self._turning.take_residency
        self._round, self._line = 0, ""
        self._agreed = fingerprints(config)
        self._landing: Landing | None = None
        self._first: Meeting | None = None
        self._met = time.monotonic()
        self._owed = False
        """Whether an outer step was given up because this site was asked to stop."""

    @property
    def _parameters(self) -> SiteParameters:
        return self._placement.parameters

    @property
    def wants_save(self) -> bool:
        """Whether experts came that no checkpoint has at this site yet: of an expert with one holder there is no other copy."""
        return self._turning.unsaved

    def start(self, standing: Standing) -> int | None:
        """Meet the other sites at the start of this process. Returns the step of the checkpoint to load instead of the present one.

        None: this one is right, or the others are ahead and will bring this site up to date in `join`.
        """
        saved = saved_in(self._directory) if self._ranks.is_first else ()
        began = time.monotonic()
        while True:
            waited = time.monotonic() - began
            word = self._word("start", standing, saved=saved, waited=waited)
            self._first = self._meetings.meet_at_start(self._round, word, lambda: self._at("waiting for the other sites", standing))
            words = self._told(self._first)
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
        before = (self._round, standing.step, self._landing)
        while True:
            meeting, self._first = self._first, None
            if meeting is None:
                word = self._word("ready", standing)
                meeting = self._meetings.meet_at_start(self._round, word, lambda: self._at("waiting for the other sites", standing))
            self._presence.seen(meeting, standing.step)
            words = self._told(meeting)
            self._turning.follow(meeting, words, self.site)
            take = self._round_of if action(words) == "round" else self._catch_up
            if take(meeting, standing):
                break
        self._met = time.monotonic()
        owed, self._owed = self._owed, False
        if owed and before == (self._round, standing.step, self._landing):  # else it has been taken with the others, or by them
            self.after_step(standing)
        if self._landing is not None and standing.step >= self._config.train.steps:
            self._land(standing)

    def due(self, step: int) -> bool:
        """Whether something is to be done after local step `step`."""
        federation = self._config.federation
        landing = self._landing is not None and self._landing.is_due(step, self._config.train.steps)
        return landing or due(step, federation.sync_every, federation.fragments)[0]

    def after_step(self, standing: Standing, stopping: bool = False) -> None:
        """Take the outer step that is due, or apply a delayed one. May move `standing` to the step of sites that are ahead.

        `stopping`: this site was asked to stop, and so were the others, perhaps: they are not waited for long, and a site that
        starts again takes the outer step that it missed so first of all.
        """
        federation, steps = self._config.federation, self._config.train.steps
        if self._landing is not None and self._landing.is_due(standing.step, steps):
            self._land(standing)
        is_due, fragment = due(standing.step, federation.sync_every, federation.fragments)
        if is_due:
            self._at("meeting the other sites", standing)
            word = self._word("round", standing, fragment=fragment)
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
                self._turning.refuse_missed(meeting, words_of(meeting), self.site)
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
        return self._presence.figures(moved, self._turning.moved) | self._probe.figures()

    def save(self, standing: Standing) -> dict[str, Any]:
        """Hold the state for a checkpoint (`keeper`), after the vote on a step in flight; returns its part of the manifest."""
        landing = self._landing
        if landing is not None and landing.meeting is not None:
            self._at("vote on the outer step in flight", standing)
            patience = landing.patience(self._config)
            ok = self._voting.agree(landing.meeting, lambda outer, commit: outer.settle(commit), landing.begun, patience)[0]
            landing.meeting = None
            if not ok:
                self._presence.failed("not all sites had what they need", standing.step)
                self._landing = None
        seen, self._turning.unsaved = self._seen.state_dict(), False
        return {
            "round": self._round,
            "residency_round": self._placement.round,
            "line": self._line,
            "landing": None if self._landing is None else self._landing.stored(),
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
        self._landing = Landing.restored(stored["landing"])

    def stop_waiting_for_us(self) -> None:
        """This site was asked to stop: the others go on without it from now on."""
        self._meetings.retire()

    def leave(self) -> None:
        """End: part from the others once they have what they need from this site. Not collective, so that a failed rank can, too."""
        self._meetings.leave()
        self._probe.close()
        if self._exchange is not None:
            self._exchange.close()

    def _word(self, phase: Phase, standing: Standing, **more: Any) -> Word:
        residency = self._placement.round
        return Word(
            phase=phase, step=standing.step, line=self._line, residency=residency, tokens=standing.tokens, config=self._agreed, **more
        )

    def _told(self, meeting: Meeting) -> dict[int, Word]:
        """What the members said. Raises Hopeless, on all ranks, when they train with different configurations."""
        words = words_of(meeting)
        if keys := disagreements(words):
            sites = ", ".join(map(str, sorted(words)))
            raise Hopeless(f"federation: sites {sites} differ in {', '.join(keys)}; give all sites of the run the same values")
        return words

    def _at(self, phase: str, standing: Standing) -> None:
        self._watchdog.at(phase, standing.step)

    def _round_of(self, meeting: Meeting, standing: Standing) -> bool:
        """Take part in the round that a meeting ends; whether all went well, or is on its way."""
        if self._landing is not None and self.site in meeting.current:
            # The others missed the step that waits here: this round fails for all, and they take over from here at the next one.
            self._meetings.commit(meeting, False)
            self._presence.failed("others missed the one that this site is about to apply", standing.step)
            self._land(standing)
            return False
        self._drop()
        step, fragment = place(words_of(meeting))
        behind = 0 if self.site in meeting.current else max(1, meeting.number - meeting.steps[self.site])
        self._at("probe of the routers", standing)
        self._probe.before(meeting)
        self._at("weights to the site's senders", standing)
        self._parameters.pull(None if behind else fragment)  # a site that is behind takes over all
        weights = self._seen.weights(fragment, self._parameters.named, self._parameters.experts, self._placement.round)
        overlap = self._config.federation.overlap_steps
        if overlap:
            begun = self._voting.connect(meeting)
            if self._outer is not None and begun:
                self._outer.begin(meeting.members, weights, fragment=fragment, current=meeting.current, token=meeting.prefix)
            self._landing = Landing(step=step + overlap, fragment=fragment, meeting=meeting, begun=begun, behind=behind)
            self._move(standing, step)
            return True
        self._at("outer step", standing)

        def work(outer: OuterStep, commit: Commit) -> OuterReport:
            current, token = meeting.current, meeting.prefix
            return outer.step(meeting.members, weights, fragment=fragment, current=current, token=token, commit=commit)

        ok, report = self._voting.agree(meeting, work, self._voting.connect(meeting))
        if not ok:
            self._presence.failed("not all sites had what they need", standing.step)
            return False
        self._new_weights(report, fragment, behind, standing)
        self._move(standing, step)
        self._at("experts that change hands", standing)
        if self._turning.after_step(meeting, self._round, standing.step):
            self._adopt_line()
        return True

    def _drop(self) -> None:
        """Forget the delayed step of a site that the others have overtaken: their weights contain it."""
        if self._landing is not None and self._outer is not None:
            self._outer.drop()
        self._landing = None

    def _land(self, standing: Standing) -> None:
        """Apply the delayed step that is on its way."""
        landing, self._landing = self._landing, None
        assert landing is not None
        self._at("weights to the site's senders", standing)
        self._parameters.pull(None if landing.behind else landing.fragment)
        self._at("outer step", standing)
        if landing.meeting is None:
            report = self._outer.finish() if self._outer is not None else None
        else:
            patience = landing.patience(self._config)
            ok, report = self._voting.agree(landing.meeting, lambda outer, commit: outer.finish(commit), landing.begun, patience)
            if not ok:
                self._presence.failed("not all sites had what they need", standing.step)
                return
        self._new_weights(report, landing.fragment, landing.behind, standing)

    def _catch_up(self, meeting: Meeting, standing: Standing) -> bool:
        """Without a round: bring the members that are behind up to date."""
        if meeting.current == meeting.members:
            return True
        if self.site not in meeting.current:
            self._drop()
        behind = max(0, meeting.number - meeting.steps[self.site])
        self._parameters.pull()

        def work(outer: OuterStep, commit: Commit) -> CatchUp:
            return outer.catch_up(meeting.members, meeting.current, commit=commit)

        ok, report = self._voting.agree(meeting, work, self._voting.connect(meeting))
        if not ok:
            self._presence.failed("not all sites had what they need", standing.step)
            return False
        if self.site not in meeting.current:
            self._new_weights(report, None, max(1, behind), standing, stepped=False)
            words = words_of(meeting)
            self._move(standing, max(words[site].step for site in meeting.current))
        return True

    def _new_weights(self, report: Any, fragment: int | None, behind: int, standing: Standing, *, stepped: bool = True) -> None:
        """The senders have new weights: give them to all ranks, and say what happened."""
        self._at("weights from the site's senders", standing)
        self._parameters.push(None if behind else fragment)
        if behind:
            self._seen.restart()
            self._placement.awaited = []
        else:
            self._seen.mark(fragment)
        self._adopt_line()
        stayed = list(report.stayed) if behind and report is not None else []
        gathered: list[Any] = [None] * self._ranks.world
        if behind:
            dist.all_gather_object(gathered, stayed)
        orphans = getattr(report, "orphans", ())
        self._presence.done(self._round, behind, [name for names in gathered if names for name in names], orphans, standing.step)
        if stepped:
            self._at("probe of the routers", standing)
            self._probe.after()

    def _adopt_line(self) -> None:
        facts: list[Any] = [{"round": self._outer.round, "line": self._outer.line} if self._outer is not None else {}]
        dist.broadcast_object_list(facts)  # rank 0 sends for the first coordinate
        self._round, self._line = facts[0]["round"], facts[0]["line"]

    def _move(self, standing: Standing, step: int) -> None:
        if step > standing.step:
            self._presence.say(f"federation: site {self.site} goes on at step {step} with the others, from step {standing.step}")
            standing.step = step
