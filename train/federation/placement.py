"""Which experts this rank's slots stand for, the site's parameters under their names, and how a `rotating` plan changes both.

At a turn the experts of a site change: those that leave make room for those that come, and every slot is named anew, ascending, so
that the order follows from the plan alone. What moves, by our choice: the weights (an expert's anchor, which after an outer step is
its weight), the outer momentum, and Adam's two moments, all from the first old holder, so that a new holder goes on exactly as that
one would have. Experts that stay take along weights and moments to their new slots, other ranks' included. The router's row of an
expert comes with it where rows go to holders, its moments do not; Adam's count of steps is one for all of a site's weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe.outer_names import Named, partition
from moe.outer_rotation import changes
from moe.residency import ResidencyPlan
from train.config.schema import Config
from train.engine.masters import MOMENTS, masters, moments, publish
from train.engine.parallel import Ranks
from train.engine.slots import hold_experts
from train.federation.parameters import SiteParameters

States = dict[tuple[int, int], list[Tensor]]
"""Adam's moments of experts by (block, expert), on the sender: what travels with them."""
PassOn = Callable[[Mapping[str, Named], States], bool]
"""Given a sender's new names and the moments to give and to fill: have the sites exchange, and say whether all agreed."""


class Placement:
    """This rank's part. All methods but `due`, `changes` and `lacking` are collective in the site."""

    def __init__(self, config: Config, plan: ResidencyPlan | None, chunks: list[Any], optimizer: Any, ranks: Ranks) -> None:
        """The model is as built: its slots stand for the experts of round 0."""
        self._config, self._plan, self._chunks, self._optimizer, self._ranks = config, plan, chunks, optimizer, ranks
        self._site = config.federation.site or 0
        self.round = 0
        """Round of the plan whose residency is in force."""
        self.parameters = self._named()
        """The site's parameters, by the names that they have now."""
        self.awaited: list[tuple[int, int]] = []
        """(block, expert) that this site is still to get from others."""

    def due(self, round: int) -> bool:
        """Whether the plan has other holders in `round` than those in force."""
        return self._plan is not None and any(changes(self._plan, self.round, round))

    def changes(self, before: int, after: int) -> list[tuple[int, list[int], list[int]]]:
        """(block, experts that come, experts that go) at this site between two rounds, of blocks where there are some."""
        if self._plan is None:
            return []
        found = []
        for layer in self._plan.layers:
            old, new = (set(self._plan.resident(self._site, layer, round)) for round in (before, after))
            if old != new:
                found.append((layer, sorted(new - old), sorted(old - new)))
        return found

    def lacking(self, round: int, current: Sequence[int]) -> list[tuple[int, int]]:
        """(block, expert) of those that this site is to have in `round`, has no values of, and would not get from the sites `current`."""
        if self._plan is None or self._config.moe.mode == "frozen":
            return []
        coming = self.awaited + [(layer, expert) for layer, come, _ in self.changes(self.round, round) for expert in come]
        return [(layer, expert) for layer, expert in coming if set(current).isdisjoint(self._plan.holders(expert, layer, round))]

    def name(self, round: int) -> Mapping[str, Named]:
        """Have the slots stand for the experts of `round`, whatever is in them; this rank's names."""
        if round != self.round:
            hold_experts(self._config, self._chunks, round)
            self.round = round
            self.parameters = self._named()
        return self.parameters.named

    def turn(self, round: int, pass_on: PassOn) -> bool:
        """Experts change hands: put the residency of `round` in force at all sites, right after an outer step; whether all agreed.

        If not, everything is as it was.
        """
        before, held = self.round, self.parameters
        old = self._pulled()
        named = self.name(round)
        self.parameters.pull()  # dense weights and router rows; experts are written by `pass_on`
        new = self._moments()
        states: States = {}
        for came, went in zip(new, old, strict=True):
            tensors = {key: value for part in (came, went) for key, value in _by_expert(part).items()}
            for key, value in sorted(tensors.items()):
                states.setdefault(key, []).extend(value)
        if not pass_on(named, states):
            hold_experts(self._config, self._chunks, before)
            self.round, self.parameters = before, held
            return False
        _carry(old, new)
        self.parameters.push()
        return True

    def follow(self, round: int) -> Mapping[str, Named]:
        """At a site that was away while experts changed hands: what it has goes to its new slots, and those that it is still to get are 0
        until it catches up, with moments of 0. This rank's names."""
        self.parameters.pull()
        held, old = self.parameters, self._pulled()
        self.awaited += [(layer, expert) for layer, come, _ in self.changes(self.round, round) for expert in come]
        named = self.name(round)
        self.parameters.pull()
        _carry([held, *old], [self.parameters, *self._moments()], clear=True)
        return named

    def _named(self) -> SiteParameters:
        config = self._config
        # In mode frozen every site has every expert: all take them over from those that train them.
        found = SiteParameters(
            masters(self._chunks, self._optimizer),
            lambda: publish(self._chunks, self._optimizer),
            self._ranks,
            experts_at_all=config.moe.mode == "frozen",
        )
        found.divide(partition(found.named, self._plan, config.federation.fragments))
        return found

    def _moments(self) -> list[SiteParameters]:
        return [SiteParameters(moments(self._chunks, self._optimizer, each), lambda: None, self._ranks) for each in MOMENTS]

    def _pulled(self) -> list[SiteParameters]:
        found = self._moments()
        for part in found:
            part.pull()
        return found


def _by_expert(part: SiteParameters) -> States:
    """The tensors of each expert, in the order of their names."""
    found: States = {}
    for name, key in sorted(part.experts.items()):
        found.setdefault(key, []).append(part.named[name].tensor)
    return found


@torch.no_grad()
def _carry(old: Sequence[SiteParameters], new: Sequence[SiteParameters], *, clear: bool = False) -> None:
    """Push into the experts' new slots what they had in the old ones; `clear`: 0 for those that were not here, else as it is in `new`."""
    for before, after in zip(old, new, strict=True):
        for name in after.experts:
            if name in before.named:
                after.named[name].tensor.copy_(before.named[name].tensor)
            elif clear:
                after.named[name].tensor.zero_()
        after.push()
