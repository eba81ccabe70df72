"""Residency plans: what every plan keeps, what each policy means, and what is refused."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe.residency import POLICIES, ResidencyPlan


def build(**changes: Any) -> ResidencyPlan:
    arguments = {"num_experts": 8, "sites": 4, "replication": 2, "policy": "strided", "seed": 0, "layers": 3, **changes}
    return ResidencyPlan.build(**arguments)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 7), st.data(), st.sampled_from(POLICIES), st.integers(0, 5))
def test_every_plan_is_balanced_and_replicated(experts: int, sites: int, data: st.DataObject, policy: str, seed: int) -> None:
    replication = data.draw(st.integers(1, sites))
    assume(replication * experts >= sites)
    rotating = policy == "rotating"
    assume(not rotating or replication < sites)
    plan = build(
        num_experts=experts,
        sites=sites,
        replication=replication,
        policy=policy,
        seed=seed,
        layers=[2, 5],
        rotate_every=2 if rotating else None,
    )
    for layer in (2, 5):
        for round in (0, 3):
            held = [plan.resident(site, layer, round) for site in range(sites)]
            counts = [len(r) for r in held]
            assert sum(counts) == replication * experts and max(counts) - min(counts) <= 1
            for residents in held:
                assert list(residents) == sorted(set(residents))
            for expert in range(experts):
                holders = plan.holders(expert, layer, round)
                assert len(holders) == replication
                assert holders == tuple(site for site in range(sites) if expert in held[site])


def test_contiguous_and_strided_by_hand() -> None:
    assert [build(policy="contiguous", replication=1).resident(m, 0) for m in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [build(policy="strided", replication=1).resident(m, 0) for m in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [build(policy="contiguous").resident(m, 0) for m in range(4)] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    assert build().holders(0, 0) == (0, 1) and build().resident(0, 0) == (0, 3, 4, 7)
    assert [build(num_experts=3, sites=2, replication=1, policy="contiguous").resident(m, 0) for m in range(2)] == [(0,), (1, 2)]


def test_random_differs_by_layer_and_seed_and_is_fixed_for_ever() -> None:
    plan = build(policy="random", num_experts=16, replication=1, layers=6)
    assert len({plan.resident(0, layer) for layer in range(6)}) > 1
    assert build(policy="random", num_experts=16, seed=1).resident(0, 0) != build(policy="random", num_experts=16).resident(0, 0)
    # Saved plans must mean the same in later versions.
    text = json.dumps(plan.to_dict(), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "689d5c360e70cec6"


def test_every_set_of_holders_can_come_up() -> None:
    plan = build(policy="random", num_experts=4, sites=4, replication=2, layers=120)
    seen = {plan.holders(0, layer) for layer in range(120)}
    assert len(seen) == 6


def test_rotating_changes_only_at_its_rounds() -> None:
    plan = build(policy="rotating", num_experts=16, rotate_every=3)
    held = [[plan.resident(site, 0, round) for site in range(4)] for round in range(7)]
    assert held[0] == held[1] == held[2] != held[3] == held[5] != held[6]
    assert plan.moves(0) == plan.moves(1) == plan.moves(2) == []
    moves = plan.moves(3)
    assert moves
    for layer, expert, site in moves:
        assert expert in plan.resident(site, layer, 3) and expert not in plan.resident(site, layer, 2)
    gained = sum(len(set(plan.resident(s, layer, 3)) - set(plan.resident(s, layer, 2))) for s in range(4) for layer in plan.layers)
    assert gained == len(moves)
    assert build().moves(5) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_survives_json(policy: str) -> None:
    plan = build(policy=policy, rotate_every=4 if policy == "rotating" else None, layers=[1, 3])
    again = ResidencyPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.resident(2, 3, round=9) == plan.resident(2, 3, round=9)


def test_a_damaged_plan_is_refused() -> None:
    data = build().to_dict()
    with pytest.raises(ValueError, match="version=2"):
        ResidencyPlan.from_dict({**data, "version": 2})
    with pytest.raises(ValueError, match="keys extra are missing or unknown"):
        ResidencyPlan.from_dict({**data, "extra": 1})
    with pytest.raises(ValueError, match="keys resident, seed are missing"):
        ResidencyPlan.from_dict({key: value for key, value in data.items() if key not in ("seed", "resident")})
    with pytest.raises(ValueError, match="not what its arguments give"):
        ResidencyPlan.from_dict({**data, "resident": {**data["resident"], "0": [[0], [1], [2], [3]]}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts=0: a layer needs at least one expert"),
        ({"sites": 0}, "sites=0: somebody must train"),
        ({"replication": 0}, "replication=0: each expert needs 1 to sites=4"),
        ({"replication": 5}, "replication=5: each expert needs 1 to sites=4"),
        ({"num_experts": 3, "replication": 1}, "1 x 3 experts leave some of 4 sites without one"),
        ({"policy": "nearest"}, "policy=nearest: must be one of contiguous, strided, random, rotating"),
        ({"layers": []}, r"layers=\[\]: must name at least one layer"),
        ({"layers": [1, 1]}, r"layers=\[1, 1\]: must name at least one layer, each once"),
        ({"rotate_every": 2}, "rotate_every=2: has no effect with policy=strided"),
        ({"policy": "rotating"}, "rotate_every=None: policy=rotating needs a number of rounds"),
        ({"policy": "rotating", "replication": 4, "rotate_every": 1}, "every site holds all experts"),
    ],
)
def test_impossible_plans_are_refused_with_the_constraint(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_lookups_outside_the_plan_are_refused() -> None:
    plan = build(layers=[1])
    for call, message in (
        (lambda: plan.resident(4, 1), "site=4"),
        (lambda: plan.holders(8, 1), "expert=8"),
        (lambda: plan.resident(0, 0), "layer=0: has no experts"),
        (lambda: plan.resident(0, 1, round=-1), "round=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_description_groups_equal_layers() -> None:
    assert build(replication=1, layers=[1, 3]).describe() == (
        "layers 1, 3: site 0 holds 0, 4; site 1 holds 1, 5; site 2 holds 2, 6; site 3 holds 3, 7"
    )
