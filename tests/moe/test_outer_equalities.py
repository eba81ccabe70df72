"""Equalities of partitioned experts with known schemes, and bytes with the formula, on gloo ranks: one rank is one site."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from sites import Alone, build_plan, experts_of, noise
from torch import Tensor

from moe.cost import Sizes, comm_bytes
from moe.exchange import GlooExchange
from moe.outer import Named, OuterStep
from moe.skip import Router, SkipMoE, StackedExperts

WIDTH, INNER, EXPERTS = 6, 5, 4


def model(mode: str = "full") -> tuple[SkipMoE, dict[str, Named]]:
    torch.manual_seed(4)
    layer = SkipMoE(Router(WIDTH, EXPERTS, 2), StackedExperts(EXPERTS, WIDTH, INNER))
    named = {}
    for e in range(EXPERTS):
        named[f"router.{e}"] = Named(layer.router.weight[e].detach(), "router_row", 0, e)
        named[f"in.{e}"] = Named(layer.experts.w_in[e].detach(), "expert", 0, e)
        named[f"out.{e}"] = Named(layer.experts.w_out[e].detach(), "expert", 0, e)
    return layer, named


def batch(step: int, site: int) -> tuple[Tensor, Tensor]:
    return noise(8, WIDTH, seed=1000 + 10 * step + site), noise(8, WIDTH, seed=2000 + 10 * step + site)


def local_steps(layer: SkipMoE, optimiser: torch.optim.Optimizer, steps: range, sites: list[int], mode: Any = "full") -> None:
    """Steps on the batches of `sites`, their losses averaged."""
    for step in steps:
        optimiser.zero_grad()
        for site in sites:
            x, target = batch(step, site)
            y, _ = layer(x, list(range(EXPERTS)), mode)
            ((x + y - target).square().mean() / len(sites)).backward()
        optimiser.step()


def flat(layer: SkipMoE) -> Tensor:
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def federated(mode: str, sync_every: int, rounds: int, momentum: float, adam: bool) -> Tensor:
    """Weights after some rounds; one rank is one site, every site holds all experts."""
    layer, named = model()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.01) if adam else torch.optim.SGD(layer.parameters(), lr=0.1)
    world = dist.get_world_size()
    outer = OuterStep(named, build_plan(world, world), GlooExchange(), lr=1.0 if not momentum else 0.7, momentum=momentum)
    for r in range(rounds):
        local_steps(layer, optimiser, range(r * sync_every, (r + 1) * sync_every), [dist.get_rank()], mode)
        outer.step()
    return flat(layer)


def plain_diloco(sync_every: int, rounds: int) -> Tensor:
    """The scheme written down directly: every tensor of every site averaged in site order, Nesterov on top."""
    layer, _ = model()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.01)
    anchor = [p.detach().clone() for p in layer.parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    for r in range(rounds):
        local_steps(layer, optimiser, range(r * sync_every, (r + 1) * sync_every), [dist.get_rank()])
        for p, a, v in zip(layer.parameters(), anchor, velocity, strict=True):
            mine = a - p.detach()
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            mean = sum(parts[1:], start=parts[0]) / len(parts)
            v.mul_(0.9).add_(mean)
            a -= 0.7 * (mean + 0.9 * v)
            p.data.copy_(a)
    return flat(layer)


def test_all_resident_with_skipping_is_diloco_bit_for_bit(ranks: RankPools) -> None:
    skipping = ranks(2).run(federated, "skip", 3, 3, 0.9, True)
    full = ranks(2).run(federated, "full", 3, 3, 0.9, True)
    reference = ranks(2).run(plain_diloco, 3, 3)
    for weights in (*skipping, *full, *reference):
        assert torch.equal(weights, reference[0])
    assert not torch.equal(reference[0], flat(model()[0]))


def test_one_local_step_of_sgd_with_averaging_is_data_parallel(ranks: RankPools) -> None:
    layer, _ = model()
    local_steps(layer, torch.optim.SGD(layer.parameters(), lr=0.1), range(6), [0, 1])
    for weights in ranks(2).run(federated, "skip", 1, 6, 0.0, False):
        torch.testing.assert_close(weights, flat(layer), rtol=1e-5, atol=1e-6)


def test_one_site_with_averaging_is_plain_training() -> None:
    layer, named = model()
    outer = OuterStep(named, build_plan(1, 1), Alone(), lr=1.0, momentum=0.0)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for r in range(3):
        local_steps(layer, optimiser, range(4 * r, 4 * r + 4), [0])
        outer.step()
    plain, _ = model()
    local_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(12), [0])
    assert torch.equal(flat(layer), flat(plain))


def counted(sites: int, replication: int) -> tuple[int, int]:
    plan = build_plan(sites, replication, experts=8, layers=2)
    exchange = GlooExchange()
    named = experts_of(plan, exchange.site, 0.0)
    report = OuterStep(named, plan, exchange, lr=1.0, momentum=0.0).step()
    return exchange.bytes_sent, report.parameters


@pytest.mark.parametrize(("sites", "replication"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_bytes_counted_are_those_of_the_formula(ranks: RankPools, sites: int, replication: int) -> None:
    plan = build_plan(sites, replication, experts=8, layers=2)
    sizes = Sizes.uniform(dense=2, expert=3, router_row=1, layers=[0, 1])
    results = ranks(sites).run(counted, sites, replication)
    assert sum(sent for sent, _ in results) == pytest.approx(
        sum(comm_bytes(plan, sizes, 1, "ring", site=m) for m in range(sites)), abs=1e-9
    )
    for site, (_, parameters) in enumerate(results):
        assert 2 * 4 * parameters == comm_bytes(plan, sizes, 1, "payload", site=site)
    if (sites, replication) == (2, 1):
        # Two sites of which each sends one of two dense numbers and gets the other's sum back: 2 x 2 x 4 bytes.
        assert sum(sent for sent, _ in results) == 16
