"""Evaluation of trained runs: the run's own validation again, the merged model of several sites, and what each site's share of it has."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools
from real_runs import corpus
from small_engine import MOE
from small_run import Outcome, run, run_config

from train.config.compose import dump_config, load_config
from train.config.errors import ConfigError
from train.config.schema import Config, RunConfig
from train.evaluate import Result, SiteResult, show, sliced_config, with_overrides
from train.federation.residency import residency_plan

EVALUATED = {**MOE, "train.eval_steps": 3, "train.steps": 3}
SITES: dict[str, Any] = {**EVALUATED, "moe.mode": "skip", "federation.sites": 2, "federation.replication": 1}


def train_alone(run_dir: str, data: str, changes: dict[str, Any]) -> Outcome:
    return run(run_config(data, changes), run_dir)


def evaluate(run_dir: str, *arguments: Any) -> dict[str, Any]:
    from train.evaluate import evaluate_run

    return asdict(evaluate_run(Path(run_dir), *arguments))


def save_sites(run_dir: str, changes: dict[str, Any]) -> None:
    """Both sites' checkpoints after two steps, each on rows of its own."""
    from megatron.core import parallel_state
    from small_engine import build, small_config, take_step

    from train.engine import checkpoint

    for site in range(2):
        config = small_config({**changes, "federation.site": site})
        engine = build(config)
        for step in range(2):
            take_step(engine, 10 * site + step)
        plan = residency_plan(config)
        assert plan is not None
        stored = {
            "progress": {"step": 2, "tokens": 1, "skipped": 0, "skipped_in_a_row": 0},
            "steps": 8, "next_sample": 16, "data": {"digest": "d"},
            "federation": {"site": site, "sites": 2, "round": 0, "plan": plan.to_dict()},
        }  # fmt: skip
        checkpoint.save(Path(run_dir) / "sites" / str(site) / "checkpoints", 2, engine.chunks, engine.optimizer, stored)
        parallel_state.destroy_model_parallel()


def silenced(run_dir: str, site: int) -> tuple[float, float]:
    """The merged model with the experts that are not at `site` putting out zeros: what the sliced model must equal with gate=full."""
    import torch

    from train.engine.step import evaluate as evaluate_chunks
    from train.evaluate import _batches, alone
    from train.trained import find, load_chunks, start

    whole = load_config(Path(run_dir) / "config.yaml")
    plan = residency_plan(whole)
    assert plan is not None
    config, path = find(Path(run_dir), None)
    config = alone(config)
    ranks = start(config)
    chunks = load_chunks(config, path, ranks)
    with torch.no_grad():
        for layer in plan.layers:
            for expert in set(range(4)) - set(plan.resident(site, layer)):
                chunks[0].decoder.layers[layer].mlp.experts.w_out[expert] = 0.0
    train = config.train
    return evaluate_chunks(
        chunks, _batches(config, ranks.device), ranks,
        steps=train.eval_steps, micro_batches=train.global_batch // train.micro_batch, rows=train.micro_batch, seq_len=train.seq_len,
    )  # fmt: skip


@pytest.mark.parametrize(("count", "layout"), [(1, {}), (2, {"parallel.ep": 2})])
def test_a_run_is_evaluated_as_it_validates_itself(ranks: RankPools, tmp_path: Path, count: int, layout: dict[str, Any]) -> None:
    data, run_dir = corpus(tmp_path / "set"), tmp_path / "trial"
    outcome = ranks(count).run(train_alone, str(run_dir), data, {**EVALUATED, **layout})[0]
    dump_config(replace(run_config(data, {**EVALUATED, **layout}), run=RunConfig(name="trial")), run_dir / "config.yaml")
    own = next(line for line in reversed(outcome.lines) if "val_loss" in line)
    (found,) = ranks(1).run(evaluate, str(run_dir))
    if count == 1:
        assert (found["val_loss"], found["val_bits_per_byte"]) == (own["val_loss"], own["val_bits_per_byte"])
    assert found["val_loss"] == pytest.approx(own["val_loss"], rel=1e-6)
    assert (found["step"], found["eval_steps"], found["sites"]) == (3, 3, None)
    (fewer,) = ranks(1).run(evaluate, str(run_dir), ["train.eval_steps=1"])
    assert fewer["eval_steps"] == 1 and fewer["val_loss"] != found["val_loss"]


def test_merged_and_sliced_models(ranks: RankPools, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, run_dir = corpus(tmp_path / "set"), tmp_path / "trial"
    config = run_config(data, SITES)
    ranks(1).run(save_sites, str(run_dir), {**SITES, "model.vocab_size": 257, "data.paths": [data], "train.global_batch": 4})
    dump_config(replace(config, run=RunConfig(name="trial")), run_dir / "config.yaml")
    (found,) = ranks(1).run(evaluate, str(run_dir))
    (again,) = ranks(1).run(evaluate, str(run_dir / "merged"))
    assert again["val_loss"] == found["val_loss"] and again["sites"] is None
    for site, each in enumerate(found["sites"]):
        assert (each["site"], each["experts"]) == (site, [2, 2])
        (expected,) = ranks(1).run(silenced, str(run_dir), site)
        assert each["val_loss"] == pytest.approx(expected[0], rel=1e-6)
        assert each["val_loss"] != pytest.approx(found["val_loss"], rel=1e-6)
        assert each["gap_bits_per_byte"] == each["val_bits_per_byte"] - found["val_bits_per_byte"]


def test_only_data_and_batches_may_be_others() -> None:
    changed = with_overrides(Config(), ["data=custom", "data.paths=[a]", "train.eval_steps=5"])
    assert changed.data.paths == ["a"] and changed.train.eval_steps == 5 and changed.model == Config().model
    with pytest.raises(ConfigError, match=r"model.layers=9: an evaluation takes the run's own; leave it out"):
        with_overrides(Config(), ["model.layers=9"])


@pytest.mark.parametrize(("mode", "gate", "sliced"), [("skip", "kept", "skip"), ("mask", "full", "mask"), ("frozen", "full", "skip")])
def test_a_slice_is_routed_as_its_site_was(mode: str, gate: str, sliced: str) -> None:
    whole = run_config("x", {**SITES, "moe.mode": mode, "moe.gate": gate})
    config = sliced_config(whole, run_config("x", EVALUATED), 1)
    assert (config.moe.mode, config.moe.gate, config.federation.site) == (sliced, gate, 1)


def test_the_table_has_the_gap_of_every_site(capsys: pytest.CaptureFixture[str]) -> None:
    sites = [
        SiteResult(site=site, experts=[2, 3], val_loss=1.5, val_bits_per_byte=2.5 + site, gap_bits_per_byte=0.5 + site) for site in (0, 1)
    ]
    result = Result(
        run="runs/x", checkpoint="c", step=7, eval_steps=4, val_loss=1.25, val_bits_per_byte=2.0, bigram_bits_per_byte=3.5, sites=sites
    )
    show(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/x: step 7, 4 global batches, bigram entropy of the data 3.5000"
    assert lines[2].split() == ["merged", "all", "1.2500", "2.0000"]
    assert lines[4].split() == ["site", "1,", "sliced", "2", "to", "3", "1.5000", "3.5000", "+1.5000"]
    show(replace(result, sites=None))
    line = "runs/x: step 7, 4 global batches: validation loss 1.2500, 2.0000 bits per byte, bigram entropy of the data 3.5000\n"
    assert capsys.readouterr().out == line
    assert json.loads(json.dumps(asdict(result)))["sites"][0]["gap_bits_per_byte"] == 0.5
