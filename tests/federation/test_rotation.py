"""Experts of a rotating plan that change hands in whole runs: against a state written out by hand, after a stop, merged, and counted."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federated_run import FEDERATED, at_site
from ranks import RankPools
from small_engine import Piece, assemble
from small_run import Outcome, run_config
from stopped_site import lives
from sub_worlds import sub_worlds
from torch import Tensor

from moe.membership import Meeting
from moe.residency import ResidencyPlan
from train.checkpoint.tensors import StoredTensors
from train.config.compose import dump_config
from train.config.schema import RunConfig
from train.federation.accounting import sizes_from_index
from train.federation.agreement import Word
from train.federation.merged_run import write_merged
from train.federation.placement import Placement
from train.federation.planning import rotation_bytes
from train.federation.turning import Turning
from train.worker import Hopeless

ROTATING: dict[str, Any] = {
    "moe.mode": "skip",
    "federation.replication": 1,
    "federation.policy": "rotating",
    "federation.rotate_every": 2,
}
"""Experts change hands after the outer steps at 4 and 8."""
BLOCK, EXPERTS = 1, 4


def plan_of(sites: int, replication: int) -> ResidencyPlan:
    return ResidencyPlan.build(EXPERTS, sites, replication, "rotating", 7, [BLOCK], rotate_every=2)


Snapshot = tuple[list[Piece], dict[str, dict[str, Tensor]]]


def watched(
    corpus: str, place: str, changes: dict[str, Any], endpoint: str, sites: int, refuses: bool = False
) -> tuple[Outcome, list[tuple[Snapshot, Snapshot]]]:
    """A run, and this rank's state with its outer state just before and after each turn; `refuses`: site 1 votes against the first."""
    from small_engine import pieces

    from moe.outer import OuterStep

    after_step, hand_over, seen = Turning.after_step, OuterStep.hand_over, []

    def watch(self: Any, meeting: Any, round: int, step: int) -> bool:
        def state() -> Snapshot:
            class Held:
                chunks, optimizer = self._placement._chunks, self._placement._optimizer

            kept = self._outer.state_dict() if self._outer is not None else {"anchor": {}, "velocity": {}}
            return pieces(Held), {part: kept[part] for part in ("anchor", "velocity")}  # type: ignore[arg-type]

        if not self._placement.due(round):
            return after_step(self, meeting, round, step)
        before = state()
        done = after_step(self, meeting, round, step)
        seen.append((before, state()))
        return done

    with sub_worlds(sites) as here:

        def refuse(self: Any, named: Any, *, commit: Any, **rest: Any) -> Any:
            willing = here.site != 1 or bool(seen)
            return hand_over(self, named, commit=lambda ok: commit(ok and willing), **rest)

        Turning.after_step = watch  # type: ignore[method-assign]
        if refuses:
            OuterStep.hand_over = refuse  # type: ignore[method-assign, assignment]
        try:
            return at_site(corpus, place, changes, endpoint, sites, here=here), seen
        finally:
            Turning.after_step, OuterStep.hand_over = after_step, hand_over  # type: ignore[method-assign]


def owner(name: str) -> int | None:
    """The expert that a tensor is of."""
    words = name.split(".")
    return int(words[words.index("experts") + 1]) if "experts" in words else None


def sites_of(snapshots: Sequence[Snapshot], sites: int) -> list[dict[str, Tensor]]:
    """The whole state of each site, outer state included."""
    size = len(snapshots) // sites
    found = []
    for site in range(sites):
        mine = snapshots[site * size : (site + 1) * size]
        whole = assemble([parts for parts, _ in mine])
        for part in ("anchor", "velocity"):
            # A slice of a dense parameter is at each tensor-parallel rank.
            whole |= {f"{part}.{number}.{name}": value for number, (_, outer) in enumerate(mine) for name, value in outer[part].items()}
        found.append(whole)
    return found


LAYOUTS: list[Any] = [
    (2, 2, 1, {}),
    (3, 3, 2, {"train.global_batch": 3, "train.precision": "bf16"}),
    (4, 2, 1, {"parallel.ep": 2, "train.precision": "bf16"}),
    pytest.param(2, 2, 1, {"moe.mode": "frozen"}, marks=pytest.mark.slow),
    pytest.param(4, 2, 1, {"parallel.tp": 2, "parallel.sp": True, "federation.router_rows": "all"}, marks=pytest.mark.slow),
    pytest.param(4, 2, 1, {"train.precision": "bf16", "offload.mode": "stream", "offload.fraction": 0.6}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "sites", "replication", "layout"), LAYOUTS, ids=str)
def test_experts_that_change_hands_are_those_of_their_first_old_holder(
    ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str, world: int, sites: int, replication: int, layout: dict[str, Any]
) -> None:
    changes = {**ROTATING, "federation.replication": replication, "train.steps": 5, **layout}
    answers = ranks(world).run(watched, corpus, str(tmp_path), changes, endpoint, sites)
    assert {outcome.status for outcome, _ in answers} == {"completed"} and {len(seen) for _, seen in answers} == {1}
    before, after = (sites_of([seen[0][when] for _, seen in answers], sites) for when in (0, 1))
    plan = plan_of(sites, replication)
    moved = 0
    for site in range(sites):
        has = range(EXPERTS) if layout.get("moe.mode") == "frozen" else plan.resident(site, BLOCK, 2)
        assert {owner(name) for name in after[site]} - {None} == set(has)
        for name, value in after[site].items():
            expert = owner(name)
            stayed = expert is None or site in plan.holders(expert, BLOCK, 0) or site not in plan.holders(expert, BLOCK, 2)
            giver = site if stayed else plan.holders(expert or 0, BLOCK, 0)[0]
            if name in before[giver] and ".router.weight" not in name:
                assert torch.equal(value, before[giver][name]), (site, name)
                moved += not stayed
    assert moved >= 8 * len(plan.moves(2)) > 0


def test_a_turn_that_fails_changes_nothing_and_is_made_after_the_next_step(
    ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str
) -> None:
    changes = {**ROTATING, "train.steps": 6}
    answers = ranks(2).run(watched, corpus, str(tmp_path), changes, endpoint, 2, True)
    assert [len(seen) for _, seen in answers] == [2, 2]
    before, after = (sites_of([seen[0][when] for _, seen in answers], 2) for when in (0, 1))
    for site in range(2):
        assert before[site].keys() == after[site].keys()
        assert all(torch.equal(value, after[site][name]) for name, value in before[site].items())
        turned = {line["step"]: line["residency_round"] for line in answers[site][0].lines if "residency_round" in line}
        assert turned == {2: 0, 4: 0, 6: 3}
        assert held(answers[site][0]) == set(plan_of(2, 1).resident(site, BLOCK, 3))


def shown(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"], line["tokens"]) for line in outcome.lines]


def stored(place: Path, site: int, step: int) -> dict[str, Any]:
    manifest = json.loads((place / f"{site}/checkpoints/step_{step:08d}/leantron.json").read_text())
    found: dict[str, Any] = manifest["progress"]["federation"]
    return found


def test_a_run_stopped_around_a_turn_is_the_run_in_one_and_is_counted_and_merged(
    ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str
) -> None:
    changes = {**ROTATING, "checkpoint.every": 3, "federation.weights": "tokens"}
    place, plan = tmp_path / "sites", plan_of(2, 1)
    whole = ranks(2).run(at_site, corpus, str(place), changes, endpoint, 2)
    # A turn is saved at once, for there is no other copy of what came.
    steps = {int(path.name.rpartition("_")[2]) for path in (place / "0/checkpoints").iterdir()}
    assert steps == {3, 4, 6, 8} and [stored(place, 0, step)["residency_round"] for step in (3, 4, 6, 8)] == [0, 2, 2, 4]
    config = replace(run_config(corpus, {**FEDERATED, **changes, "federation.sites": 2}), run=RunConfig(name="r"))
    sizes = sizes_from_index(place / "0/checkpoints/step_00000008")
    for site, outcome in enumerate(whole):
        moved = {line["step"]: line["moved_bytes"] for line in outcome.lines if "moved_bytes" in line}
        want = {2: 0.0, 4: rotation_bytes(config, sizes, 2, site), 6: 0.0, 8: rotation_bytes(config, sizes, 4, site)}
        assert moved == want and want[4] > 0
        assert len({line["outer_payload_bytes"] for line in outcome.lines if "moved_bytes" in line}) == 1, "counted apart"
        assert [line["residency_round"] for line in outcome.lines if "moved_bytes" in line] == [0, 2, 2, 4]
    dump_config(config, tmp_path / "config.yaml")
    merged = StoredTensors(write_merged(tmp_path, 8).checkpoint)
    for expert in range(EXPERTS):
        (holder,) = plan.holders(expert, BLOCK, 4)
        at_holder = StoredTensors(place / f"{holder}/checkpoints/step_00000008")
        names = [name for name in merged.shapes if owner(name) == expert]
        assert len(names) == 8
        assert all(torch.equal(merged.read(name), at_holder.read(name)) for name in names)
    for newest in (4, 3):
        for path in (place / str(site) / "checkpoints" for site in range(2)):
            for each in path.iterdir():
                if int(each.name.rpartition("_")[2]) > newest:
                    (each / "leantron.json").unlink(missing_ok=True)
        rest = ranks(2).run(at_site, corpus, str(place), changes, endpoint, 2, True)
        for one, two in zip(whole, rest, strict=True):
            assert shown(two) == shown(one)[newest:] and two.progress == one.progress
            before, after = assemble([one.state]), assemble([two.state])
            assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_site_whose_experts_nobody_can_give_does_not_train() -> None:
    placement, votes = Placement.__new__(Placement), list[bool]()
    placement._config, placement._plan, placement._site, placement.round, placement.awaited = run_config("c", {}), plan_of(3, 1), 2, 0, []
    meetings: Any = SimpleNamespace(commit=lambda _, ok: votes.append(ok))
    nothing: Any = None
    turning = Turning(placement, meetings, nothing, nothing, None, None, 3)
    lines = {0: "b", 1: "b", 2: "a"}
    words = {site: Word(phase="ready", step=4, line=line, residency=2 if line == "b" else 0) for site, line in lines.items()}
    meeting = Meeting(
        members=(0, 1, 2), number=2, prefix="p", group="p", store="", steps=dict.fromkeys(lines, 2),
        data={site: word.to_dict() for site, word in words.items()},
    )  # fmt: skip
    before, after = (set(plan_of(3, 1).resident(2, BLOCK, round)) for round in (0, 2))
    come = ", ".join(f"{expert} of block 1" for expert in sorted(after - before))
    with pytest.raises(Hopeless, match=f"site 2 was away when experts changed hands .* no site that is there holds expert {come};"):
        turning.follow(meeting, words, 2)
    assert votes == [False]
    with pytest.raises(RuntimeError, match="missed that experts changed hands"):
        turning.refuse_missed(meeting, words, 2)
    turning.refuse_missed(meeting, words, 1)


AWAY: dict[str, Any] = {
    **FEDERATED,
    **ROTATING,
    "train.steps": 14,
    "train.global_batch": 3,
    "checkpoint.every": 20,
    "federation.quorum": 2,
    "federation.deadline": 30.0,
}


def held(outcome: Outcome) -> set[int]:
    return {expert for piece in outcome.state if (expert := owner(piece.name)) is not None}


@pytest.mark.slow
def test_a_turn_waits_for_a_site_that_is_away(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    changes = {**AWAY, "federation.rotate_every": 3}
    ((zero,), told), ((one,), _), ((_, two), _) = ranks(3).run(lives, corpus, str(tmp_path), endpoint, changes, 5, 8, timeout=240.0)
    assert any("step 6: experts are to change hands, and wait until all sites are there" in line for line in told)
    plan = replace(plan_of(3, 1), rotate_every=3)
    for site, outcome in enumerate((zero, one, two)):
        assert outcome.status == "completed" and held(outcome) == set(plan.resident(site, BLOCK, 7))
    turned = {line["step"]: line["residency_round"] for line in zero.lines if "residency_round" in line}
    assert turned[6] == turned[8] == 0 and turned[14] > 3
    assert zero.lines[-1]["experts_orphaned"] == 0


def test_a_site_that_missed_a_turn_follows_it(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    # It stops after the turn at 4, and of its checkpoints only the one before is left.
    changes = {**AWAY, "federation.replication": 2, "federation.rotate_every": 2, "checkpoint.every": 3}
    runs = ranks(3).run(lives, corpus, str(tmp_path), endpoint, changes, 5, 7, [4, 5], timeout=240.0)
    ((zero,), _), ((one,), _), ((_, two), own) = runs
    assert stored(tmp_path, 2, 3)["residency_round"] == 0
    assert any("experts changed hands; block 1:" in line for line in own)
    plan, states = plan_of(3, 2), [assemble([outcome.state]) for outcome in (zero, one, two)]
    assert two.status == "completed" and two.lines[0]["step"] > 8
    for site, state in enumerate(states):
        assert {owner(name) for name in state} - {None} == set(plan.resident(site, BLOCK, 6))
    for name, value in states[2].items():
        if not name.startswith("optimizer.") and "router" not in name:
            for other in states[:2]:
                assert name not in other or torch.equal(value, other[name]), name
