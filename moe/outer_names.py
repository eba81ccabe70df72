"""What an outer step exchanges: named parameters, who shares each, and their partition into fragments."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from .residency import ResidencyPlan

Kind = Literal["dense", "expert", "router_row"]


class Named(NamedTuple):
    """A parameter that sites exchange. A plain tuple of the first four fields will do."""

    tensor: Tensor
    """What the inner optimiser steps from: the fp32 master where there is one. A view into a stacked weight is fine."""
    kind: Kind
    layer: int | None = None
    """Layer of an expert or a router row; of a dense parameter where it belongs to one (fragments go by it)."""
    expert: int | None = None
    """Global number of the expert, or of the row's expert."""
    copies: Sequence[Tensor] = ()
    """Further tensors of the same shape that must follow, such as the bf16 weight of a master."""


class Sharing:
    """Who shares what at one site: classes of names by the residency that is in force."""

    def __init__(self, plan: ResidencyPlan | None, site: int, all_rows: bool, round: int) -> None:
        self.plan = plan
        self.site = site
        self.all_rows = all_rows
        self.round = round
        """Round of the plan whose residency is in force."""

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Sites that hold the expert now."""
        assert self.plan is not None
        return self.plan.holders(expert, layer, self.round)

    def here(self, entry: Named) -> bool:
        """Whether this site has the parameter: all but experts of others."""
        if entry.kind != "expert":
            return True
        assert entry.layer is not None and entry.expert is not None
        return self.site in self.holders(entry.layer, entry.expert)

    def groups(self, named: Mapping[str, Named], names: Iterable[str], present: Sequence[int]) -> list[tuple[tuple[int, ...], list[str]]]:
        """(sites, names they share) in the order in which every site goes through them: none waits for one that waits for it.

        The router row of an expert that is elsewhere is in no group unless all sites share it: it is the site's own.
        """
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(names):
            entry = named[name]
            sites = tuple(present)
            if entry.kind == "expert" or (entry.kind == "router_row" and not self.all_rows):
                assert entry.layer is not None and entry.expert is not None
                holders = self.holders(entry.layer, entry.expert)
                if self.site not in holders:
                    continue
                sites = tuple(site for site in present if site in holders)
            groups.setdefault(sites, []).append(name)
        return sorted(groups.items())

    def orphans(self, present: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(layer, expert) without a holder among `present`."""
        if self.plan is None:
            return ()
        return tuple(
            (layer, expert)
            for layer in self.plan.layers
            for expert in range(self.plan.num_experts)
            if set(present).isdisjoint(self.holders(layer, expert))
        )

    def check(self, named: Mapping[str, Named]) -> None:
        """Raise ValueError for a name that this site cannot exchange."""
        for name, entry in named.items():
            self._check_entry(name, entry)

    def _check_entry(self, name: str, entry: Named) -> None:
        if entry.kind not in ("dense", "expert", "router_row"):
            raise ValueError(f"{name}: kind={entry.kind} must be dense, expert or router_row; choose one")
        if not entry.tensor.is_floating_point():
            raise ValueError(f"{name}: {entry.tensor.dtype} cannot be averaged; leave it out")
        if any(copy.shape != entry.tensor.shape for copy in entry.copies):
            raise ValueError(f"{name}: a copy must have the shape {tuple(entry.tensor.shape)}; name the copy of this parameter")
        fits = entry.expert is None if entry.kind == "dense" else None not in (entry.layer, entry.expert)
        if not fits:
            rule = "a dense parameter has no expert, the others have layer and expert"
            raise ValueError(f"{name}: layer={entry.layer}, expert={entry.expert} do not fit kind={entry.kind}; {rule}")
        if entry.kind == "dense":
            return
        if self.plan is None:
            raise ValueError(f"{name}: kind={entry.kind} needs a residency plan; give one, or name it dense")
        assert entry.layer is not None and entry.expert is not None
        holders = self.holders(entry.layer, entry.expert)
        if entry.kind == "expert" and self.site not in holders:
            where = f"expert {entry.expert} of layer {entry.layer} is at sites {list(holders)}, not at {self.site}"
            raise ValueError(f"{name}: {where}; leave it out")


def partition(named: Mapping[str, Named], plan: ResidencyPlan | None, parts: int) -> dict[str, int]:
    """The part, 0 to parts - 1, of each name: whole layers, and each name without a layer by itself, in parts of similar size.

    The largest goes to the part that is lightest so far. All sites get the same parts though they hold different experts: an
    expert counts as large as any other of its layer, times the mean number that a site holds.
    """
    units: dict[tuple[int, str], list[str]] = {}
    for name, entry in sorted(named.items()):
        units.setdefault((-1, name) if entry.layer is None else (entry.layer, ""), []).append(name)
    sizes = {unit: _size(named, names, plan) for unit, names in units.items()}
    loads = [0] * parts
    part_of: dict[str, int] = {}
    for unit in sorted(units, key=lambda unit: (-sizes[unit], unit)):
        part = loads.index(min(loads))
        loads[part] += sizes[unit]
        part_of.update(dict.fromkeys(units[unit], part))
    return part_of


def _size(named: Mapping[str, Named], names: Sequence[str], plan: ResidencyPlan | None) -> int:
    """Size of a unit times the number of sites, so that it is a whole number."""
    entries = [named[name] for name in names]
    held = sorted({entry.expert for entry in entries if entry.kind == "expert" and entry.expert is not None})
    common = sum(entry.tensor.numel() for entry in entries if entry.kind != "expert")
    if plan is None or not held:
        return common * (plan.sites if plan is not None else 1)
    one = sum(entry.tensor.numel() for entry in entries if entry.kind == "expert" and entry.expert == held[0])
    return common * plan.sites + one * plan.num_experts * plan.replication
