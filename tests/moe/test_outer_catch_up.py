"""Sites that are behind: what comes from the others, what stays, and that the step counts only those who are up to date."""

from typing import Any

import pytest
import torch
from sites import Alone, at_sites, build_plan, experts_of, noise
from torch import Tensor

from moe.exchange import Exchange
from moe.outer import Named, OuterStep, RoundFailed
from moe.residency import ResidencyPlan


class Site:
    def __init__(self, plan: ResidencyPlan, exchange: Exchange) -> None:
        self.exchange = exchange
        self.named = experts_of(plan, exchange.site, 0.0)
        self.outer = OuterStep(self.named, plan, exchange, lr=0.7, momentum=0.9)

    def train(self, step: int) -> None:
        for name, entry in self.named.items():
            entry.tensor.add_(0.1 * noise(*entry.tensor.shape, seed=sum(name.encode()) + 31 * self.exchange.site + 7 * step))

    def spoil(self) -> None:
        """Weights, anchor and momentum as of a site that went its own way."""
        for entry in self.named.values():
            entry.tensor.add_(100.0)
        self.outer.step([self.exchange.site])
        self.outer.round = 0

    def all(self) -> dict[str, Tensor]:
        state = self.outer.state_dict()
        return {
            **{name: entry.tensor.clone() for name, entry in self.named.items()},
            **{f"{part}/{name}": tensor for part in ("anchor", "velocity") for name, tensor in state[part].items()},
        }


def holders_of(plan: ResidencyPlan, name: str) -> set[int]:
    kind, *place = name.rpartition("/")[2].split(".")
    return set(range(plan.sites)) if kind == "dense" else set(plan.holders(int(place[1]), int(place[0])))


def rounds(exchange: Exchange, plan: ResidencyPlan, late: int | None, delayed: bool) -> dict[str, Tensor]:
    """Two rounds in which site `late`, if any, goes its own way, and one to which it comes back."""
    site = Site(plan, exchange)
    rest = [s for s in range(plan.sites) if s != late]
    for step in range(2):
        if exchange.site == late:
            continue
        site.train(step)
        site.outer.step(rest)
    if exchange.site == late:
        site.spoil()
    site.train(2)
    before = site.all()
    arguments: dict[str, Any] = {"current": rest}
    if delayed:
        site.outer.begin(**arguments)
        if exchange.site == late:
            site.train(9)
        report = site.outer.finish()
    else:
        report = site.outer.step(**arguments)
    assert (report.round, site.outer.round) == (2, 3)
    mine = {name for name in site.named if exchange.site in holders_of(plan, name)}
    shared = {name for name in mine if holders_of(plan, name) & set(rest)}
    if exchange.site == late:
        assert set(report.came) == shared and set(report.stayed) == mine - shared
        for name in site.named.keys() - mine:
            if not delayed:
                assert torch.equal(site.all()[name], before[name])
    else:
        assert report.came == report.stayed == ()
    return {name: tensor for name, tensor in site.all().items() if exchange.site in holders_of(plan, name)} | {
        "line": torch.tensor([int(site.outer.line, 16) % 2**31])
    }


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_site_ends_with_the_weights_of_the_others(late: int, delayed: bool) -> None:
    plan = build_plan(4, 2, experts=8, policy="random", layers=2)
    ends = at_sites(4, lambda exchange: rounds(exchange, plan, late, delayed))
    for name in {name for end in ends for name in end if name != "line"}:
        copies = [end[name] for end in ends if name in end]
        assert all(torch.equal(copy, copies[0]) for copy in copies), name
        assert copies[0].abs().max() < 50, name
    assert len({int(end["line"]) for end in ends}) == 1


def test_a_late_site_gets_all_in_a_step_of_one_part() -> None:
    plan = build_plan(3, 3, experts=2, layers=2)

    def job(exchange: Exchange) -> dict[str, Tensor]:
        site = Site(plan, exchange)
        site.outer = OuterStep(site.named, plan, exchange, lr=0.7, momentum=0.9, fragments=2)
        if exchange.site == 2:
            site.spoil()
        else:
            site.train(0)
            site.outer.step([0, 1], fragment=0)
        site.train(1)
        report = site.outer.step(fragment=1, current=[0, 1])
        state = site.all()
        if exchange.site == 2:
            assert set(report.came) == site.named.keys()
            assert all(torch.equal(state[name], state[f"anchor/{name}"]) for name in site.named)
        return {name: tensor for name, tensor in state.items() if "/" in name}

    ends = at_sites(3, job)
    assert all(torch.equal(end[name], ends[0][name]) for end in ends[1:] for name in ends[0])
    assert all(tensor.abs().max() < 50 for tensor in ends[0].values())


def test_the_late_site_does_not_weigh_in() -> None:
    def job(exchange: Exchange) -> list[float]:
        weight = torch.zeros(1)
        outer = OuterStep({"w": Named(weight, "dense")}, None, exchange, lr=1.0, momentum=0.0, sites=3)
        weight += [2.0, 4.0, 1000.0][exchange.site]
        outer.step(current=[0, 1], weights={"w": [1.0, 3.0, 50.0][exchange.site]})
        return weight.tolist()

    assert at_sites(3, job) == [[3.5]] * 3


def test_what_a_late_site_alone_holds_takes_its_own_step() -> None:
    plan = build_plan(2, 1, experts=2)

    def job(exchange: Exchange) -> list[float]:
        expert = torch.zeros(1)
        named = {"w": Named(torch.zeros(1), "dense"), "e": Named(expert, "expert", 0, exchange.site)}
        outer = OuterStep(named, plan, exchange, lr=1.0, momentum=0.5)
        expert += 2.0
        report = outer.step(current=[0])
        assert report.stayed == (("e",) if exchange.site == 1 else ())
        return expert.tolist()

    assert at_sites(2, job) == [[3.0], [3.0]]


def test_catching_up_without_a_step() -> None:
    plan = build_plan(3, 2, experts=6)

    def job(exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor], Any, Any]:
        site = Site(plan, exchange)
        if exchange.site == 1:
            site.spoil()
        else:
            for step in range(2):
                site.train(step)
                site.outer.step([0, 2])
        site.train(5)
        before = site.all()
        with pytest.raises(RoundFailed):
            site.outer.catch_up([0, 1, 2], [0, 2], commit=lambda ok: False)
        assert all(torch.equal(before[name], tensor) for name, tensor in site.all().items())
        report = site.outer.catch_up([0, 1, 2], [0, 2], commit=lambda ok: ok)
        assert site.outer.round == 2
        return before, site.all(), report, site.outer.line

    ends = at_sites(3, job)
    assert len({line for _, _, _, line in ends}) == 1
    for site in (0, 2):
        before, after, report, _ = ends[site]
        assert report.came == report.stayed == () and all(torch.equal(before[name], after[name]) for name in after)
    before, after, report, _ = ends[1]
    for name in after:
        bare = name.rpartition("/")[2]
        if bare not in report.came:
            assert torch.equal(before[name], after[name])
        else:
            giver = min(holders_of(plan, bare) - {1})
            assert torch.equal(after[name], ends[giver][1][name if "/" in name else f"anchor/{name}"])
    # Rows of experts that are elsewhere are neither: they are this site's own.
    assert set(report.came) | set(report.stayed) == {name for name in after if "/" not in name and 1 in holders_of(plan, name)}
    assert "dense" in report.came


@pytest.mark.parametrize("dropped", ["settled", "on its way"])
def test_a_settled_step_lets_a_site_give_its_anchor_and_an_overtaken_one_drops_its_own(dropped: str) -> None:
    def job(exchange: Exchange) -> None:
        weight = torch.zeros(2)
        outer = OuterStep({"w": Named(weight, "dense")}, None, exchange, lr=1.0, momentum=0.5, sites=3)
        ahead = exchange.site != 2
        for _ in range(2 if ahead else 1):
            weight += 1.0 if ahead else 50.0
            outer.step([0, 1] if ahead else [2])
        weight += 1.0
        outer.begin([0, 1] if ahead else [2])
        if ahead:
            with pytest.raises(ValueError, match="one is in flight; finish"):
                outer.catch_up([0, 1, 2], [0, 1])  # not settled
        if ahead or dropped == "settled":
            outer.settle()
        flight = outer.state_dict() if ahead else None
        if not ahead:
            with pytest.raises(ValueError, match=r"one is in flight; .* drop\(\) it at a site that is behind"):
                outer.catch_up([0, 1, 2], [0, 1])
            outer.drop()
            outer.drop()  # nothing more to forget
            assert not outer.in_flight
        outer.catch_up([0, 1, 2], [0, 1])
        # Ways of -1, -1 and in flight -1: v = -1, -1.5; theta0 = 1 + .5 + 1 + .75.
        assert outer.round == 2 and outer.state_dict()["anchor"]["w"].tolist() == [3.25] * 2
        if ahead:
            assert outer.in_flight and flight is not None and str(outer.state_dict()) == str(flight)
            outer.finish()
            assert outer.round == 3
        else:
            assert weight.tolist() == [3.25] * 2

    at_sites(3, job)


def test_members_that_are_current_must_be_members() -> None:
    outer = OuterStep({"w": Named(torch.zeros(1), "dense")}, build_plan(3, 3), Alone(), lr=1.0, momentum=0.0)
    for current in ([], [1], [0, 1]):
        with pytest.raises(ValueError, match=r"current=\[.*\]: must be some of the members \[0\]"):
            outer.step([0], current=current)
