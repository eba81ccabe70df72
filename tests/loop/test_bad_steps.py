"""NaN and infinity: all ranks leave out the same step, whole, and a run without hope stops with one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Piece, build, pieces, small_config, take_step
from small_run import Outcome, faults, run, run_config

LAYOUTS: list[dict[str, Any]] = [
    {**MOE, "parallel.ep": 2},
    {"parallel.pp": 2},
    {"parallel.tp": 2, "parallel.sp": True},
    {"parallel.distributed_optimizer": False},
]


def around_a_bad_step(changes: dict[str, Any], kind: str, rank: int) -> tuple[list[bool], list[list[Piece]], list[float]]:
    """A good, a bad and a good step: what was updated, the state after each, the losses."""
    engine = build(small_config(changes))
    updated, states, losses = [], [], []
    with faults({2: kind}, rank):
        for step in (0, 1, 2):
            result = take_step(engine, step)
            updated.append(result.updated)
            losses.append(result.loss)
            states.append(pieces(engine))
    return updated, states, losses


def without_the_bad_step(changes: dict[str, Any]) -> list[Piece]:
    engine = build(small_config(changes))
    for step in (0, 2):
        take_step(engine, step)
    return pieces(engine)


def same(one: list[Piece], other: list[Piece]) -> bool:
    return all(torch.equal(a.data, b.data) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_a_bad_step_on_one_rank_is_left_out_on_all(ranks: RankPools, changes: dict[str, Any], kind: str) -> None:
    rank = 1  # the last pipeline stage, where the loss is
    answers = ranks(2).run(around_a_bad_step, changes, kind, rank)
    clean = ranks(2).run(without_the_bad_step, changes)
    for (updated, states, losses), end in zip(answers, clean, strict=True):
        assert updated == [True, False, True]
        assert losses == pytest.approx(answers[0][2], nan_ok=True)
        assert same(states[1], states[0]) and not same(states[2], states[1])
        # The step counts for nothing: moments, Adam's count of steps and the weights are those of a run that never saw it.
        assert same(states[2], end)


def in_a_run(corpus: str, run_dir: str, changes: dict[str, Any], at: Mapping[int, str]) -> Outcome:
    return run(run_config(corpus, changes), run_dir, at=at, rank=1)


def test_skipped_steps_are_counted_and_logged(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    changes = {"train.steps": 6, "train.log_every": 4, "train.max_bad_steps": 1}
    for outcome in ranks(2).run(in_a_run, corpus, str(tmp_path), changes, {2: "nan", 4: "inf", 6: "gradient"}):
        assert outcome.error is None and outcome.status == "completed"
        assert {key: outcome.progress[key] for key in ("step", "skipped", "skipped_in_a_row")} == {
            "step": 6,
            "skipped": 3,
            "skipped_in_a_row": 1,
        }
        assert [(line["step"], line["skipped_steps"]) for line in outcome.lines] == [(2, 1), (4, 2), (6, 3)]


@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_in_a_row_stop_the_run_with_one_line(ranks: RankPools, corpus: str, tmp_path: Path, limit: int) -> None:
    changes = {"train.steps": 9, "train.max_bad_steps": limit, "checkpoint.every": 1, "checkpoint.keep": 9}
    # An earlier bad step, followed by a good one, does not count.
    bad = dict.fromkeys((1, *range(3, 9)), "nan") if limit else {3: "nan"}
    outcomes = ranks(2).run(in_a_run, corpus, str(tmp_path), changes, bad)
    for outcome in outcomes:
        assert outcome.status == "failed" and outcome.progress["step"] == 3 + limit
        assert outcome.error == outcomes[0].error and outcome.error is not None
        assert outcome.error.startswith(f"train.max_bad_steps={limit}: {limit + 1} steps in a row had a NaN or infinite loss or gradient")
        assert outcome.error.endswith("lower optim.lr or look at the data") and "\n" not in outcome.error
