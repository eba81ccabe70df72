"""Watching the routers: how even their load is, whether the sites choose alike, and how far they have moved apart. Plain torch.

Every figure of two or more sites comes out of sums over the sites, so that an `Exchange` is all it takes and no site sees another's
choices. With C[t, e] the number of sites that send token t to expert e, the pairs of sites that agree are C (C - 1) / 2; with W' the
mean of the sites' router weights, each site needs no more than that to say how far it is from it.

Dims: T tokens of the probe batch, E experts, k experts a token, H width, M sites.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import Exchange


def load_entropy(load: Tensor) -> float:
    """Entropy of `load` (E,), assignments by expert, over that of an even one: 1 when all are used alike, 0 when one has everything."""
    if load.numel() == 1:
        return 1.0
    shares = load.double() / load.sum()
    return float(-torch.xlogy(shares, shares).sum()) / math.log(load.numel())


def agreement(counts: Tensor, sites: int) -> float:
    """Share of a token's experts that two sites have in common, mean over tokens and pairs of sites; NaN for one site.

    `counts` (T, E): how many of the `sites` choose the expert. Every site chooses the same number of experts for each token.
    """
    if sites < 2 or not counts.numel():
        return math.nan
    pairs = (counts.double() * (counts.double() - 1)).sum() / 2
    return float(pairs / (counts.double().sum() / sites * sites * (sites - 1) / 2))


@dataclass(frozen=True)
class Snapshot:
    """What a site's routers choose on the probe batch, and their weights, by layer; on the host."""

    chosen: Mapping[int, Tensor]
    """(T, E) bool: the experts of each token, before any is skipped."""
    weights: Mapping[int, Tensor]
    """(E, H) fp32: the router's rows."""


@dataclass(frozen=True)
class RouterFigures:
    """Figures of one outer step by layer, the same at every site that took part."""

    agreement_before: dict[int, float]
    """`agreement` of the sites as they came to the outer step."""
    agreement_after: dict[int, float]
    """The same after it, on the same tokens."""
    drift: dict[int, float]
    """How far the sites' routers were apart before it: root mean square over the sites of the distance to their mean, over the
    norm of the mean."""


def compare(exchange: Exchange, group: Sequence[int], before: Snapshot, after: Snapshot) -> RouterFigures:
    """Figures of the sites of `group`, all of which call with snapshots of the same layers and sizes.

    Two sums travel: T E numbers twice and E H once a layer, then one number a layer. Raises ValueError on snapshots that do not match.
    """
    layers = sorted(before.chosen)
    if sorted(after.chosen) != layers or sorted(before.weights) != layers:
        raise ValueError(f"snapshots of layers {layers} and {sorted(after.chosen)}: must be of the same layers; take both of one model")
    members, sites = tuple(group), len(group)
    counts = [snapshot.chosen[layer].float().contiguous() for layer in layers for snapshot in (before, after)]
    means = [before.weights[layer].float().clone() for layer in layers]
    exchange.sum(members, [*counts, *means], exact=True)
    away = torch.empty(len(layers))
    for index, layer in enumerate(layers):
        means[index] /= sites
        away[index] = (before.weights[layer].double() - means[index].double()).square().sum()
    exchange.sum(members, [away], exact=True)
    drift = {}
    for layer, mean, distance in zip(layers, means, away.tolist(), strict=True):
        drift[layer] = math.sqrt(distance / sites) / max(float(mean.double().norm()), torch.finfo(torch.float32).tiny)
    return RouterFigures(
        agreement_before={layer: agreement(counts[2 * index], sites) for index, layer in enumerate(layers)},
        agreement_after={layer: agreement(counts[2 * index + 1], sites) for index, layer in enumerate(layers)},
        drift=drift,
    )


def probe_tokens(tokens: int, most: int) -> Tensor:
    """Places (n,) of at most `most` of `tokens` tokens, evenly spread."""
    return torch.arange(tokens) if tokens <= most else torch.arange(most) * tokens // most
