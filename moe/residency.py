"""Which site holds which experts: a plan that is a pure function of its arguments. Plain Python, no torch.

A plan gives every expert of every layer exactly `replication` holders, and the sites of a layer the same number of experts,
up to one. Policies:

    contiguous  neighbouring experts together: with 8 experts, 4 sites, r = 1, site 0 holds 0 and 1
    strided     experts dealt like cards: site 0 holds 0 and 4
    random      drawn for each layer from the seed
    rotating    drawn again every `rotate_every` rounds, so that every site meets every expert in time

    plan = ResidencyPlan.build(num_experts=8, sites=4, replication=2, policy="strided", seed=0, layers=[1, 3])
    plan.resident(site=0, layer=1)      # (0, 3, 4, 7): the global numbers of its experts, ascending
    plan.holders(expert=0, layer=1)     # (0, 1)
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

POLICIES = ("contiguous", "strided", "random", "rotating")
_VERSION = 1
_MIXING = 10  # random exchanges per held expert; well past what makes holder sets unrelated


@dataclass(frozen=True, kw_only=True)
class ResidencyPlan:
    """Experts by site and layer. Make one with `build`, which checks the arguments."""

    num_experts: int
    """Experts in a layer, E."""
    sites: int
    """Sites, M."""
    replication: int
    """Sites that hold each expert, r."""
    policy: str
    """One of `POLICIES`."""
    seed: int
    """Seed of the policies that draw."""
    layers: tuple[int, ...]
    """Numbers of the layers that have experts, ascending."""
    rotate_every: int | None = None
    """Rounds after which `rotating` draws again; None for the other policies."""

    @staticmethod
    def build(
        num_experts: int,
        sites: int,
        replication: int,
        policy: str,
        seed: int,
        layers: int | Sequence[int],
        rotate_every: int | None = None,
    ) -> "ResidencyPlan":
        """A checked plan. `layers` names the layers that have experts; a number n stands for 0 to n - 1. Raises ValueError."""
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(sorted(layers))
        _check(num_experts, sites, replication, policy, numbers, rotate_every)
        return ResidencyPlan(
            num_experts=num_experts,
            sites=sites,
            replication=replication,
            policy=policy,
            seed=seed,
            layers=numbers,
            rotate_every=rotate_every,
        )

    def resident(self, site: int, layer: int, round: int = 0) -> tuple[int, ...]:
        """Experts that `site` holds in `layer` during `round`, ascending. Raises ValueError outside the plan."""
        self._within("site", site, self.sites)
        return self._assignment(layer, round)[site]

    def holders(self, expert: int, layer: int, round: int = 0) -> tuple[int, ...]:
        """Sites that hold `expert` of `layer` during `round`, ascending. Raises ValueError outside the plan."""
        self._within("expert", expert, self.num_experts)
        return tuple(site for site, experts in enumerate(self._assignment(layer, round)) if expert in experts)

    def moves(self, round: int) -> list[tuple[int, int, int]]:
        """(layer, expert, site) of every expert that `site` holds in `round` and did not hold in the round before."""
        if round < 1 or self._epoch(round) == self._epoch(round - 1):
            return []
        return [
            (layer, expert, site)
            for layer in self.layers
            for site in range(self.sites)
            for expert in self.resident(site, layer, round)
            if expert not in self.resident(site, layer, round - 1)
        ]

    @property
    def fraction(self) -> float:
        """Share of the experts that a site holds, r / M."""
        return self.replication / self.sites

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: the arguments, and round 0 written out for readers and as a check of them."""
        return {
            "version": _VERSION,
            **asdict(self),
            "layers": list(self.layers),
            "resident": {str(layer): [list(experts) for experts in self._assignment(layer, 0)] for layer in self.layers},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "ResidencyPlan":
        """The plan of `to_dict`. Raises ValueError on another version, other keys, or residents that the arguments do not give."""
        fields = {key: value for key, value in data.items() if key not in ("version", "resident")}
        if data.get("version") != _VERSION:
            raise ValueError(f"residency plan version={data.get('version')}: this program reads {_VERSION}; use the one that wrote it")
        wanted = set(ResidencyPlan.__dataclass_fields__)
        if set(fields) != wanted or "resident" not in data:
            odd = sorted(set(fields) ^ wanted | ({"resident"} - set(data)))
            raise ValueError(f"residency plan: keys {', '.join(odd)} are missing or unknown; use the plan as it was saved")
        plan = ResidencyPlan.build(**fields)
        if plan.to_dict()["resident"] != data["resident"]:
            raise ValueError("residency plan: its residents are not what its arguments give; use the plan as it was saved")
        return plan

    def describe(self) -> str:
        """The residents of each layer in round 0, one line a layer (equal layers together)."""
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for layer in self.layers:
            groups.setdefault(self._assignment(layer, 0), []).append(layer)
        return "\n".join(
            f"layers {', '.join(map(str, layers))}: "
            + "; ".join(f"site {site} holds {', '.join(map(str, experts))}" for site, experts in enumerate(sites))
            for sites, layers in groups.items()
        )

    def _epoch(self, round: int) -> int:
        if round < 0:
            raise ValueError(f"round={round}: rounds start at 0; give the number of outer steps done")
        return round // self.rotate_every if self.rotate_every else 0

    def _assignment(self, layer: int, round: int) -> tuple[tuple[int, ...], ...]:
        if layer not in self.layers:
            raise ValueError(f"layer={layer}: has no experts in this plan; its layers are {', '.join(map(str, self.layers))}")
        return _assign(self, layer, self._epoch(round))

    @staticmethod
    def _within(key: str, value: int, end: int) -> None:
        if not 0 <= value < end:
            raise ValueError(f"{key}={value}: the plan has {end}; give a number from 0 to {end - 1}")


def _check(experts: int, sites: int, replication: int, policy: str, layers: tuple[int, ...], rotate_every: int | None) -> None:
    if experts < 1:
        raise ValueError(f"num_experts={experts}: a layer needs at least one expert; give 1 or more")
    if sites < 1:
        raise ValueError(f"sites={sites}: somebody must train; give 1 or more")
    if not 1 <= replication <= sites:
        raise ValueError(f"replication={replication}: each expert needs 1 to sites={sites} different holders; give a number between")
    if replication * experts < sites:
        raise ValueError(
            f"replication={replication}: {replication} x {experts} experts leave some of {sites} sites without one; "
            "raise replication or use fewer sites"
        )
    if policy not in POLICIES:
        raise ValueError(f"policy={policy}: must be one of {', '.join(POLICIES)}; choose one")
    if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
        raise ValueError(f"layers={list(layers)}: must name at least one layer, each once, from 0 on; correct the list")
    if policy != "rotating" and rotate_every is not None:
        raise ValueError(f"rotate_every={rotate_every}: has no effect with policy={policy}; leave it out or use policy=rotating")
    if policy == "rotating" and (rotate_every is None or rotate_every < 1):
        raise ValueError(f"rotate_every={rotate_every}: policy=rotating needs a number of rounds; give 1 or more")
    if policy == "rotating" and replication == sites:
        raise ValueError(f"policy=rotating: with replication = sites = {sites} every site holds all experts; use policy=contiguous")


@lru_cache(maxsize=4096)
def _assign(plan: ResidencyPlan, layer: int, epoch: int) -> tuple[tuple[int, ...], ...]:
    held = _contiguous(plan) if plan.policy == "contiguous" else _strided(plan)
    if plan.policy in ("random", "rotating"):
        held = _mixed(held, _Draws(f"residency:{plan.seed}:{layer}:{epoch}"))
    return tuple(tuple(sorted(experts)) for experts in held)


def _contiguous(plan: ResidencyPlan) -> list[set[int]]:
    # r copies of 0..E-1 in a row, cut into M runs. A run is at most E long, so no expert comes twice in it.
    slots = plan.replication * plan.num_experts
    cuts = [site * slots // plan.sites for site in range(plan.sites + 1)]
    return [{slot % plan.num_experts for slot in range(cuts[site], cuts[site + 1])} for site in range(plan.sites)]


def _strided(plan: ResidencyPlan) -> list[set[int]]:
    # Copy c of expert e goes to site c E + e mod M. After M / gcd(E, M) copies that would come back to the same sites: the
    # deal has then gone round evenly, and goes on one site further.
    experts, sites = plan.num_experts, plan.sites
    held: list[set[int]] = [set() for _ in range(sites)]
    for copy in range(plan.replication):
        shift = copy * math.gcd(experts, sites) // sites
        for expert in range(experts):
            held[(copy * experts + expert + shift) % sites].add(expert)
    return held


def _mixed(held: list[set[int]], draws: "_Draws") -> list[set[int]]:
    # Random exchanges between two sites keep every site's count and every expert's.
    total = sum(len(experts) for experts in held)
    for _ in range(_MIXING * total):
        one, other = draws.below(len(held)), draws.below(len(held))
        give, take = draws.pick(held[one]), draws.pick(held[other])
        if give not in held[other] and take not in held[one]:
            held[one] ^= {give, take}
            held[other] ^= {give, take}
    return held


class _Draws:
    """Random numbers from a hash in counter mode: the same on every version and platform, which `random` does not promise."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._count = 0

    def below(self, end: int) -> int:
        """A number from 0 to end - 1."""
        digest = hashlib.sha256(f"{self._key}:{self._count}".encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:8], "little") % end

    def pick(self, values: set[int]) -> int:
        """One of `values`."""
        return sorted(values)[self.below(len(values))]
