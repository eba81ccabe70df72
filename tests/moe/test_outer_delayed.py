"""Delayed outer steps, steps on a part of the layers, saving in the middle, and runs without experts."""

import threading
from typing import Any

import pytest
import torch
from sites import Alone, at_sites, build_plan, experts_of, noise
from torch import Tensor

from moe.exchange import Exchange
from moe.outer import Named, OuterStep, RoundFailed
from moe.outer_names import partition

PLAN = build_plan(3, 2, experts=6, policy="random", layers=2)


class Site:
    """Everything a site holds, each tensor at its own start, with a bf16 copy of the dense weight."""

    def __init__(self, exchange: Exchange, **settings: Any) -> None:
        self.exchange = exchange
        self.named = experts_of(PLAN, exchange.site, 0.0)
        for i in range(3):
            self.named[f"block.{i}"] = Named(noise(4, seed=i), "dense", i)
        self.copy = torch.zeros(2, dtype=torch.bfloat16)
        self.named["dense"] = self.named["dense"]._replace(copies=[self.copy])
        self.outer = self.build(**settings)

    def build(self, **settings: Any) -> OuterStep:
        return OuterStep(self.named, PLAN, self.exchange, **{"lr": 0.7, "momentum": 0.9, **settings})

    def train(self, step: int) -> None:
        for name, entry in self.named.items():
            entry.tensor.add_(0.1 * noise(*entry.tensor.shape, seed=sum(name.encode()) + 31 * self.exchange.site + 7 * step))

    def all(self) -> dict[str, Tensor]:
        return {"copy": self.copy.clone(), **{name: entry.tensor.clone() for name, entry in self.named.items()}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("settings", [{}, {"lr": 1.0, "momentum": 0.0}])
def test_without_steps_in_between_a_delayed_step_is_a_step(settings: dict[str, float]) -> None:
    def job(exchange: Exchange) -> None:
        direct, delayed = Site(exchange, **settings), Site(exchange, **settings)
        for step in range(4):
            direct.train(step)
            delayed.train(step)
            wanted = direct.outer.step()
            delayed.outer.begin()
            assert delayed.outer.in_flight
            assert delayed.outer.finish() == wanted and not delayed.outer.in_flight
            assert same(direct.all(), delayed.all())
        assert direct.outer.line == delayed.outer.line != ""

    at_sites(3, job)


def test_lines_tell_pasts_of_the_same_sites_apart_by_their_token() -> None:
    def line(token: str, how: str) -> str:
        weight = torch.zeros(2)
        outers = [OuterStep({"w": Named(weight, "dense")}, build_plan(1, 1), Alone(), lr=1.0, momentum=0.0) for _ in range(2)]
        if how == "step":
            outers[0].step(token=token)
            return outers[0].line
        outers[0].begin(token=token)
        outers[0].settle()
        outers[how == "restored"].load_state_dict(outers[0].state_dict())
        outers[how == "restored"].finish()
        return outers[how == "restored"].line

    lines = {token: {line(token, how) for how in ("step", "delayed", "restored")} for token in ("", "a", "b")}
    assert all(len(same_token) == 1 for same_token in lines.values()) and len(set.union(*lines.values())) == 3


def test_a_delayed_step_keeps_what_was_learnt_meanwhile() -> None:
    def job(exchange: Exchange) -> None:
        weight, alone = torch.zeros(2), torch.zeros(2)
        named = {"w": Named(weight, "dense"), "e": Named(alone, "expert", 0, exchange.site)}
        outer = OuterStep(named, build_plan(2, 1, experts=2), exchange, lr=1.0, momentum=0.5)
        weight += [1.0, 3.0][exchange.site]
        alone += 1.0
        outer.begin()
        weight += [10.0, 20.0][exchange.site]
        alone += 10.0
        outer.finish()
        # D = -2, v = -2: theta0 = 2 + .5 * 2 = 3, and what each learnt since begin() on top. Alone: D = -1, theta0 = 1.5.
        assert weight.tolist() == [[13.0] * 2, [23.0] * 2][exchange.site] and alone.tolist() == [11.5] * 2
        outer.step()
        # Counted from theta0 = 3: D = -15, v = -16, theta0 = 3 + 15 + 8.
        assert weight.tolist() == [26.0] * 2

    at_sites(2, job)


def test_what_a_site_alone_holds_is_only_noted_by_a_delayed_plain_average() -> None:
    weight = noise(3, seed=1)
    outer = OuterStep({"w": Named(weight, "dense")}, build_plan(1, 1), Alone(), lr=1.0, momentum=0.0)
    weight += 1.0
    at_begin = weight.clone()
    outer.begin()
    weight += 1e-3
    now = weight.clone()
    outer.finish()
    assert torch.equal(weight, now) and torch.equal(outer.state_dict()["anchor"]["w"], at_begin)


def test_a_delayed_step_travels_in_another_thread() -> None:
    gate, seen = threading.Event(), []

    class Slow(Alone):
        def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
            assert gate.wait(60)
            seen.append(threading.current_thread())
            for tensor in tensors:
                tensor.mul_(2)

    weight = torch.zeros(2)
    outer = OuterStep({"w": Named(weight, "dense")}, build_plan(2, 2), Slow(), lr=1.0, momentum=0.0)
    weight += 1.0
    outer.begin()
    weight += 4.0  # begin() came back before anything was sent
    for call in (outer.step, outer.begin):
        with pytest.raises(ValueError, match="one is in flight; finish"):
            call()
    with pytest.raises(ValueError, match="in flight and not settled"):
        outer.state_dict()
    gate.set()
    outer.finish()
    assert weight.tolist() == [5.0, 5.0] and seen[0] is not threading.current_thread()
    for late in (outer.finish, outer.settle):
        with pytest.raises(ValueError, match="none is in flight"):
            late()


def run(site: Site, steps: int, save_at: int | None, fragments: int) -> dict[str, Tensor]:
    """Every step begins a fragment's delayed outer step and finishes it one local step later."""
    for step in range(steps):
        site.train(2 * step)
        site.outer.begin(fragment=step % fragments)
        site.train(2 * step + 1)
        if step == save_at:
            site.outer.settle(lambda ok: ok)
            state, before = site.outer.state_dict(), site.all()
            resumed = Site(site.exchange)
            resumed.outer = resumed.build(fragments=fragments)
            for name, entry in resumed.named.items():
                entry.tensor.copy_(before[name])
            resumed.copy.copy_(before["copy"])
            resumed.outer.load_state_dict(state)
            site = resumed
        site.outer.finish(lambda ok: ok)
    return site.all()


@pytest.mark.parametrize("fragments", [1, 2])
def test_saved_in_flight_it_goes_on_bit_for_bit(fragments: int) -> None:
    def job(exchange: Exchange) -> bool:
        ends = [run(Site(exchange, fragments=fragments), 5, save_at, fragments) for save_at in (None, 2)]
        return same(*ends)

    assert all(at_sites(3, job))


def test_a_vote_that_fails_loses_the_round_and_nothing_else() -> None:
    def job(exchange: Exchange) -> None:
        votes: list[bool] = []

        def no(ok: bool) -> bool:
            votes.append(ok)
            return False

        site = Site(exchange)
        site.train(0)
        before, state = site.all(), site.outer.state_dict()
        for call in (
            lambda: site.outer.step(commit=no),
            lambda: (site.outer.begin(), site.outer.finish(no)),
            lambda: (site.outer.begin(), site.outer.settle(no)),
        ):
            with pytest.raises(RoundFailed, match=r"round 0: not all of sites \[0, 1, 2\] had their tensors"):
                call()
            assert same(site.all(), before) and not site.outer.in_flight and site.outer.round == 0
        assert votes == [True] * 3
        site.outer.step(commit=lambda ok: ok)
        direct = Site(exchange)
        direct.train(0)
        direct.outer.step()
        assert same(site.all(), direct.all())
        assert not same(state["anchor"], site.outer.state_dict()["anchor"])

    at_sites(3, job)


def test_the_parts_cover_every_name_once_and_are_alike_everywhere() -> None:
    def job(exchange: Exchange) -> dict[str, int]:
        site = Site(exchange, fragments=2)
        stepped: dict[str, int] = {}
        for part in range(2):
            site.train(part)
            before = site.all()
            report = site.outer.step(fragment=part)
            moved = {name for name, tensor in site.all().items() if not torch.equal(tensor, before[name])} - {"copy"}
            assert report.parameters + report.alone == sum(site.named[name].tensor.numel() for name in moved)
            assert not stepped.keys() & moved
            stepped.update(dict.fromkeys(moved, part))
        own = {name for name, e in site.named.items() if e.kind == "router_row" and exchange.site not in PLAN.holders(e.expert, e.layer)}
        assert stepped.keys() == site.named.keys() - own
        return stepped

    parts = at_sites(3, job)
    for other in parts[1:]:
        assert all(parts[0][name] == part for name, part in other.items() if name in parts[0])
    # Whole layers go together.
    for layer in (0, 1):
        assert len({part for one in parts for name, part in one.items() if f".{layer}." in name or name == f"block.{layer}"}) == 1
    assert {part for one in parts for part in one.values()} == {0, 1}


def test_parts_do_not_depend_on_how_many_experts_a_site_holds() -> None:
    plan = build_plan(2, 1, experts=5, layers=2)
    parts = []
    for site in range(2):
        # A layer's experts count as 5 x 10 / 2 = 25 at either site, though one holds 20 numbers and the other 30.
        named = {f"d{i}": Named(torch.zeros(size), "dense") for i, size in enumerate((24, 27))}
        for layer in plan.layers:
            named |= {f"e{layer}.{e}": Named(torch.zeros(10), "expert", layer, e) for e in plan.resident(site, layer)}
        parts.append(partition(named, plan, 2))
    common = parts[0].keys() & parts[1].keys()
    assert {name: parts[0][name] for name in common} == {name: parts[1][name] for name in common} == {"d1": 0, "d0": 0}
    assert {part for one in parts for name, part in one.items() if name.startswith("e")} == {1}
    assert {len([name for name in one if name.startswith("e")]) for one in parts} == {4, 6}


def test_one_part_is_the_whole_step() -> None:
    def job(exchange: Exchange) -> bool:
        whole, part = Site(exchange), Site(exchange, fragments=1)
        for step in range(3):
            whole.train(step)
            part.train(step)
            assert whole.outer.step() == part.outer.step(fragment=0)
        return same(whole.all(), part.all())

    assert all(at_sites(3, job))
    with pytest.raises(ValueError, match="fragment=1: there are 1"):
        OuterStep({"w": Named(torch.zeros(1), "dense")}, build_plan(1, 1), Alone(), lr=1.0, momentum=0.0).step(fragment=1)


def test_a_run_without_experts_needs_no_plan() -> None:
    def job(exchange: Exchange) -> list[float]:
        weight = torch.zeros(2)
        outer = OuterStep({"w": Named(weight, "dense", 3)}, None, exchange, lr=1.0, momentum=0.0, sites=2)
        weight += exchange.site
        assert outer.step().orphans == () and not outer.due
        return weight.tolist()

    assert at_sites(2, job) == [[0.5, 0.5]] * 2
    with pytest.raises(ValueError, match="w: kind=expert needs a residency plan"):
        OuterStep({"w": Named(torch.zeros(2), "expert", 0, 0)}, None, Alone(), lr=1.0, momentum=0.0, sites=2)
