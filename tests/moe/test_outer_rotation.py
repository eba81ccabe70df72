"""Experts of a rotating plan that change hands between outer steps."""

from typing import Any

import pytest
import torch
from sites import at_sites, noise
from torch import Tensor

from moe.cost import Sizes, moved_bytes
from moe.exchange import Exchange, GlooExchange
from moe.outer import Named, OuterStep, RoundFailed
from moe.residency import ResidencyPlan

LAYERS, EXPERTS = 2, 6


def rotating(sites: int, replication: int) -> ResidencyPlan:
    return ResidencyPlan.build(EXPERTS, sites, replication, "rotating", 3, LAYERS, rotate_every=2)


class Site:
    """A site's model: slots that hold whatever experts the plan gives it, and all router rows."""

    def __init__(self, plan: ResidencyPlan, exchange: Exchange, router_rows: Any = "holders") -> None:
        self.plan, self.exchange = plan, exchange
        self.dense = noise(3, seed=1)
        self.rows = noise(LAYERS, EXPERTS, 2, seed=2)
        most = max(len(plan.resident(exchange.site, layer, r)) for layer in plan.layers for r in range(8))
        self.slots = torch.full((LAYERS, most, 5), float("nan"))
        for layer in plan.layers:
            for slot, expert in enumerate(plan.resident(exchange.site, layer)):
                self.slots[layer, slot] = noise(5, seed=100 * layer + expert)
        self.outer = OuterStep(self.named(0), plan, exchange, lr=0.7, momentum=0.9, router_rows=router_rows)

    def named(self, round: int) -> dict[str, Named]:
        named = {"dense": Named(self.dense, "dense")}
        for layer in self.plan.layers:
            for expert in range(EXPERTS):
                named[f"row.{layer}.{expert}"] = Named(self.rows[layer, expert], "router_row", layer, expert)
            for slot, expert in enumerate(self.plan.resident(self.exchange.site, layer, round)):
                named[f"expert.{layer}.{expert}"] = Named(self.slots[layer, slot], "expert", layer, expert)
        return named

    def train(self) -> None:
        for name, entry in self.named(self.outer.residency_round).items():
            entry.tensor.add_(0.1 * noise(*entry.tensor.shape, seed=sum(name.encode()) + 7 * self.exchange.site + self.outer.round))

    def held(self) -> dict[str, Tensor]:
        """What a merged model would take from here: dense, experts and the rows of its experts."""
        round = self.outer.residency_round
        mine = {(layer, expert) for layer in self.plan.layers for expert in self.plan.resident(self.exchange.site, layer, round)}
        return {n: e.tensor.clone() for n, e in self.named(round).items() if e.kind == "dense" or (e.layer, e.expert) in mine}


def rotate(exchange: Exchange, plan: ResidencyPlan, steps: int, router_rows: Any = "holders") -> list[Any]:
    site = Site(plan, exchange, router_rows)
    track = []
    for _ in range(steps):
        site.train()
        site.outer.step()
        moved = None
        before = site.held()
        if site.outer.due:
            moved = site.outer.hand_over(site.named(site.outer.round))
        track.append((before, site.held(), moved, site.outer.state_dict()["velocity"]))
    return track


def over_gloo(sites: int, replication: int, steps: int) -> list[Any]:
    return rotate(GlooExchange(), rotating(sites, replication), steps)


@pytest.mark.parametrize(("sites", "replication", "router_rows"), [(3, 1, "holders"), (4, 2, "holders"), (4, 2, "all")])
def test_a_hand_over_keeps_the_merged_model(sites: int, replication: int, router_rows: str) -> None:
    plan = rotating(sites, replication)
    tracks = at_sites(sites, lambda exchange: rotate(exchange, plan, 4, router_rows))
    for step in range(4):
        merged: list[dict[str, Tensor]] = [{}, {}]
        momenta: dict[str, Tensor] = {}
        moved = 0
        for track in tracks:
            before, after, report, velocity = track[step]
            assert (report is not None) == (step % 2 == 1)
            moved += len(report.arrived) if report else 0
            for model, part in zip(merged, (before, after), strict=True):
                for name, tensor in part.items():
                    assert torch.equal(model.setdefault(name, tensor), tensor), name  # all holders agree
            for name in after:
                assert torch.equal(momenta.setdefault(name, velocity[name]), velocity[name])
        assert merged[0].keys() == merged[1].keys()
        assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])
        assert not any(tensor.isnan().any() for tensor in merged[1].values())
        assert moved == len(plan.moves(step + 1)) and (moved > 0) == (step % 2 == 1)


def test_its_bytes_are_those_of_the_formula(ranks: Any) -> None:
    plan = rotating(3, 2)
    sizes = Sizes.uniform(dense=3, expert=5, router_row=2, layers=range(LAYERS))
    tracks = ranks(3).run(over_gloo, 3, 2, 2)
    sent = sum(track[1][2].bytes_sent for track in tracks)
    # Anchor and momentum, 8 bytes, of the expert's 5 numbers and its router row's 2.
    assert sent == moved_bytes(plan, sizes, 2, bytes_per_parameter=8.0) * 7 / 5
    assert sent == 8 * 7 * len(plan.moves(2)) > 0


def test_what_does_not_fit_is_refused_and_a_failure_changes_nothing() -> None:
    plan = rotating(3, 1)

    def job(exchange: Exchange) -> None:
        site = Site(plan, exchange)
        with pytest.raises(ValueError, match="nothing is due"):
            site.outer.hand_over(site.named(0))
        for _ in range(2):
            site.train()
            site.outer.step()
        renamed = site.named(2)
        arriving = next(name for name in renamed if name not in site.named(0))
        for names, message in (
            ({n: e for n, e in renamed.items() if n != "dense"}, "dense is missing or new; what stays here must be named as before"),
            (site.named(0), "of layer . is at sites"),
        ):
            with pytest.raises(ValueError, match=message):
                site.outer.hand_over(names)
        before = site.outer.state_dict()
        with pytest.raises(RoundFailed, match="hand-over after round 1: not all of sites"):
            site.outer.hand_over(renamed, commit=lambda ok: False)
        assert site.outer.due and site.outer.residency_round == 0
        after = site.outer.state_dict()
        assert before["anchor"].keys() == after["anchor"].keys() and arriving not in after["anchor"]
        site.outer.hand_over(renamed)
        assert arriving in site.outer.state_dict()["anchor"] and not site.outer.due

    at_sites(3, job)


def test_it_resumes_with_the_residency_in_force() -> None:
    plan = rotating(2, 1)

    def job(exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ends = []
        for restart in (False, True):
            site = Site(plan, exchange)
            for step in range(5):
                site.train()
                site.outer.step()
                if site.outer.due:
                    site.outer.hand_over(site.named(site.outer.round))
                if restart and step == 2:
                    state = site.outer.state_dict()
                    with pytest.raises(ValueError, match="is for the residency of round 2, here of 0"):
                        OuterStep(site.named(0), plan, exchange, lr=0.7, momentum=0.9).load_state_dict(state)
                    site.outer = OuterStep(site.named(2), plan, exchange, lr=0.7, momentum=0.9, residency_round=2)
                    site.outer.load_state_dict(state)
            ends.append(site.held())
        return ends[0], ends[1]

    for straight, restarted in at_sites(2, job):
        assert straight.keys() == restarted.keys() and all(torch.equal(straight[n], restarted[n]) for n in straight)
