"""What sites agree on, and which checkpoints are refused; plain functions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_engine import MOE, small_config

from train.config.schema import Config
from train.federation.agreement import Saved, Word, action, beginnings, complete, due, place
from train.federation.residency import residency_plan


def test_an_outer_step_is_due_and_fragments_take_turns() -> None:
    assert [step for step in range(1, 13) if due(step, 4, 1)[0]] == [4, 8, 12]
    assert due(4, 4, 1) == (True, None)
    turns = [due(step, 4, 2) for step in range(1, 9)]
    assert [turn for turn in turns if turn[0]] == [(True, 0), (True, 1), (True, 0), (True, 1)]
    # Each fragment comes every sync_every steps.
    assert [step for step in range(1, 25) if due(step, 6, 3) == (True, 1)] == [4, 10, 16, 22]


def word(phase: Any, step: int = 0, **more: Any) -> Word:
    return Word(phase=phase, step=step, line="", **more)


def test_a_word_survives_json() -> None:
    import json

    said = word("start", 7, fragment=2, tokens=5, saved=(Saved(4, 1, "a"), Saved(7, 1, "a")))
    assert Word.from_dict(json.loads(json.dumps(said.to_dict()))) == said


def test_a_meeting_is_for_whatever_is_furthest() -> None:
    assert action({0: word("start"), 1: word("start")}) == "start"
    assert action({0: word("start"), 1: word("ready")}) == "ready"
    assert action({0: word("ready"), 1: word("round", 4), 2: word("start")}) == "round"
    assert place({0: word("start", 9), 1: word("round", 4, fragment=0), 2: word("round", 8, fragment=1)}) == (8, 1)


def test_sites_that_start_wait_for_all_as_long_as_one_waits_for_the_rest() -> None:
    assert complete({0: word("start"), 1: word("start")}, 2, 30.0)
    assert not complete({0: word("start", waited=29.0)}, 2, 30.0)
    assert complete({0: word("start", waited=1.0), 2: word("start", waited=30.5)}, 3, 30.0)


def saved(*steps: tuple[int, int], line: str = "a") -> list[Saved]:
    return [Saved(step, round, line) for step, round in steps]


def test_sites_begin_from_one_round() -> None:
    assert beginnings({0: [], 1: []}, 5) == {0: None, 1: None}
    # Both have step 10; one was killed while it saved 15.
    assert beginnings({0: saved((5, 1), (10, 2), (15, 2)), 1: saved((5, 1), (10, 2))}, 5) == {0: 10, 1: 10}
    # One is a round ahead: back to the newest round that both have.
    assert beginnings({0: saved((5, 1), (10, 2)), 1: saved((5, 1))}, 5) == {0: 5, 1: 5}
    # Asked to stop at about the same time: each goes on from where it is, since a round is each site's own.
    assert beginnings({0: saved((10, 2), (13, 2)), 1: saved((10, 2), (14, 2))}, 5) == {0: 13, 1: 14}
    assert beginnings({0: saved((13, 2)), 1: saved((15, 2))}, 0) == {0: 13, 1: 15}
    # A site whose disk is lost, and one that was away for long, catch up.
    assert beginnings({0: saved((10, 2)), 1: [], 2: saved((10, 2))}, 5) == {0: 10, 1: None, 2: 10}
    assert beginnings({0: saved((5, 1)), 1: saved((20, 4), (25, 5)), 2: saved((20, 4), (25, 5))}, 5) == {0: None, 1: 25, 2: 25}


def test_parts_of_a_federation_that_went_different_ways_do_not_count_as_one() -> None:
    ways = {0: saved((10, 2), line="a"), 1: saved((10, 2), line="b"), 2: saved((10, 2), line="b")}
    assert beginnings(ways, 5) == {0: None, 1: 10, 2: 10}


def stored(config: Config, **changes: Any) -> dict[str, Any]:
    from train.federation.state import OuterKeeper

    about = OuterKeeper(config, residency_plan(config), None, {}).about()
    return {**about, "round": 3, "line": "a", "outer": {"flight": None}, **changes}


SITES = {**MOE, "moe.mode": "skip", "federation.sites": 2, "federation.site": 0, "federation.replication": 1}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("federation.replication", 2, "federation.replication: 1 then, 2 now"),
        ("federation.policy", "strided", "federation.policy: contiguous then, strided now"),
        ("federation.site", 1, "federation.site: 0 then, 1 now"),
        ("federation.fragments", 2, "federation.fragments: 1 then, 2 now"),
        ("federation.outer_momentum", 0.0, "federation.outer_momentum: over 0 then, 0 now"),
        ("train.seed", 8, "train.seed: 7 then, 8 now"),
        ("moe.experts", 8, "moe.experts: 4 then, 8 now"),
    ],
)
def test_a_checkpoint_of_other_sites_is_refused(key: str, value: Any, words: str) -> None:
    from train.federation.state import OuterKeeper

    before, after = small_config(SITES), small_config({**SITES, key: value})
    with pytest.raises(ValueError, match="was made with other sites") as refused:
        OuterKeeper(after, residency_plan(after), None, {}).expect(Path("step_5"), stored(before))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    OuterKeeper(before, residency_plan(before), None, {}).expect(Path("step_5"), stored(before))


def test_a_checkpoint_of_one_site_and_a_waiting_fragment_are_refused() -> None:
    from train.federation.state import OuterKeeper

    config = small_config({**SITES, "federation.fragments": 2})
    keeper = OuterKeeper(config, residency_plan(config), None, {})
    with pytest.raises(ValueError, match="belongs to a run of one site"):
        keeper.expect(Path("step_5"), None)
    other = replace(config, parallel=replace(config.parallel, tp=2))
    with pytest.raises(ValueError, match=r"parallel\.tp=2, parallel\.pp=1; go on with these"):
        keeper.expect(Path("step_5"), stored(other, outer={"flight": {}}))
    keeper.expect(Path("step_5"), stored(other))
