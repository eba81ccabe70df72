"""Which experts the sites of a run hold, from its configuration. Free of torch."""

from moe.residency import ResidencyPlan
from train.config.schema import Config


def residency_plan(config: Config) -> ResidencyPlan | None:
    """The residency plan of a checked run; None for a run of one site or without experts. Layers are 0-based block numbers.

    Raises ValueError naming the argument that makes no plan.
    """
    federation, moe = config.federation, config.moe
    blocks = moe.blocks(config.model.layers)
    if federation.sites == 1 or not blocks:
        return None
    return ResidencyPlan.build(
        moe.experts,
        federation.sites,
        federation.replication or federation.sites,
        federation.policy,
        config.train.seed,
        blocks,
        federation.rotate_every,
    )


def resident_experts(config: Config, layer: int, round: int = 0) -> tuple[int, ...]:
    """Global numbers of the experts of block `layer` whose weights this run's site has, ascending.

    All of them in an ordinary run, and in mode frozen, where a site has the foreign ones too and does not train them. Without
    `federation.site` (the launcher's view) those of site 0.
    """
    plan = residency_plan(config)
    if plan is None or config.moe.mode == "frozen":
        return tuple(range(config.moe.experts))
    return plan.resident(config.federation.site or 0, layer, round)


def trained_experts(config: Config, layer: int, round: int = 0) -> tuple[int, ...]:
    """Global numbers of the experts of block `layer` that this run's site trains: those it has, in mode frozen only those it holds."""
    plan = residency_plan(config)
    if plan is None:
        return tuple(range(config.moe.experts))
    return plan.resident(config.federation.site or 0, layer, round)
