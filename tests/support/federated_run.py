"""Whole runs of several sites inside one pool of ranks: each site a world of its own, with real meetings and a real exchange."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_run import Outcome, run, run_config
from sub_worlds import Sites, sub_worlds

FEDERATED: dict[str, Any] = {
    "model.layers": 2,
    "moe.experts": 4,
    "moe.top_k": 2,
    "moe.layers": [1],
    "moe.ffn_width": 48,
    "moe.aux_coef": 0.02,
    "train.micro_batch": 1,
    "train.steps": 8,
    "train.seq_len": 48,
    "checkpoint.keep": 9,
    "federation.sync_every": 2,
    "optim.schedule": "cosine",
    "run.name": "r",
}
"""Two blocks, the second of four experts; a global batch of four rows and an outer step every second step."""
PARTIAL: dict[str, Any] = {"moe.mode": "skip", "federation.replication": 1, "federation.policy": "strided"}
"""Each expert at one site."""


def at_site(
    corpus: str, place: str, changes: dict[str, Any], endpoint: str, sites: int, resumed: bool = False, here: Sites | None = None
) -> Outcome:
    """A run of `sites` sites in this pool, on one rank of it; the directories are `<place>/<site>`."""
    if here is None:
        with sub_worlds(sites) as here:
            return at_site(corpus, place, changes, endpoint, sites, resumed, here)
    own = {"federation.sites": sites, "federation.site": here.site, "federation.endpoint": endpoint}
    return run(run_config(corpus, {**FEDERATED, **own, **changes}), f"{place}/{here.site}", resumed)


class PlainDiloco:
    """In the place of a `Federation`: the outer step written down directly, every tensor of every site, Nesterov on top."""

    def __init__(self, trainer: Any, here: Sites, lr: float, momentum: float) -> None:
        from train.engine.masters import masters, publish
        from train.federation.parameters import SiteParameters

        held = masters(trainer.chunks, trainer.optimizer)
        self._parameters = SiteParameters(held, lambda: publish(trainer.chunks, trainer.optimizer), trainer.ranks)
        self._here, self._lr, self._momentum, self._every = here, lr, momentum, trainer.config.federation.sync_every
        self._parameters.pull()
        self._anchor = {name: entry.tensor.clone() for name, entry in self._parameters.named.items()}
        self._velocity = {name: torch.zeros_like(anchor) for name, anchor in self._anchor.items()}

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def after_step(self, *_: Any) -> None:
        self._parameters.pull()
        for name, entry in sorted(self._parameters.named.items()):
            anchor, velocity = self._anchor[name], self._velocity[name]
            way = anchor - entry.tensor
            ways = [torch.empty_like(way) for _ in range(self._here.count)]
            dist.all_gather(ways, way, group=self._here.across)
            mean = sum(ways[1:], start=ways[0]) / len(ways)
            velocity.mul_(self._momentum).add_(mean)
            anchor -= self._lr * (mean + self._momentum * velocity)
            entry.tensor.copy_(anchor)
        self._parameters.push()

    def start(self, _: Any) -> None:
        return None

    def join(self, _: Any) -> None:
        return None

    def count(self, _: int) -> None:
        return None

    def figures(self) -> dict[str, Any]:
        return {}

    keeper, wants_save = None, False

    def save(self, _: Any) -> dict[str, Any]:
        return {}

    def leave(self) -> None:
        return None


def instead_of_federation(make: Callable[[Any], Any], run_it: Callable[[], Outcome]) -> Outcome:
    """`run_it()` with `make(trainer)` in the place of the trainer's federation."""
    from train import loop

    original = loop.Trainer._federation
    loop.Trainer._federation = lambda self, _: make(self)  # type: ignore[assignment, method-assign]
    try:
        return run_it()
    finally:
        loop.Trainer._federation = original  # type: ignore[method-assign]


def plain_diloco(corpus: str, place: str, changes: dict[str, Any], sites: int) -> Outcome:
    """The same run by `PlainDiloco`."""
    with sub_worlds(sites) as here:
        lr, momentum = 0.7, 0.9
        return instead_of_federation(
            lambda trainer: PlainDiloco(trainer, here, lr, momentum), lambda: at_site(corpus, place, changes, "none:1", sites, here=here)
        )


def one_site_federation(corpus: str, place: str, changes: dict[str, Any], endpoint: str, resumed: bool = False) -> Outcome:
    """A run of one site that meets nobody and takes its outer steps alone."""
    from moe.residency import ResidencyPlan
    from train.federation import run as module

    def make(trainer: Any) -> Any:
        federation = dataclasses.replace(trainer.config.federation, site=0, endpoint=endpoint)
        config, moe = dataclasses.replace(trainer.config, federation=federation), trainer.config.moe
        plan = ResidencyPlan.build(moe.experts, 1, 1, "contiguous", 0, moe.blocks(config.model.layers))
        original, module.residency_plan = module.residency_plan, lambda _: plan  # type: ignore[assignment]
        try:
            return module.Federation(
                config, trainer.checkpoints.directory, trainer.ranks, trainer.chunks, trainer.optimizer, trainer.clock.watchdog
            )
        finally:
            module.residency_plan = original  # type: ignore[assignment]

    return instead_of_federation(make, lambda: run(run_config(corpus, {**FEDERATED, **changes}), place, resumed))
