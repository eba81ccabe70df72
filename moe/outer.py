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
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .exchange import Exchange
from .residency import ResidencyPlan

Kind = Literal["dense", "expert", "router_row"]


class Named(NamedTuple):
    """A parameter that sites exchange. A plain tuple of the first four fields will do."""

    tensor: Tensor
    """What the inner optimiser steps from: the fp32 master where there is one. A view into a stacked weight is fine."""
    kind: Kind
    layer: int | None = None
    """Layer of an expert or a router row."""
    expert: int | None = None
    """Global number of the expert, or of the row's expert."""
    copies: Sequence[Tensor] = ()
    """Further tensors of the same shape that must follow, such as the bf16 weight of a master."""


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


class OuterStep:
    """Anchor, momentum and the exchange of one site (one tensor- and pipeline-parallel coordinate of it).

    All sites must name the same dense parameters, and every holder of an expert the same ones of it; names decide who meets whom.
    """

    def __init__(
        self,
        named: Mapping[str, Named | tuple],
        plan: ResidencyPlan,
        exchange: Exchange,
        lr: float,
        momentum: float,
        nesterov: bool = True,
        *,
        router_rows: Literal["holders", "all"] = "holders",
    ) -> None:
        """Take the present weights as the anchor. Raises ValueError on arguments without sense or effect, and on names off the plan."""
        self._plan = plan
        self._exchange = exchange
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._all_rows = router_rows == "all"
        self._named = {name: Named(*named[name]) for name in sorted(named)}
        self.round = 0
        self._check(router_rows)
        self._anchor = {name: _host(entry.tensor) for name, entry in self._named.items()}
        self._velocity = {name: torch.zeros_like(anchor) for name, anchor in self._anchor.items()} if momentum else {}

    @torch.no_grad()
    def step(self, members: Sequence[int] | None = None, weights: Mapping[str, float] | None = None) -> OuterReport:
        """End a round: exchange, move the anchor, write it back.

        `members` are the sites that take part, all by default; every member must give the same. `weights` gives this site's weight
        of each parameter by name, such as the tokens it saw; without it sites count alike. Raises ValueError on members without
        this site, on a name without a weight, and on negative weights.
        """
        present = tuple(range(self._plan.sites)) if members is None else tuple(sorted(members))
        if self._exchange.site not in present or len(set(present)) != len(present) or not 0 <= present[0] <= present[-1] < self._plan.sites:
            raise ValueError(
                f"members={list(present)}: must be different sites of {self._plan.sites} with this one, {self._exchange.site}; correct them"
            )
        counted = None if weights is None else {name: _weight(weights, name) for name in self._named}
        means: dict[str, Tensor | None] = {}
        exchanged = 0
        # Every member goes through its groups in the same order, so none waits for one that waits for it.
        for group, names in sorted(self._groups(present).items()):
            if len(group) == 1:
                means.update(dict.fromkeys(names))
            else:
                means.update(self._mean(group, names, counted))
                exchanged += sum(self._anchor[name].numel() for name in names)
        # Only now, so that a round that fails on the way leaves anchor, momentum and weights as they were.
        for name, mean in means.items():
            self._apply(name, mean)
        alone = sum(self._anchor[name].numel() for name, mean in means.items() if mean is None)
        self.round += 1
        return OuterReport(self.round - 1, exchanged, alone, self._orphans(present))

    def _groups(self, present: tuple[int, ...]) -> dict[tuple[int, ...], list[str]]:
        """Names by the sites that share them, in order of name."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, entry in self._named.items():
            sites: Iterable[int] = present
            if entry.kind == "expert" or (entry.kind == "router_row" and not self._all_rows):
                assert entry.layer is not None and entry.expert is not None
                holders = self._plan.holders(entry.expert, entry.layer)
                if self._exchange.site not in holders:
                    continue  # the row of an expert that is elsewhere: it is the site's own, and trains on
                sites = (site for site in present if site in holders)
            groups.setdefault(tuple(sites), []).append(name)
        return groups

    def _mean(self, group: tuple[int, ...], names: list[str], weights: Mapping[str, float] | None) -> dict[str, Tensor | None]:
        """How far the sites of `group` moved on average, by name."""
        deltas = [self._anchor[name] - _host(self._named[name].tensor) for name in names]
        totals = torch.full((len(names),), float(len(group)))
        if weights is not None:
            totals = torch.tensor([weights[name] for name in names], dtype=torch.float32)
            for delta, weight in zip(deltas, totals.tolist(), strict=True):
                delta *= weight
            self._exchange.sum(group, [totals], exact=True)
        self._exchange.sum(group, deltas)
        return {
            # Without weight nobody saw a token of it, so nobody has anything to say about it.
            name: delta / total if total > 0 else torch.zeros_like(delta)
            for name, delta, total in zip(names, deltas, totals.tolist(), strict=True)
        }

    def _apply(self, name: str, mean: Tensor | None) -> None:
        """Move the anchor by the sites' mean, or by this site's own way where it is alone, and write it back."""
        entry, anchor = self._named[name], self._anchor[name]
        if mean is None and self._lr == 1.0 and not self._momentum:
            # theta0 - (theta0 - theta) would round; what nobody averages must not change.
            anchor.copy_(entry.tensor)
        else:
            step = anchor - _host(entry.tensor) if mean is None else mean
            if self._momentum:
                velocity = self._velocity[name].mul_(self._momentum).add_(step)
                step = step + self._momentum * velocity if self._nesterov else velocity
            anchor -= self._lr * step
        for tensor in (entry.tensor, *entry.copies):
            tensor.copy_(anchor)

    def _orphans(self, present: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        members = set(present)
        return tuple(
            (layer, expert)
            for layer in self._plan.layers
            for expert in range(self._plan.num_experts)
            if members.isdisjoint(self._plan.holders(expert, layer))
        )

    def state_dict(self) -> dict[str, Any]:
        """Round, anchors and momenta by name: what a resumed run needs to end its round as if it had not stopped."""
        return {"round": self.round, "anchor": _copy(self._anchor), "velocity": _copy(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`. Raises ValueError when its names or shapes are not this site's."""
        for part, mine in (("anchor", self._anchor), ("velocity", self._velocity)):
            saved = state[part]
            if saved.keys() != mine.keys():
                odd = sorted(saved.keys() ^ mine.keys())
                raise ValueError(
                    f"outer state: {part} of {', '.join(odd)} is missing or unknown; resume with the run's own plan and optimiser"
                )
            for name, tensor in saved.items():
                if tensor.shape != mine[name].shape:
                    raise ValueError(
                        f"outer state: {name} is {tuple(tensor.shape)}, here {tuple(mine[name].shape)}; resume with the run's own model"
                    )
        self.round = int(state["round"])
        self._anchor, self._velocity = _copy(state["anchor"]), _copy(state["velocity"])

    def _check(self, router_rows: str) -> None:
        if self._lr <= 0:
            raise ValueError(f"lr={self._lr}: the outer step must move; give more than 0")
        if not 0 <= self._momentum < 1:
            raise ValueError(f"momentum={self._momentum}: must be from 0 to below 1; choose one")
        if router_rows not in ("holders", "all"):
            raise ValueError(f"router_rows={router_rows}: must be holders or all; choose one")
        if self._plan.policy == "rotating":
            raise ValueError("policy=rotating: experts that change hands are not handed over here; use another policy")
        site = self._exchange.site
        if not 0 <= site < self._plan.sites:
            raise ValueError(f"site={site}: the plan has {self._plan.sites}; use a plan for all sites")
        for name, entry in self._named.items():
            self._check_entry(name, entry, site)

    def _check_entry(self, name: str, entry: Named, site: int) -> None:
        if entry.kind not in ("dense", "expert", "router_row"):
            raise ValueError(f"{name}: kind={entry.kind} must be dense, expert or router_row; choose one")
        if not entry.tensor.is_floating_point():
            raise ValueError(f"{name}: {entry.tensor.dtype} cannot be averaged; leave it out")
        if any(copy.shape != entry.tensor.shape for copy in entry.copies):
            raise ValueError(f"{name}: a copy must have the shape {tuple(entry.tensor.shape)}; name the copy of this parameter")
        if (entry.kind == "dense") != (entry.layer is None) or (entry.layer is None) != (entry.expert is None):
            raise ValueError(
                f"{name}: layer={entry.layer}, expert={entry.expert} do not fit kind={entry.kind}; give both, or none if dense"
            )
        if entry.layer is None or entry.expert is None:
            return
        holders = self._plan.holders(entry.expert, entry.layer)
        if entry.kind == "expert" and site not in holders:
            where = f"expert {entry.expert} of layer {entry.layer} is at sites {list(holders)}, not at {site}"
            raise ValueError(f"{name}: {where}; leave it out")


def _host(tensor: Tensor) -> Tensor:
    """An fp32 copy on the host."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _weight(weights: Mapping[str, float], name: str) -> float:
    if name not in weights:
        raise ValueError(f"weights: none for {name}; give one for every parameter or no weights at all")
    if weights[name] < 0:
        raise ValueError(f"weights: {weights[name]} for {name}; a weight is 0 or more")
    return weights[name]
