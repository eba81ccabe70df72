"""The router's figures against pairwise loops over the sites, and at the ends of their scales."""

import itertools
import math
import re

import pytest
import torch
from sites import at_sites, noise
from torch import Tensor

from moe.exchange import Exchange
from moe.monitor import RouterFigures, Snapshot, agreement, compare, load_entropy, probe_tokens

TOKENS, EXPERTS, TOP_K, WIDTH = 13, 5, 2, 7


def choices(seed: int, layer: int) -> Tensor:
    """(T, E) bool with TOP_K set in each row."""
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    return chosen.scatter_(1, noise(TOKENS, EXPERTS, seed=100 * layer + seed).topk(TOP_K).indices, True)


def snapshot(site: int, moved: float) -> Snapshot:
    layers = (1, 4)
    weights = {layer: noise(EXPERTS, WIDTH, seed=layer) + moved * noise(EXPERTS, WIDTH, seed=50 + 10 * layer + site) for layer in layers}
    return Snapshot({layer: choices(site, layer) for layer in layers}, weights)


def pairwise(chosen: list[Tensor]) -> float:
    """The definition, token by token and pair by pair, on sets."""
    shares = []
    for one, other in itertools.combinations(chosen, 2):
        for mine, theirs in zip(one, other, strict=True):
            common = set(mine.nonzero().flatten().tolist()) & set(theirs.nonzero().flatten().tolist())
            shares.append(len(common) / TOP_K)
    return sum(shares) / len(shares)


def test_entropy_of_even_uneven_and_single_loads() -> None:
    assert load_entropy(torch.tensor([5, 5, 5, 5])) == pytest.approx(1.0)
    assert load_entropy(torch.tensor([9, 0, 0])) == 0.0 and load_entropy(torch.tensor([7])) == 1.0
    by_hand = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert load_entropy(torch.tensor([3, 1])) == pytest.approx(by_hand)


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_agreement_is_the_mean_over_pairs_of_sites(sites: int) -> None:
    chosen = [choices(site, 0) for site in range(sites)]
    assert agreement(torch.stack(chosen).sum(0), sites) == pytest.approx(pairwise(chosen))
    assert agreement(sites * choices(0, 0).float(), sites) == 1.0
    apart = torch.zeros(TOKENS, 2 * sites)
    assert agreement(apart + 1, sites) == 0.0
    assert math.isnan(agreement(chosen[0], 1))


@pytest.mark.parametrize("sites", [2, 3])
def test_every_site_gets_the_figures_of_a_loop_over_pairs(sites: int) -> None:
    before, after = [snapshot(site, 0.1) for site in range(sites)], [snapshot(0, 0.0)] * sites

    def job(exchange: Exchange) -> RouterFigures:
        return compare(exchange, range(sites), before[exchange.site], after[exchange.site])

    results = at_sites(sites, job)
    assert all(result == results[0] for result in results)
    for layer in (1, 4):
        assert results[0].agreement_before[layer] == pytest.approx(pairwise([each.chosen[layer] for each in before]))
        assert results[0].agreement_after[layer] == 1.0
        weights = torch.stack([each.weights[layer] for each in before]).double()
        # Half the mean squared distance between two sites is the mean squared distance to the mean, with pairs of a site and itself.
        distances = [(one - other).square().sum() for one, other in itertools.product(weights, weights)]
        expected = math.sqrt(float(sum(distances)) / sites**2 / 2) / float(weights.mean(0).norm())
        assert results[0].drift[layer] == pytest.approx(expected, rel=1e-5)


def test_small_drift_is_not_lost_in_rounding() -> None:
    """Sums of squares would cancel here: the sites are 1e-6 apart around weights of size 1000."""
    base = 1000 + noise(EXPERTS, WIDTH, seed=3)
    weights = [base, base + 2.0**-10]

    def job(exchange: Exchange) -> float:
        mine = Snapshot({0: choices(0, 0)}, {0: weights[exchange.site]})
        return compare(exchange, (0, 1), mine, mine).drift[0]

    expected = float((weights[1].double() - weights[0].double()).norm() / 2 / base.double().norm())
    assert at_sites(2, job) == [pytest.approx(expected, rel=0.1)] * 2


def test_snapshots_of_other_layers_are_refused() -> None:
    one, other = snapshot(0, 0.0), Snapshot({1: choices(0, 1)}, {1: noise(EXPERTS, WIDTH, seed=0)})

    def job(exchange: Exchange) -> None:
        with pytest.raises(ValueError, match=re.escape("snapshots of layers [1, 4] and [1]")):
            compare(exchange, (0,), one, other)

    at_sites(1, job)


def test_the_probe_is_spread_over_the_tokens() -> None:
    assert probe_tokens(5, 8).tolist() == [0, 1, 2, 3, 4]
    assert probe_tokens(10, 4).tolist() == [0, 2, 5, 7]
