"""A run of several sites: its router monitor, and its counted bytes beside the formula with the parameters of its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE
from small_run import Outcome, run, run_config
from sub_worlds import sub_worlds

from train.federation.accounting import account, account_of, sizes_from_run
from train.tracking.readers import RunMetrics

FEDERATED: dict[str, Any] = {
    **MOE,
    "moe.mode": "skip",
    "train.steps": 5,
    "federation.sites": 2,
    "federation.replication": 1,
    "federation.sync_every": 2,
    "federation.deadline": 60.0,
    "run.name": "watched",
}
FIGURES = ("router_agreement_before", "router_agreement_after", "router_drift")


def at_site(corpus: str, place: str, changes: dict[str, Any], endpoint: str) -> Outcome:
    with sub_worlds(2) as here:
        changes = {**FEDERATED, "federation.site": here.site, "federation.endpoint": endpoint, **changes}
        return run(run_config(corpus, changes), f"{place}/{here.site}")


def test_both_stages_are_watched_and_every_byte_is_in_the_formula(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    changes = {"parallel.pp": 2, "federation.router_rows": "all", "federation.outer_lr": 1.0, "federation.outer_momentum": 0.0}
    outcomes = ranks(4).run(at_site, corpus, str(tmp_path), changes, endpoint)
    for outcome in outcomes:
        watched = [line for line in outcome.lines if "router_drift" in line]
        assert [line["step"] for line in watched] == [2, 4]
        for line in watched:
            assert {name: list(line[name]) for name in FIGURES} == {name: ["1", "3"] for name in FIGURES}
            assert all(0 < value <= 1 for name in FIGURES[:2] for value in line[name].values())
            assert all(0 < value < 1 for value in line["router_drift"].values())
        assert [{name: line[name] for name in FIGURES} for line in watched] == [
            {name: line[name] for name in FIGURES} for line in outcomes[0].lines if "router_drift" in line
        ]
    for site, outcome in ((0, outcomes[0]), (1, outcomes[2])):
        config = run_config(corpus, {**FEDERATED, **changes, "federation.site": site})
        found = sizes_from_run(tmp_path / str(site))
        assert found is not None and list(found[0].expert) == [1, 3]
        moved = account(config, RunMetrics(training=outcome.lines), *found[:1], "the index")
        assert moved is not None and (moved.rounds, moved.caveats) == (2, ())
        assert moved.payload == moved.formula_payload > 0 and moved.sent == moved.received == moved.formula_ring > 0
        assert "ratio 1.0000" in moved.line()
    assert account_of(tmp_path / "nowhere") is None


def test_watching_changes_nothing_and_plain_averaging_of_all_rows_ends_alike(
    ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str
) -> None:
    alike = {"moe.mode": "full", "federation.replication": 2, "federation.outer_lr": 1.0, "federation.outer_momentum": 0.0}
    watched = ranks(2).run(at_site, corpus, str(tmp_path / "on"), {**alike, "federation.probe": 2}, endpoint)
    for line in (line for line in watched[0].lines if "router_drift" in line):
        assert set(line["router_agreement_after"].values()) == {1.0}, "equal models choose alike"
        assert all(value < 1.0 for value in line["router_agreement_before"].values()), "sites trained on other rows do not"
    plain = ranks(2).run(at_site, corpus, str(tmp_path / "off"), {**alike, "federation.probe": 0, "run.name": "plain"}, endpoint)
    for one, other in zip(watched, plain, strict=True):
        assert not [line for line in other.lines if "router_drift" in line]
        for a, b in zip(one.state, other.state, strict=True):
            assert torch.equal(a.data, b.data), a.name


@pytest.mark.parametrize(
    ("last", "first", "caveat"),
    [
        ({"sites_present": 1}, {}, "1 logged rounds had fewer"),
        ({"outer_failed": 3}, {}, "3 rounds failed"),
        ({"attempt": 2}, {"attempt": 1}, "the run was started again"),
    ],
)
def test_what_makes_the_formula_another_case_is_said(last: dict[str, Any], first: dict[str, Any], caveat: str) -> None:
    from moe.cost import Sizes

    config = run_config("nowhere", {**FEDERATED, "federation.site": 0})
    line = {"outer_bytes": 8, "outer_bytes_received": 8, "outer_payload_bytes": 16, "sites_present": 2, "outer_failed": 0}
    lines = [{**line, "step": 2, "outer_round": 1, **first}, {**line, "step": 4, "outer_round": 2, **last}]
    sizes = Sizes.uniform(dense=1, expert=5, router_row=3, layers=[1, 3])
    moved = account(config, RunMetrics(training=lines), sizes, "hand")
    assert moved is not None and len(moved.caveats) == 1 and caveat in moved.line()
    # Two rounds of one dense parameter between two sites, 4 bytes each: experts and their rows have one holder and stay.
    assert (moved.formula_payload, moved.formula_ring) == (2 * 2 * 4, 2 * 1 * 4)
    assert (moved.payload_ratio, moved.ring_ratio) == (2.0, 2.0)
