"""bf16 with fp32 masters, clipping, and what the loop reports."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Piece, assemble, build, micro_batches, names, pieces, small_config, take_step
from small_run import Outcome, run, run_config
from torch import Tensor

BF16 = {**MOE, "train.precision": "bf16", "optim.weight_decay": 0.0}


def tiny_updates(changes: dict[str, Any], steps: int) -> tuple[list[Piece], list[Piece], list[str]]:
    """The state before and after `steps` updates, each too small for bf16; the dtypes of the main gradients."""
    engine = build(small_config({**BF16, **changes}))
    before = pieces(engine)
    for _ in range(steps):
        take_step(engine, 0, lr=1e-7)
    return before, pieces(engine), [str(parameter.main_grad.dtype) for _, parameter in names(engine)]


def first_moments(changes: dict[str, Any]) -> tuple[float, list[Piece]]:
    engine = build(small_config(changes))
    norm = take_step(engine, 0).grad_norm
    return norm, [piece for piece in pieces(engine) if piece.name.startswith("optimizer.state.exp_avg.")]


def means(changes: dict[str, Any]) -> tuple[float, float, int, float]:
    """The step's loss, the same from the model's logits in float64, the valid tokens, bits a byte."""
    from train.engine.checkpoint import unwrap

    engine = build(small_config(changes))
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in micro_batches(engine, 0):
            logits = unwrap(engine.chunks[0])(batch.tokens, batch.positions, batch.cu_seqlens).double()
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
            valid = batch.loss_mask.flatten() > 0
            total, count = total + float(losses[valid].sum()), count + int(valid.sum())
    result = take_step(engine, 0)
    assert result.tokens == count
    return result.loss, total / count, count, result.bits_per_byte


@pytest.mark.parametrize("changes", [{}, {"parallel.distributed_optimizer": False}, {"parallel.pp": 2}], ids=str)
def test_updates_below_bf16s_resolution_are_not_lost(ranks: RankPools, changes: dict[str, Any]) -> None:
    answers = ranks(2).run(tiny_updates, changes, 8)
    assert {dtype for _, _, dtypes in answers for dtype in dtypes} == {"torch.float32"}
    before, after = (assemble([answer[i] for answer in answers]) for i in (0, 1))
    weights = [name for name in after if after[name].dtype == torch.bfloat16]
    assert len(weights) > 10
    for name in weights:
        master = next(key for key in after if key.startswith("optimizer.state.") and key.split(".", 3)[2:] == [master_kind(key), name])
        change = (after[master] - before[master]).abs().max()
        # Adam's update is at most about lr a step; all eight are there although none shows in bf16 by itself.
        assert 2e-7 < change < 1.2e-6, (name, float(change))
        same = (after[name] == before[name]).float().mean()
        assert same > 0.9, name
        assert torch.equal(after[master].bfloat16(), after[name])


def master_kind(key: str) -> str:
    kind = key.split(".")[2]
    return kind if kind in ("param", "fp32_param") else "none"


@pytest.mark.parametrize(
    "layout", [{}, {**MOE, "parallel.ep": 2}, {"parallel.pp": 2}, {**MOE, "parallel.tp": 2, "parallel.sp": True}], ids=str
)
def test_clipping_is_exact(ranks: RankPools, layout: dict[str, Any]) -> None:
    """Adam's first moment after one step is (1 - beta) times the gradient that it was given."""
    moments: dict[float, dict[str, Tensor]] = {}
    for clip in (0.0, 1e-2, 1e6):
        answers = ranks(2).run(first_moments, {**layout, "optim.clip": clip})
        norm = answers[0][0]
        moments[clip] = assemble([answer[1] for answer in answers])
    total = math.sqrt(sum(float(value.double().square().sum()) for value in moments[0.0].values())) / 0.1
    assert norm == pytest.approx(total, rel=1e-5), "the norm is that of all gradients, each counted once"
    assert norm > 1e-2
    for name, free in moments[0.0].items():
        assert torch.equal(moments[1e6][name], free), name
        torch.testing.assert_close(moments[1e-2][name], free * (1e-2 / (norm + 1e-6)), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("layout", [{}, {"train.micro_batch": 4}], ids=str)
def test_the_loss_is_the_mean_over_all_valid_tokens(ranks: RankPools, layout: dict[str, Any]) -> None:
    ((loss, want, _, bits),) = ranks(1).run(means, layout)
    assert loss == pytest.approx(want, rel=1e-6)
    assert bits == pytest.approx(want / math.log(2), rel=1e-6)  # a made-up target is one byte


def looped(corpus: str, run_dir: str, changes: dict[str, Any], resumed: bool = False) -> Outcome:
    return run(run_config(corpus, changes), run_dir, resumed)


EVALUATED = {**MOE, "train.steps": 4, "train.eval_every": 2, "train.eval_steps": 2, "train.log_every": 2, "optim.schedule": "cosine"}


def test_evaluation_does_not_depend_on_the_layout(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    (want,) = ranks(1).run(looped, corpus, str(tmp_path / "one"), EVALUATED)
    wanted = [(line["step"], line["val_loss"], line["val_bits_per_byte"]) for line in want.lines if "val_loss" in line]
    assert [step for step, *_ in wanted] == [2, 4] and wanted[0][1] != wanted[1][1]
    for number, layout in enumerate(({"parallel.ep": 2}, {"parallel.pp": 2}, {"parallel.tp": 2, "parallel.sp": True})):
        for outcome in ranks(2).run(looped, corpus, str(tmp_path / str(number)), {**EVALUATED, **layout}):
            got = [(line["step"], line["val_loss"], line["val_bits_per_byte"]) for line in outcome.lines if "val_loss" in line]
            for one, other in zip(wanted, got, strict=True):
                assert other == pytest.approx(one, rel=1e-5)


def test_evaluation_changes_nothing_of_the_training(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    (with_it,) = ranks(1).run(looped, corpus, str(tmp_path / "with"), EVALUATED)
    (without,) = ranks(1).run(looped, corpus, str(tmp_path / "without"), {**EVALUATED, "train.eval_every": 0, "train.eval_steps": 0})
    assert not [line for line in without.lines if "val_loss" in line]
    training = [line for line in with_it.lines if "loss" in line]
    for one, other in zip(training, without.lines, strict=True):
        assert (one["loss"], one["grad_norm"], one["expert_load"]) == (other["loss"], other["grad_norm"], other["expert_load"])
    for a, b in zip(with_it.state, without.state, strict=True):
        assert torch.equal(a.data, b.data), a.name


def test_lines_carry_the_documented_figures(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    outcomes = ranks(2).run(looped, corpus, str(tmp_path), {**EVALUATED, "train.log_every": 1, "parallel.ep": 2})
    for outcome in outcomes:
        training = [line for line in outcome.lines if "loss" in line]
        assert [line["step"] for line in training] == [1, 2, 3, 4]
        for line in training:
            documented = {
                "step",
                "tokens",
                "loss",
                "bits_per_byte",
                "lr",
                "grad_norm",
                "tokens_per_second",
                "step_seconds",
                "skipped_steps",
            }
            assert documented | {"data_seconds", "compute_seconds", "expert_load"} <= line.keys()
            assert not {"mfu", "memory_gib"} & line.keys(), "unknown on a CPU, so absent"
            assert set(line["expert_load"]) == {"1", "3"}
            for shares in line["expert_load"].values():
                assert len(shares) == 4 and sum(shares) == pytest.approx(1.0)
        tokens = [line["tokens"] for line in training]
        assert all(0 < later - earlier <= 4 * 96 for earlier, later in itertools.pairwise([0, *tokens]))
        assert training[0]["lr"] > training[1]["lr"] > training[2]["lr"] and training[3]["lr"] == 0.0
        assert outcome.status == "completed"
    first, second = outcomes
    assert [line["loss"] for line in first.lines if "loss" in line] == [line["loss"] for line in second.lines if "loss" in line]


def test_a_run_in_two_parts_is_the_run_in_one(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    changes = {**MOE, "train.steps": 6, "checkpoint.every": 3, "checkpoint.keep": 5, "parallel.ep": 2, "optim.schedule": "cosine"}
    whole = ranks(2).run(looped, corpus, str(tmp_path / "whole"), changes)
    # The second half alone, from the first half's checkpoint; the newer one is incomplete and so passed over.
    (tmp_path / "whole/checkpoints/step_00000006/leantron.json").unlink()
    rest = ranks(2).run(looped, corpus, str(tmp_path / "whole"), changes, True)
    for one, two in zip(whole, rest, strict=True):
        assert [line["step"] for line in two.lines] == [4, 5, 6]
        for a, b in zip(one.lines[3:], two.lines, strict=True):
            assert (a["loss"], a["grad_norm"], a["lr"], a["tokens"]) == (b["loss"], b["grad_norm"], b["lr"], b["tokens"])
        assert two.progress == one.progress
        for a, b in zip(one.state, two.state, strict=True):
            assert torch.equal(a.data, b.data), a.name
    assert sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir()) == ["step_00000003", "step_00000006"]


def test_other_data_than_the_checkpoints_is_refused(ranks: RankPools, corpus: str, tmp_path: Path) -> None:
    changes = {"train.steps": 2}
    ranks(1).run(looped, corpus, str(tmp_path), changes)
    (outcome,) = ranks(1).run(looped, corpus, str(tmp_path), {**changes, "train.steps": 3, "data.validation": 0.1}, True)
    assert outcome.error is not None and "\n" not in outcome.error
    assert "it was trained on other data (data.validation: 0.2 then, 0.1 now)" in outcome.error
