"""The cost model at points that are known, by hand and from the literature's abstract."""

import re

import pytest

from moe.cost import (
    Accounting,
    Memory,
    Sizes,
    comm_bytes,
    ddp_bytes,
    moved_bytes,
    projected_parameters,
    resident_parameters,
    state_memory,
    trade_offs,
)
from moe.residency import ResidencyPlan


def plan(experts: int, sites: int, replication: int, layers: list[int] | None = None, policy: str = "contiguous") -> ResidencyPlan:
    return ResidencyPlan.build(experts, sites, replication, policy, 0, layers or [0], 1 if policy == "rotating" else None)


def ratios(sites: int, replication: int, expert_share: float, accounting: Accounting) -> tuple[float, float, float]:
    """DDP over DiLoCo, DiLoCo over partitioned, DDP over partitioned, at H = 32."""
    total, experts = 10**9, 8
    expert = round(total * expert_share / experts)
    sizes = Sizes.uniform(dense=total - experts * expert, expert=expert, router_row=0, layers=[0])
    partitioned = comm_bytes(plan(experts, sites, replication), sizes, 32, accounting)
    diloco = comm_bytes(plan(experts, sites, sites), sizes, 32, accounting)
    ddp = ddp_bytes(sizes, experts, sites, accounting)
    return ddp / diloco, diloco / partitioned, ddp / partitioned


# f (1 - rho) = .2958 in all of them.
@pytest.mark.parametrize(("sites", "replication", "expert_share"), [(4, 2, 0.5916), (8, 2, 0.3944), (8, 4, 0.5916)])
def test_the_ratios_of_the_abstract_by_payload(sites: int, replication: int, expert_share: float) -> None:
    assert [f"{value:.2f}" for value in ratios(sites, replication, expert_share, "payload")] == ["32.00", "1.42", "45.44"]


def test_the_same_point_by_ring_is_another_figure() -> None:
    assert [f"{value:.2f}" for value in ratios(4, 2, 0.5916, "ring")][1] == "1.65"


def test_by_hand() -> None:
    # One layer of 4 experts of 6 parameters, rows of 3, 10 dense; 4 sites, r = 2, so a site holds 2 experts and all 4 rows.
    sizes = Sizes.uniform(dense=10, expert=6, router_row=3, layers=[0])
    half = plan(4, 4, 2)
    # payload: 2 x (10 dense + 2 x 6 experts + 2 x 3 rows) x 4 bytes / 2 steps
    assert comm_bytes(half, sizes, 2) == 2 * 28 * 4 / 2
    # ring: dense 3/2 x 10, the rest 2/2 x 18
    assert comm_bytes(half, sizes, 2, "ring") == (15 + 18) * 4 / 2
    # all rows to everybody: 4 rows over 4 sites
    assert comm_bytes(half, sizes, 2, "ring", router_rows="all") == (15 + 12 + 1.5 * 12) * 4 / 2
    # one holder: neither its experts nor their rows travel
    assert comm_bytes(plan(4, 4, 1), sizes, 2) == 2 * 10 * 4 / 2
    assert comm_bytes(plan(4, 1, 1), sizes, 2) == 0
    assert comm_bytes(half, sizes, 2, bytes_per_parameter=2) == 2 * 28 * 2 / 2
    assert sizes.total(4) == 46
    assert ddp_bytes(sizes, 4, 4) == 2 * 46 * 4 and ddp_bytes(sizes, 4, 4, "ring") == 1.5 * 46 * 4
    assert resident_parameters(half, sizes, site=0) == 10 + 12 + 12


def test_sites_with_more_experts_move_more() -> None:
    sizes = Sizes.uniform(dense=0, expert=1, router_row=0, layers=[0])
    uneven = ResidencyPlan.build(3, 2, 2, "contiguous", 0, [0])
    assert comm_bytes(uneven, sizes, 1, site=0) == comm_bytes(uneven, sizes, 1, site=1) == 2 * 3 * 4
    three = ResidencyPlan.build(4, 3, 2, "contiguous", 0, [0])
    held = [len(three.resident(site, 0)) for site in range(3)]
    assert [comm_bytes(three, sizes, 1, site=site) for site in range(3)] == [2 * n * 4 for n in held] and len(set(held)) == 2


def test_layers_may_differ() -> None:
    sizes = Sizes(dense=1, expert={1: 10, 4: 100}, router_row={1: 0, 4: 0})
    assert comm_bytes(plan(2, 2, 2, [1, 4]), sizes, 1) == 2 * (1 + 20 + 200) * 4


def test_moving_experts_are_counted_apart() -> None:
    sizes = Sizes.uniform(dense=5, expert=7, router_row=1, layers=[0, 1])
    rotating = plan(8, 4, 1, [0, 1], "rotating")
    moves = rotating.moves(1)
    assert moves and moved_bytes(rotating, sizes, 1) == len(moves) * 7 * 4
    assert moved_bytes(plan(8, 4, 1, [0, 1]), sizes, 1) == 0


def test_parameters_at_a_hundred_billion() -> None:
    got = [projected_parameters(100e9, 0.95, rho) / 1e9 for rho in (1, 1 / 2, 1 / 4, 1 / 8)]
    assert [f"{value:.1f}" for value in got] == ["100.0", "52.5", "28.8", "16.9"]


def test_state_memory() -> None:
    assert state_memory(10) == Memory(device=180, host=80)
    assert state_memory(10, federated=False) == Memory(device=180, host=0)


def test_the_table_holds_every_possible_combination() -> None:
    sizes = Sizes.uniform(dense=10, expert=6, router_row=3, layers=[0])
    rows = trade_offs(sizes, 4, [1, 2, 4], [1, 2, 4], [1, 32])
    assert [(row.sites, row.replication) for row in rows[::2]] == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    by_key = {(row.sites, row.replication, row.sync_every): row for row in rows}
    assert by_key[4, 2, 32].payload == comm_bytes(plan(4, 4, 2), sizes, 32)
    assert by_key[4, 2, 32].ring == comm_bytes(plan(4, 4, 2), sizes, 32, "ring")
    assert by_key[4, 2, 1].parameters == 34 and by_key[4, 2, 1].memory == Memory(device=18 * 34, host=8 * 34)
    assert by_key[1, 1, 1].payload == 0 and by_key[1, 1, 1].memory.host == 0


def test_bad_arguments_are_refused() -> None:
    sizes = Sizes.uniform(dense=1, expert=1, router_row=1, layers=[0])
    for call, message in (
        (lambda: comm_bytes(plan(2, 2, 1), sizes, 1, "total"), "accounting=total: must be payload or ring"),  # type: ignore[arg-type]
        (lambda: comm_bytes(plan(2, 2, 1), sizes, 0), "sync_every=0"),
        (lambda: comm_bytes(plan(2, 2, 1), sizes, 1, router_rows="none"), "router_rows=none"),  # type: ignore[arg-type]
        (lambda: comm_bytes(plan(2, 2, 1, [1]), sizes, 1), "sizes.expert: has layers [0], the plan [1]"),
        (lambda: projected_parameters(1, 1.5, 1), "expert_share=1.5: is a share"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
