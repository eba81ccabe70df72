"""Experts of a `rotating` plan that change hands: who gives which anchor, momentum and inner state to whom."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .exchange import Exchange
from .outer_names import Named, Sharing
from .residency import ResidencyPlan


def changes(plan: ResidencyPlan, before: int, after: int) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """(layer, expert, giver, takers) of each expert that some site holds in round `after` and did not in round `before`."""
    for layer in plan.layers:
        for expert in range(plan.num_experts):
            old, new = plan.holders(expert, layer, before), plan.holders(expert, layer, after)
            takers = tuple(site for site in new if site not in old)
            if takers:
                yield layer, expert, old[0], takers


def names_of(named: Mapping[str, Named], layer: int, expert: int, rows: bool) -> list[str]:
    """Names of an expert, ascending, and with `rows` that of its router row."""
    kinds = ("expert", "router_row") if rows else ("expert",)
    return sorted(name for name, entry in named.items() if entry.kind in kinds and (entry.layer, entry.expert) == (layer, expert))


def experts_in(named: Mapping[str, Named]) -> set[tuple[int, int]]:
    """(layer, expert) of the experts named."""
    return {(entry.layer, entry.expert) for entry in named.values() if entry.kind == "expert"}  # type: ignore[misc]


def check_renamed(old: Mapping[str, Named], new: Mapping[str, Named], before: Sharing, after: Sharing) -> None:
    """Raise ValueError when `new` does not fit the residency `after`, or names what stays at this site otherwise than `old`."""
    after.check(new)
    stays = {name for name, entry in old.items() if after.here(entry)} ^ {name for name, entry in new.items() if before.here(entry)}
    if stays:
        raise ValueError(f"hand over: {', '.join(sorted(stays))} is missing or new; what stays here must be named as before")


def pass_experts(
    exchange: Exchange,
    before: Sharing,
    after: Sharing,
    old: Mapping[str, Named],
    new: Mapping[str, Named],
    anchor: Mapping[str, Tensor],
    velocity: Mapping[str, Tensor],
    states: Mapping[tuple[int, int], Sequence[Tensor]],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Anchors and momenta of the names that come to this site; `states` of arriving experts, by (layer, expert), are overwritten.

    Every site goes through the experts in the same order.
    """
    assert before.plan is not None
    anchors: dict[str, Tensor] = {}
    velocities: dict[str, Tensor] = {}
    for layer, expert, giver, takers in changes(before.plan, before.round, after.round):
        if exchange.site not in (giver, *takers):
            continue
        taking = exchange.site in takers
        names = names_of(new if taking else old, layer, expert, rows=not before.all_rows)
        shapes = {name: (new if taking else old)[name].tensor.shape for name in names}
        passed = [torch.empty(shapes[name]) if taking else anchor[name] for name in names]
        momenta = [torch.empty(shapes[name]) if taking else velocity[name] for name in names if velocity]
        exchange.copy(giver, tuple(sorted((giver, *takers))), [*passed, *momenta, *states.get((layer, expert), ())])
        if taking:
            anchors.update(zip(names, passed, strict=True))
            velocities.update(zip(names, momenta, strict=True) if velocity else ())
    return anchors, velocities
