"""The outer step: after H local steps, sites agree on new weights from how far each one moved.

    dense parameter   D = mean over all sites of (theta0 - theta_m)
    expert            D = mean over its holders          router row e: over the holders of e, or over all sites
    v <- beta v + D;   theta0 <- theta0 - eta (D + beta v)     (Nesterov; without it, theta0 - eta v)

theta0, the anchor, and v live on the host in fp32. Then theta0 goes into the parameter *and* every copy the inner optimiser
steps from. eta = 1, beta = 0 is plain averaging. What one site alone holds costs no traffic, and with plain averaging it stays
exactly as it is. Formulas and the choice of classes are this project's own.

    step = OuterStep({"head.weight": Named(weight, "dense"), ...}, plan, exchange, lr=0.7, momentum=0.9)
    for _ in range(sync_every): train()
    report = step.step()

**Delayed.** `begin()` takes theta as it is and lets the sums travel in a thread while training goes on; `finish()` moves theta0 and
puts theta <- theta0 + (theta now - theta at begin), so that what was learnt meanwhile is kept (our choice).

**Sites that come and go.** A step takes the `members` of one meeting and lets only those that are `current` contribute; a member
that is behind gets anchor and momentum of all it shares from the first current holder, and so has the others' weights after the
step. What no current site holds stays: its first holder among the members counts as current for it. `commit` is asked after the
tensors have arrived and before anything moves, so a failed round changes nothing, anywhere.

Beside anchor and momentum (8 bytes a parameter) a step stages one fp32 tensor for each exchanged parameter until it is known that
all arrived (4 bytes), a delayed one also theta at begin (4 bytes); the rest is bounded by the exchange's bucket.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .exchange import Exchange
from .outer_checks import check_settings, check_state, weight_of
from .outer_flight import Flight, RoundFailed, copies, decide, host_copy
from .outer_names import Named, Sharing, partition
from .outer_report import CatchUp, Commit, HandOver, OuterReport
from .outer_rotation import changes, check_renamed, experts_in, pass_experts
from .residency import ResidencyPlan


class OuterStep:
    """Anchor, momentum and the exchange of one site (one tensor- and pipeline-parallel coordinate of it).

    All sites must name the same dense parameters, and every holder of an expert the same ones of it; names decide who meets whom.
    """

    def __init__(
        self,
        named: Mapping[str, Named | tuple],
        plan: ResidencyPlan | None,
        exchange: Exchange,
        lr: float,
        momentum: float,
        nesterov: bool = True,
        *,
        router_rows: Literal["holders", "all"] = "holders",
        fragments: int = 1,
        sites: int | None = None,
        residency_round: int = 0,
    ) -> None:
        """Take the present weights as the anchor. Raises ValueError on arguments without sense or effect, and on names off the plan.

        `plan` may be None for a model without experts; `sites` then says how many there are. `fragments` parts take turns by
        `step(fragment=p)`. `residency_round` is the round of a `rotating` plan that `named` is for, 0 in a new run.
        """
        if plan is not None and sites not in (None, plan.sites):
            raise ValueError(f"sites={sites}: the plan has {plan.sites}; leave it out")
        if plan is None and sites is None:
            raise ValueError("sites: needed without a plan; give the number of sites")
        self._sites = plan.sites if plan is not None else sites or 0
        self.exchange = exchange
        """Used by every call that is not given another."""
        self._plan = plan
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._fragments = fragments
        check_settings(lr, momentum, router_rows, fragments, exchange.site, self._sites)
        self._sharing = Sharing(plan, exchange.site, router_rows == "all", residency_round)
        self._named = {name: Named(*named[name]) for name in sorted(named)}
        self._sharing.check(self._named)
        self._part_of = partition(self._named, plan, fragments)
        self.round = 0
        """Outer steps done; with fragments, partial ones."""
        self.line = ""
        """Stands for the outer steps that led here and their `token`s: equal at sites with equal anchors. For `Meeting.current`."""
        self._flight: Flight | None = None
        self._anchor = {name: host_copy(entry.tensor) for name, entry in self._named.items()}
        self._velocity = {name: torch.zeros_like(anchor) for name, anchor in self._anchor.items()} if momentum else {}

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun and not finished."""
        return self._flight is not None

    @property
    def residency_round(self) -> int:
        """Round of the plan whose residency is in force, and for which parameters are named."""
        return self._sharing.round

    @property
    def due(self) -> bool:
        """Whether experts change hands before the next step: the plan's residency at `round` is not the one in force."""
        return self._plan is not None and any(changes(self._plan, self.residency_round, self.round))

    def step(
        self,
        members: Sequence[int] | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        fragment: int | None = None,
        current: Sequence[int] | None = None,
        exchange: Exchange | None = None,
        token: str = "",
        commit: Commit | None = None,
    ) -> OuterReport:
        """End a round: exchange, move the anchor, write it back.

        `members` are the sites that take part, all by default, and `current` those of them that are up to date, all members by
        default; every member must give the same, and the same `fragment` (one part of the names; None: all of them). `weights` gives
        this site's weight of each parameter by name, such as the tokens it saw; without it sites count alike. `token`, the same at all
        members and at no other step (`Meeting.prefix`), tells this step in `line` from one like it in another past of the same sites.
        `commit` is called once.
        Raises ValueError on members without this site, on a name without a weight, and on negative weights; RoundFailed when the
        exchange or the commit failed, which leaves weights, anchor and momentum as they were.
        """
        flight = self._prepare(members, weights, fragment, current, exchange, delayed=False, token=token)
        flight.travel()
        return self._land(flight, commit)

    def begin(
        self,
        members: Sequence[int] | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        fragment: int | None = None,
        current: Sequence[int] | None = None,
        exchange: Exchange | None = None,
        token: str = "",
    ) -> None:
        """Start a delayed step: take the weights as they are now and send them from a thread; terms as for `step`.

        Nothing else may use the exchange until `finish` or `settle`.
        """
        flight = self._prepare(members, weights, fragment, current, exchange, delayed=True, token=token)
        flight.start_travel()
        self._flight = flight

    def settle(self, commit: Commit | None = None) -> None:
        """Wait until the step in flight has arrived and hold its vote, but do not apply it yet: `state_dict` can then store it.

        Raises RoundFailed as `finish` does; then nothing is in flight.
        """
        flight = self._in_flight()
        self._flight = None
        flight.settle(self.round, commit)
        self._flight = flight

    def finish(self, commit: Commit | None = None) -> OuterReport:
        """Wait for the step in flight and apply it to the weights as they are now. Raises RoundFailed as `step` does.

        A site that was behind takes over the others' weights as they are, without what it learnt meanwhile.
        """
        flight = self._in_flight()
        self._flight = None
        return self._land(flight, commit)

    def drop(self) -> None:
        """Forget the step in flight, if there is one, at a site that the others have overtaken; waits for its sending thread.

        Weights, anchor and momentum stay as they are. A member that is behind calls this before `catch_up`.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()

    @torch.no_grad()
    def catch_up(
        self,
        members: Sequence[int],
        current: Sequence[int],
        *,
        exchange: Exchange | None = None,
        commit: Commit | None = None,
    ) -> CatchUp:
        """Bring the members that are behind to the weights of the `current` ones, in a meeting without a step; all members call it.

        What a site alone holds stays as it is. `step` does the same on its way. A current member may have a settled step in flight: it
        gives the anchor from before it. Raises as `step` does, and ValueError at a member that is behind with a step in flight.
        """
        flight = self._prepare(members, None, None, current, exchange, delayed=False, steps=False)
        flight.travel()
        flight.settle(self.round, commit)
        for name in flight.anchors:
            self._take_over(flight, name)
            self._write(name, self._anchor[name])
        self._adopt(flight)
        return CatchUp(*self._came(flight))

    @torch.no_grad()
    def hand_over(
        self,
        named: Mapping[str, Named | tuple],
        *,
        states: Mapping[tuple[int, int], Sequence[Tensor]] | None = None,
        exchange: Exchange | None = None,
        commit: Commit | None = None,
    ) -> HandOver:
        """Put the residency of the present round in force; all sites of a `rotating` plan call it, right after a step, when `due`.

        `named` names the parameters that this site has from now on: its experts of `plan.resident(site, layer, step.round)`, where
        they will be, and the rest as before. A new holder gets anchor and momentum from the first old one, bit for bit (with rows that
        go to holders, those of the router row too), and the weights of all experts named are written. `states`, by (layer, expert),
        travel the same way, fp32 on the host: what the old holder's inner optimiser keeps of an expert, and at a new holder as many
        tensors to be overwritten, also when the hand-over fails. Raises ValueError when nothing is due or the names do not fit,
        RoundFailed as `step` does.
        """
        if self._flight is not None or not self.due:
            raise ValueError(f"hand over: {'a step is in flight' if self._flight else 'nothing is due'}; call it after a step when due")
        through, old, now = (
            exchange or self.exchange,
            self._sharing,
            Sharing(self._plan, self._sharing.site, self._sharing.all_rows, self.round),
        )
        renamed = {name: Named(*named[name]) for name in sorted(named)}
        check_renamed(self._named, renamed, old, now)
        sent = through.bytes_sent
        error: Exception | None = None
        anchors: dict[str, Tensor] = {}
        velocities: dict[str, Tensor] = {}
        try:
            anchors, velocities = pass_experts(through, old, now, self._named, renamed, self._anchor, self._velocity, states or {})
        except Exception as failure:
            error = failure
        decide(error, f"hand-over after round {self.round - 1}", range(self._sites), commit)
        was, has = experts_in(self._named), experts_in(renamed)
        self._take_names(renamed, now, anchors, velocities)
        self.line = hashlib.sha256(f"{self.line}/residency/{self.round}".encode()).hexdigest()[:16]
        for name, entry in renamed.items():
            if entry.kind == "expert" or name in anchors:
                self._write(name, self._anchor[name])
        return HandOver(tuple(sorted(has - was)), tuple(sorted(was - has)), through.bytes_sent - sent)

    @torch.no_grad()
    def rename(self, named: Mapping[str, Named | tuple], residency_round: int) -> None:
        """Put the residency of another round in force at this site alone: before `load_state_dict`, or before it catches up.

        What was not named before has its weight as anchor, and no momentum. Raises ValueError when a step is in flight or a name does
        not fit.
        """
        if self._flight is not None:
            raise ValueError("rename: a step is in flight; finish() or drop() it first")
        now = Sharing(self._plan, self._sharing.site, self._sharing.all_rows, residency_round)
        renamed = {name: Named(*named[name]) for name in sorted(named)}
        now.check(renamed)
        self._take_names(renamed, now, {}, {})

    def _take_names(
        self, named: Mapping[str, Named], sharing: Sharing, anchors: Mapping[str, Tensor], velocities: Mapping[str, Tensor]
    ) -> None:
        kept, moving = {**self._anchor, **anchors}, {**self._velocity, **velocities}
        self._anchor = {name: kept[name] if name in kept else host_copy(entry.tensor) for name, entry in named.items()}
        if self._momentum:
            self._velocity = {name: moving.get(name, torch.zeros_like(anchor)) for name, anchor in self._anchor.items()}
        self._named, self._sharing = dict(named), sharing
        self._part_of = partition(self._named, self._plan, self._fragments)

    def _land(self, flight: Flight, commit: Commit | None) -> OuterReport:
        flight.settle(self.round, commit)
        with torch.no_grad():
            stepped = [name for _, names in flight.groups for name in names]
            for name in flight.anchors:
                self._take_over(flight, name)
            for name in stepped:
                self._apply(flight, name)
            for name in flight.anchors.keys() - set(stepped):
                self._write(name, self._anchor[name])
        self._adopt(flight)
        history = f"{self.line}/{self.round}/{flight.members}/{flight.fragment}/{flight.token}"
        self.line = hashlib.sha256(history.encode()).hexdigest()[:16]
        self.round += 1
        shared = {name for group, names in flight.groups if len(group) > 1 for name in names}
        return OuterReport(
            round=self.round - 1,
            parameters=sum(self._anchor[name].numel() for name in shared),
            alone=sum(self._anchor[name].numel() for name in stepped if name not in shared),
            orphans=self._sharing.orphans(flight.members),
            **dict(zip(("came", "stayed"), self._came(flight), strict=True)),
        )

    def _prepare(
        self,
        members: Sequence[int] | None,
        weights: Mapping[str, float] | None,
        fragment: int | None,
        current: Sequence[int] | None,
        exchange: Exchange | None,
        *,
        delayed: bool,
        token: str = "",
        steps: bool = True,
    ) -> Flight:
        """A step that has not travelled yet."""
        site = (exchange or self.exchange).site
        if self._flight is not None and (steps or not self._flight.settled or (current is not None and site not in current)):
            raise ValueError("outer step: one is in flight; finish() it first, or drop() it at a site that is behind")
        present = tuple(range(self._sites)) if members is None else tuple(sorted(members))
        if site not in present or len(set(present)) != len(present) or not 0 <= present[0] <= present[-1] < self._sites:
            raise ValueError(f"members={list(present)}: must be different sites of {self._sites} with this one, {site}; correct them")
        newest = present if current is None else tuple(sorted(set(current)))
        if not newest or not set(newest) <= set(present):
            raise ValueError(f"current={list(newest)}: must be some of the members {list(present)}; correct it")
        if fragment is not None and not 0 <= fragment < self._fragments:
            raise ValueError(f"fragment={fragment}: there are {self._fragments}; give a number from 0 to {self._fragments - 1}")
        names = [name for name in self._named if fragment is None or self._part_of[name] == fragment] if steps else []
        return Flight.prepare(
            exchange or self.exchange,
            present,
            newest,
            fragment,
            token,
            groups=self._sharing.groups(self._named, names, present),
            every_group=self._sharing.groups(self._named, self._named, present),
            anchor=self._anchor,
            velocity=self._velocity,
            thetas={name: entry.tensor for name, entry in self._named.items()},
            weights=None if weights is None else {name: weight_of(weights, name) for name in names},
            origin=(self.round, self.line, self.residency_round),
            delayed=delayed,
        )

    def _in_flight(self) -> Flight:
        if self._flight is None:
            raise ValueError("outer step: none is in flight; begin() one first")
        return self._flight

    def _take_over(self, flight: Flight, name: str) -> None:
        self._anchor[name].copy_(flight.anchors[name])
        if self._momentum:
            self._velocity[name].copy_(flight.velocities[name])

    def _adopt(self, flight: Flight) -> None:
        if flight.origin is not None:
            self.round, self.line = flight.origin

    def _came(self, flight: Flight) -> tuple[tuple[str, ...], tuple[str, ...]]:
        groups = self._sharing.groups(self._named, self._named, flight.members) if flight.behind else []
        return tuple(sorted(flight.anchors)), tuple(sorted({name for _, names in groups for name in names} - flight.anchors.keys()))

    def _apply(self, flight: Flight, name: str) -> None:
        """Move the anchor by the sites' mean, or by this site's own way where it is alone, and write it back."""
        tensor, anchor = self._named[name].tensor, self._anchor[name]
        mean, start = flight.means.get(name), flight.starts.get(name)
        if mean is None and self._lr == 1.0 and not self._momentum:
            # theta0 - (theta0 - theta) would round; what nobody averages must not change.
            anchor.copy_(tensor if start is None else start)
            self._write(name, tensor)
            return
        way = anchor - (host_copy(tensor) if start is None else start) if mean is None else mean
        if self._momentum:
            velocity = self._velocity[name].mul_(self._momentum).add_(way)
            way = way + self._momentum * velocity if self._nesterov else velocity
        anchor -= self._lr * way
        # What was learnt since begin() counts from the new anchor, save at a site that was behind.
        progress = None if start is None or name in flight.anchors else host_copy(tensor).sub_(start)
        self._write(name, anchor if progress is None else progress.add_(anchor))

    def _write(self, name: str, value: Tensor) -> None:
        entry = self._named[name]
        for tensor in (entry.tensor, *entry.copies):
            tensor.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Round, anchors, momenta and a settled step in flight: what a resumed run needs to go on as if it had not stopped.

        Raises ValueError while an unsettled step is in flight.
        """
        return {
            "round": self.round,
            "line": self.line,
            "residency_round": self.residency_round,
            "anchor": copies(self._anchor),
            "velocity": copies(self._velocity),
            "flight": None if self._flight is None else self._flight.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`. Raises ValueError when its names, shapes or residency are not this site's."""
        check_state(state, self.residency_round, self._anchor, self._velocity)
        self.round, self.line = int(state["round"]), str(state["line"])
        self._anchor, self._velocity = copies(state["anchor"]), copies(state["velocity"])
        flight = state["flight"]
        self._flight = None if flight is None else Flight.restore(flight, self._sharing, self._named, self._part_of)


__all__ = ["CatchUp", "Commit", "HandOver", "Named", "OuterReport", "OuterStep", "RoundFailed"]
