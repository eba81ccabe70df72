"""Rounds of several sites in one pool, each a world of its own: equal to known schemes, and to themselves after a stop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated_run import FEDERATED, PARTIAL, at_site, one_site_federation, plain_diloco
from ranks import RankPools
from small_engine import assemble
from small_run import Outcome, run, run_config
from torch import Tensor

from train.data.indexed import IndexedWriter

SP = {"parallel.tp": 2, "parallel.sp": True}


def by_site(outcomes: list[Outcome], sites: int) -> list[dict[str, Tensor]]:
    """The whole state of each site."""
    size = len(outcomes) // sites
    return [assemble([outcome.state for outcome in outcomes[site * size : (site + 1) * size]]) for site in range(sites)]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def shown(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"], line["tokens"]) for line in outcome.lines]


def test_all_resident_with_skipping_is_full_is_diloco_bit_for_bit(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    skipping = by_site(ranks(2).run(at_site, corpus, str(tmp_path / "skip"), {"moe.mode": "skip"}, endpoint, 2), 2)
    full = by_site(ranks(2).run(at_site, corpus, str(tmp_path / "full"), {"train.precision": "fp32"}, endpoint, 2), 2)
    diloco = by_site(ranks(2).run(plain_diloco, corpus, str(tmp_path / "plain"), {}, 2), 2)
    for site in range(2):
        same(skipping[site], full[site])
        same(full[site], diloco[site])
    # The last step was an outer one: sites have the same weights, and moments of their own.
    for name, value in full[0].items():
        assert torch.equal(value, full[1][name]) == ("exp_avg" not in name), name


def test_lines_say_what_the_outer_steps_moved(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    for site, outcome in enumerate(ranks(2).run(at_site, corpus, str(tmp_path), PARTIAL, endpoint, 2)):
        assert [line["step"] for line in outcome.lines] == list(range(1, 9))
        for line in outcome.lines:
            if line["step"] % 2:
                assert not [key for key in line if key.startswith("outer_")]
                continue
            assert line["outer_round"] == line["step"] / 2 and line["sites_present"] == 2
            assert (line["outer_failed"], line["experts_orphaned"]) == (0, 0)
            # Two sites: each sends half of what both have, and the sum of the other half. Experts have one holder each.
            dense = sum(piece.data.numel() for piece in outcome.state if _is_shared(piece.name))
            assert line["outer_payload_bytes"] == 2 * 4 * dense, site
            assert abs(line["outer_bytes"] - 4 * dense) <= 4 * 64 and line["outer_seconds"] > 0
            assert line["tokens"] < line["tokens_all_sites"] <= 2 * 48 * line["step"] * 2


def _is_shared(name: str) -> bool:
    return not name.startswith("optimizer.") and ".experts." not in name and not name.endswith("router.weight")


def test_frozen_sites_take_over_each_others_experts(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    changes = {**PARTIAL, "moe.mode": "frozen", "train.steps": 4}
    one, other = by_site(ranks(2).run(at_site, corpus, str(tmp_path), changes, endpoint, 2), 2)
    start = by_site(ranks(2).run(at_site, corpus, str(tmp_path / "start"), {**changes, "train.steps": 1}, endpoint, 2), 2)
    names = [name for name in one if ".mlp.experts." in name and not name.startswith("optimizer.")]
    assert len(names) == 8
    for name in names:
        assert torch.equal(one[name], other[name]), name
        trains = 0 if int(name.split(".experts.")[1][0]) % 2 == 0 else 1
        untrained = start[1 - trains][name]
        assert not torch.equal(one[name], untrained), f"{name}: its holder's training arrived"


@pytest.fixture(scope="module")
def even_corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One long document: every row has as many valid tokens as any other."""
    prefix = tmp_path_factory.mktemp("even") / "text"
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        writer.add_document(np.append(np.random.default_rng(3).integers(97, 123, size=20_000), 256))
        writer.finish(f"{prefix}.idx")
    return str(prefix)


LINEAR: dict[str, Any] = {
    # Adam without memory and with an epsilon far above every gradient is SGD with a rate of lr / eps.
    "optim.betas": [0.0, 0.0],
    "optim.eps": 1e3,
    "optim.lr": 5e2,
    "optim.clip": 0.0,
    "optim.weight_decay": 0.0,
    "optim.schedule": "constant",
    "moe.aux_coef": 0.0,
    "train.steps": 4,
    "data.validation": 0.0,
}


def data_parallel(corpus: str, place: str, changes: dict[str, Any]) -> Outcome:
    return run(run_config(corpus, {**FEDERATED, **changes}), place)


def test_one_local_step_of_sgd_with_averaging_is_data_parallel(ranks: RankPools, even_corpus: str, tmp_path: Path, endpoint: str) -> None:
    averaging = {"federation.sync_every": 1, "federation.outer_lr": 1.0, "federation.outer_momentum": 0.0}
    sites = by_site(ranks(2).run(at_site, even_corpus, str(tmp_path / "sites"), {**LINEAR, **averaging}, endpoint, 2), 2)
    plain = assemble([outcome.state for outcome in ranks(2).run(data_parallel, even_corpus, str(tmp_path / "plain"), LINEAR)])
    nearly = {**LINEAR, "train.steps": 1, "optim.lr": 1e-6}
    start = assemble([outcome.state for outcome in ranks(2).run(data_parallel, even_corpus, str(tmp_path / "start"), nearly)])
    for name, value in plain.items():
        if not name.startswith("optimizer."):
            moved = (value - start[name]).abs().max()
            assert (sites[0][name] - value).abs().max() < 1e-3 * moved + 1e-6, name


def test_averaging_over_one_site_is_plain_training(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    averaging = {"federation.outer_lr": 1.0, "federation.outer_momentum": 0.0}
    (one,) = ranks(1).run(one_site_federation, corpus, str(tmp_path / "one"), averaging, endpoint)
    (plain,) = ranks(1).run(data_parallel, corpus, str(tmp_path / "plain"), {})
    assert shown(one) == shown(plain)
    same(assemble([one.state]), assemble([plain.state]))


TOGETHER: dict[str, dict[str, Any]] = {
    "mid-round": {"federation.sync_every": 4, "checkpoint.every": 3},
    "in flight": {"federation.sync_every": 4, "federation.overlap_steps": 2, "checkpoint.every": 5},
    "fragments, in flight": {
        "federation.sync_every": 4,
        "federation.fragments": 2,
        "federation.overlap_steps": 1,
        "checkpoint.every": 4,
        "federation.weights": "tokens",
        "checkpoint.async_save": False,
        **SP,
    },
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_run_in_two_parts_is_the_run_in_one(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str, kind: str) -> None:
    changes = {**PARTIAL, **TOGETHER[kind]}
    every, world = changes["checkpoint.every"], 2 * changes.get("parallel.tp", 1)
    whole = ranks(world).run(at_site, corpus, str(tmp_path), changes, endpoint, 2)
    for site in range(2):
        for path in (tmp_path / str(site) / "checkpoints").iterdir():
            if int(path.name.rpartition("_")[2]) > every:
                (path / "leantron.json").unlink()
    rest = ranks(world).run(at_site, corpus, str(tmp_path), changes, endpoint, 2, True)
    for one, two in zip(whole, rest, strict=True):
        assert shown(two) == shown(one)[every:] and two.progress == one.progress
    for one_site, other_site in zip(by_site(whole, 2), by_site(rest, 2), strict=True):
        same(one_site, other_site)


def test_sites_that_stopped_at_different_steps_begin_from_a_common_one(
    ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str
) -> None:
    changes = {**PARTIAL, "federation.sync_every": 4, "checkpoint.every": 2}
    whole = ranks(2).run(at_site, corpus, str(tmp_path), changes, endpoint, 2)
    for site, newest in ((0, 6), (1, 4)):
        for path in (tmp_path / str(site) / "checkpoints").iterdir():
            if int(path.name.rpartition("_")[2]) > newest:
                (path / "leantron.json").unlink()
    for one, two in zip(whole, ranks(2).run(at_site, corpus, str(tmp_path), changes, endpoint, 2, True), strict=True):
        assert shown(two) == shown(one)[4:]
        same(assemble([one.state]), assemble([two.state]))


def test_expert_parallelism_inside_sites_changes_nothing(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    changes = {**PARTIAL, "federation.policy": "random", "train.steps": 4, "train.seed": 11}
    want = by_site(ranks(4).run(at_site, corpus, str(tmp_path / "one"), changes, endpoint, 2), 2)
    got = by_site(ranks(4).run(at_site, corpus, str(tmp_path / "two"), {**changes, "parallel.ep": 2}, endpoint, 2), 2)
    for one, other in zip(want, got, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=2e-6, msg=name)


def test_sites_go_on_in_another_layout(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    changes = {**PARTIAL, "federation.sync_every": 4, "checkpoint.every": 6}
    whole = ranks(2).run(at_site, corpus, str(tmp_path), changes, endpoint, 2)
    for layout in ({**SP}, {"parallel.pp": 2}, {"parallel.ep": 2, "parallel.distributed_optimizer": False}):
        for site in range(2):
            (tmp_path / str(site) / "checkpoints/step_00000008/leantron.json").unlink(missing_ok=True)
        rest = ranks(4).run(at_site, corpus, str(tmp_path), {**changes, **layout}, endpoint, 2, True)
        for site in range(2):
            assert [line["step"] for line in rest[2 * site].lines] == [7, 8]
            for one, two in zip(whole[site].lines[6:], rest[2 * site].lines, strict=True):
                assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        for one, other in zip(by_site(whole, 2), by_site(rest, 2), strict=True):
            for name, value in one.items():
                if name in other and other[name].shape == value.shape and not name.startswith("optimizer."):
                    torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5, msg=name)
