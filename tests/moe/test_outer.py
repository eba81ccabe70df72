"""The outer step: its arithmetic, who averages with whom, and what it refuses."""

from typing import Any

import pytest
import torch
from sites import Alone, at_sites, build_plan, experts_of, noise
from torch import Tensor

from moe.exchange import Exchange
from moe.outer import Named, OuterStep


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, True)])
def test_equals_torch_sgd_on_the_mean_delta(momentum: float, nesterov: bool) -> None:
    def job(exchange: Exchange) -> list[Tensor]:
        weight = noise(5, 3, seed=100)
        outer = OuterStep({"w": (weight, "dense", None, None)}, build_plan(3, 3), exchange, lr=0.7, momentum=momentum, nesterov=nesterov)
        track = []
        for step in range(4):
            weight += 0.1 * noise(5, 3, seed=10 * step + exchange.site)
            outer.step()
            track.append(weight.clone())
        return track

    tracks = at_sites(3, job)
    reference = torch.nn.Parameter(noise(5, 3, seed=100))
    optimiser = torch.optim.SGD([reference], lr=0.7, momentum=momentum, nesterov=nesterov and momentum > 0)
    for step in range(4):
        reference.grad = -0.1 * sum(noise(5, 3, seed=10 * step + site) for site in range(3)) / 3  # type: ignore[operator]
        optimiser.step()
        for track in tracks:
            torch.testing.assert_close(track[step], reference.data)
            assert torch.equal(track[step], tracks[0][step])


def test_a_quadratic_comes_nearer_its_optimum() -> None:
    # Sites start together, walk towards the optimum by different amounts, and one outer step must take all of them nearer.
    optimum = noise(6, seed=1)

    def job(exchange: Exchange) -> tuple[float, float]:
        weight = torch.zeros(6)
        outer = OuterStep({"w": (weight, "dense", None, None)}, build_plan(2, 2), exchange, lr=0.7, momentum=0.9)
        before = (weight - optimum).norm().item()
        for _ in range(3 + exchange.site):
            weight -= 0.05 * (weight - optimum)
        outer.step()
        return before, (weight - optimum).norm().item()

    for before, after in at_sites(2, job):
        assert after < 0.9 * before


def test_any_size_is_averaged() -> None:
    shapes = [(), (1,), (0,), (1, 1), (3,), (2, 5, 7), (1001,), (64, 64)]

    def job(exchange: Exchange) -> list[Tensor]:
        tensors = [noise(*shape, seed=i) for i, shape in enumerate(shapes)]
        outer = OuterStep({f"w{i}": Named(t, "dense") for i, t in enumerate(tensors)}, build_plan(3, 3), exchange, lr=1.0, momentum=0.0)
        for tensor in tensors:
            tensor += [0.0, 1.0, 5.0][exchange.site]
        report = outer.step()
        assert report.parameters == sum(t.numel() for t in tensors) and report.alone == 0
        return tensors

    for tensors in at_sites(3, job):
        for i, tensor in enumerate(tensors):
            torch.testing.assert_close(tensor, noise(*shapes[i], seed=i) + 2.0)


def test_weights_count_sites_by_what_they_saw() -> None:
    def job(exchange: Exchange) -> tuple[Tensor, Tensor]:
        seen, unseen = torch.zeros(2), torch.ones(2)
        outer = OuterStep(
            {"seen": Named(seen, "dense"), "unseen": Named(unseen, "dense")}, build_plan(2, 2), exchange, lr=1.0, momentum=0.0
        )
        seen += exchange.site + 1.0
        unseen += 9.0
        outer.step(weights={"seen": [30.0, 10.0][exchange.site], "unseen": 0.0})
        return seen, unseen

    for seen, unseen in at_sites(2, job):
        torch.testing.assert_close(seen, torch.full((2,), (1 * 30 + 2 * 10) / 40))
        torch.testing.assert_close(unseen, torch.ones(2))


def test_masters_and_copies_follow() -> None:
    def job(exchange: Exchange) -> tuple[Tensor, Tensor]:
        model = torch.zeros(4, dtype=torch.bfloat16)
        master = torch.zeros(4, requires_grad=True)
        inner = torch.optim.SGD([master], lr=1.0)
        outer = OuterStep({"w": Named(master, "dense", copies=[model])}, build_plan(2, 2), exchange, lr=1.0, momentum=0.0)

        def local_step(gradient: float) -> None:
            master.grad = torch.full((4,), gradient)
            inner.step()
            model.copy_(master.detach())

        local_step(-2.0 * exchange.site)
        outer.step()
        after = model.clone()
        # A master left behind would bring the site's own weights back here.
        local_step(-1.0)
        return after, model

    for after, following in at_sites(2, job):
        assert after.tolist() == [1.0] * 4 and following.tolist() == [2.0] * 4


@pytest.mark.parametrize("router_rows", ["holders", "all"])
def test_experts_average_over_their_holders_and_rows_as_asked(router_rows: Any) -> None:
    plan = build_plan(4, 2, experts=8, policy="random", layers=2)

    def job(exchange: Exchange) -> dict[str, float]:
        named = experts_of(plan, exchange.site, 0.0)
        outer = OuterStep(named, plan, exchange, lr=1.0, momentum=0.0, router_rows=router_rows)
        for entry in named.values():
            entry.tensor.add_(2.0**exchange.site)
        report = outer.step()
        assert report.orphans == ()
        return {name: entry.tensor.flatten()[0].item() for name, entry in named.items()}

    for site, got in enumerate(at_sites(4, job)):
        assert got["dense"] == 15 / 4
        for name, value in got.items():
            if name == "dense":
                continue
            kind, layer, expert = name.split(".")
            holders = plan.holders(int(expert), int(layer))
            mean = sum(2.0**h for h in holders) / len(holders)
            if kind == "expert":
                assert value == mean
            elif router_rows == "all":
                assert value == 15 / 4
            else:
                assert value == (mean if site in holders else 2.0**site)


def test_what_one_site_holds_stays_as_it_is_without_traffic() -> None:
    plan = build_plan(2, 1)

    def job(exchange: Exchange) -> list[bool]:
        named = experts_of(plan, exchange.site, 1e3)
        outer = OuterStep(named, plan, exchange, lr=1.0, momentum=0.0)
        for i, entry in enumerate(named.values()):
            entry.tensor.copy_(noise(*entry.tensor.shape, seed=i))  # so far away that theta0 - (theta0 - theta) would round
        before = {name: entry.tensor.clone() for name, entry in named.items()}
        report = outer.step()
        assert report.parameters == 2 and report.alone == 2 * 3 + 2 * 1
        return [torch.equal(before[name], entry.tensor) for name, entry in named.items() if name != "dense"]

    assert all(all(same) for same in at_sites(2, job))


def test_what_one_site_holds_takes_the_outer_step_of_its_own_way() -> None:
    plan = build_plan(2, 1, experts=2)

    def job(exchange: Exchange) -> tuple[Tensor, Tensor]:
        expert = noise(5, seed=exchange.site)
        reference = torch.nn.Parameter(expert.clone())
        optimiser = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
        outer = OuterStep({"e": Named(expert, "expert", 0, exchange.site)}, plan, exchange, lr=0.7, momentum=0.9)
        for step in range(3):
            way = 0.1 * noise(5, seed=10 + step)
            expert += way
            outer.step()
            reference.grad = -way
            optimiser.step()
        return expert, reference.detach()

    for got, wanted in at_sites(2, job):
        torch.testing.assert_close(got, wanted)


def test_absent_sites_are_left_out_and_lost_experts_named() -> None:
    plan = build_plan(3, 1, experts=3, policy="contiguous")

    def job(exchange: Exchange) -> Any:
        named = experts_of(plan, exchange.site, 0.0)
        outer = OuterStep(named, plan, exchange, lr=1.0, momentum=0.0)
        for entry in named.values():
            entry.tensor.add_(exchange.site + 1.0)
        if exchange.site == 1:
            return None
        report = outer.step(members=[0, 2])
        return named["dense"].tensor[0].item(), report.orphans, report.round

    assert at_sites(3, job) == [(2.0, ((0, 1),), 0), None, (2.0, ((0, 1),), 0)]


def test_a_failed_exchange_changes_nothing() -> None:
    class Broken(Alone):
        calls = 0

        def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the peer is gone")
            for tensor in tensors:
                tensor.mul_(2)

    plan = build_plan(3, 2, experts=3)
    named = experts_of(plan, 0, 0.5)
    outer = OuterStep(named, plan, Broken(), lr=0.7, momentum=0.9)
    for entry in named.values():
        entry.tensor.add_(1.0)
    state = outer.state_dict()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        outer.step()
    assert all((entry.tensor == 1.5).all() for entry in named.values())
    after = outer.state_dict()
    assert after["round"] == 0
    for part in ("anchor", "velocity"):
        assert all(torch.equal(state[part][name], after[part][name]) for name in named)


def test_a_restored_state_goes_on_alike() -> None:
    def job(exchange: Exchange) -> tuple[Tensor, Tensor]:
        ends = []
        for restart in (False, True):
            weight = noise(7, seed=3)
            outer = OuterStep({"w": Named(weight, "dense")}, build_plan(2, 2), exchange, lr=0.7, momentum=0.9)
            for step in range(4):
                weight += 0.1 * noise(7, seed=10 * step + exchange.site)
                if restart and step == 2:  # in the middle of a round
                    state, weight = outer.state_dict(), weight.clone()
                    outer = OuterStep({"w": Named(weight, "dense")}, build_plan(2, 2), exchange, lr=0.7, momentum=0.9)
                    outer.load_state_dict(state)
                outer.step()
            assert outer.round == 4
            ends.append(weight)
        return ends[0], ends[1]

    for straight, restarted in at_sites(2, job):
        assert torch.equal(straight, restarted)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Named(torch.zeros(2), "expert", 0, 3), "w: expert 3 of layer 0 is at sites [1], not at 0; leave it out"),
        (Named(torch.zeros(2), "expert", 5, 0), "layer=5: has no experts in this plan"),
        (Named(torch.zeros(2), "expert"), "w: layer=None, expert=None do not fit kind=expert"),
        (Named(torch.zeros(2), "dense", 0, 0), "w: layer=0, expert=0 do not fit kind=dense"),
        (Named(torch.zeros(2), "bias"), "w: kind=bias must be dense, expert or router_row"),  # type: ignore[arg-type]
        (Named(torch.zeros(2, dtype=torch.int64), "dense"), "w: torch.int64 cannot be averaged"),
        (Named(torch.zeros(2), "dense", copies=[torch.zeros(3)]), "w: a copy must have the shape (2,)"),
    ],
)
def test_names_that_do_not_fit_are_refused(entry: Named, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OuterStep({"w": entry}, build_plan(2, 1), Alone(), lr=1.0, momentum=0.0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_arguments_without_sense_are_refused() -> None:
    named = {"w": Named(torch.zeros(2), "dense")}
    for plan, settings, message in (
        (build_plan(2, 1), {"lr": 0.0, "momentum": 0.0}, "lr=0.0"),
        (build_plan(2, 1), {"lr": 1.0, "momentum": 1.0}, "momentum=1.0"),
        (build_plan(2, 1), {"lr": 1.0, "momentum": 0.0, "router_rows": "none"}, "router_rows=none"),
        (None, {"lr": 1.0, "momentum": 0.0}, "sites: needed without a plan"),
        (build_plan(2, 1), {"lr": 1.0, "momentum": 0.0, "sites": 3}, "sites=3: the plan has 2"),
        (build_plan(2, 1), {"lr": 1.0, "momentum": 0.0, "fragments": 0}, "fragments=0"),
    ):
        with pytest.raises(ValueError, match=message):
            OuterStep(named, plan, Alone(), **settings)  # type: ignore[arg-type]
    outer = OuterStep(named, build_plan(2, 1), Alone(), lr=1.0, momentum=0.0)
    for arguments, message in (
        ({"members": [1]}, r"members=\[1\]: must be different sites of 2 with this one, 0"),
        ({"members": [0, 0]}, r"members=\[0, 0\]: must be different"),
        ({"members": [0, 2]}, r"members=\[0, 2\]: must be different"),
        ({"weights": {}}, "weights: none for w"),
        ({"weights": {"w": -1.0}}, "weights: -1.0 for w"),
    ):
        with pytest.raises(ValueError, match=message):
            outer.step(**arguments)  # type: ignore[arg-type]


def test_the_state_of_another_site_is_refused() -> None:
    outer = OuterStep({"w": Named(torch.zeros(2), "dense")}, build_plan(1, 1), Alone(), lr=1.0, momentum=0.0)
    state = outer.state_dict()
    with pytest.raises(ValueError, match="anchor of v, w is missing or unknown"):
        outer.load_state_dict({**state, "anchor": {"v": torch.zeros(2)}})
    with pytest.raises(ValueError, match=r"w is \(3,\), here \(2,\)"):
        outer.load_state_dict({**state, "anchor": {"w": torch.zeros(3)}})
