"""Which experts a model's slots stand for: what a `rotating` plan changes, without touching what is in them."""

from typing import Any

from train.config.schema import Config
from train.engine.checkpoint import unwrap
from train.federation.residency import resident_experts, trained_experts


def hold_experts(config: Config, chunks: list[Any], round: int) -> None:
    """Name the experts in the slots of every layer on this rank by the residency of `round`, ascending, and freeze by it in mode frozen.

    Routers, experts and what a checkpoint calls them follow. The order is a function of the plan alone, so that a resumed run adds
    up in the same order as one that did not stop.
    """
    blocks = set(config.moe.blocks(config.model.layers))
    for chunk in chunks:
        for layer in unwrap(chunk).decoder.layers:
            number = layer.layer_number - 1
            if number in blocks:
                layer.mlp.hold(resident_experts(config, number, round), trained_experts(config, number, round))
