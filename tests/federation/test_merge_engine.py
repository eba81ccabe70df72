"""Merged checkpoints in the engine: read by any layout, equal to the sites' states put together by hand, and gone on with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from real_runs import corpus
from small_engine import MOE, Piece, assemble, small_config
from small_run import Outcome, run, run_config

from train.config.compose import dump_config, load_config
from train.config.schema import RunConfig
from train.federation.merged_run import write_merged
from train.federation.residency import residency_plan

STEP = 2
SITES: dict[str, Any] = {**MOE, "moe.mode": "skip", "federation.sites": 2, "federation.replication": 1, "federation.policy": "strided"}


def train_site(directory: str, changes: dict[str, Any], site: int) -> list[Piece]:
    """STEP steps of a site by itself, on rows of its own, and its checkpoint; this rank's part of the state."""
    from small_engine import build, pieces, take_step

    from train.engine import checkpoint

    config = small_config({**changes, "federation.site": site})
    engine = build(config)
    for step in range(STEP):
        take_step(engine, 10 * site + step)
    plan = residency_plan(config)
    assert plan is not None
    checkpoint.save(
        Path(directory),
        STEP,
        engine.chunks,
        engine.optimizer,
        {
            "progress": {"step": STEP, "tokens": 1, "skipped": 0, "skipped_in_a_row": 0},
            "steps": 8,
            "next_sample": 16,
            "data": {"digest": "d"},
            "federation": {"site": site, "sites": 2, "round": 0, "plan": plan.to_dict()},
        },
    )
    return pieces(engine)


def load_and_train(path: str, run_dir: str, changes: dict[str, Any]) -> tuple[list[Piece], float, list[Piece]]:
    """The state of the merged run in a layout, and loss and state after one more step."""
    from small_engine import build, pieces, take_step

    config = load_config(Path(run_dir) / "config.yaml")
    for key, value in changes.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})  # type: ignore[arg-type]
    engine = build(config, load=path)
    before = pieces(engine)
    return before, take_step(engine, 5).loss, pieces(engine)


def by_hand(sites: list[dict[str, torch.Tensor]], plan: Any) -> dict[str, torch.Tensor]:
    """The merged state from the sites' whole states."""
    merged = {}
    for name in sorted({name for site in sites for name in site}):
        having = [site[name] for site in sites if name in site]
        total = torch.stack([value.double() for value in having]).mean(0)
        merged[name] = total.to(having[0].dtype)
        if ".router.weight" in name:
            layer = int(name.split("decoder.layers.")[1].split(".")[0])
            for expert in range(4):
                rows = [sites[site][name][expert].double() for site in plan.holders(expert, layer)]
                merged[name][expert] = torch.stack(rows).mean(0)
    return merged


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_sites_of_any_layout_are_read_by_any_layout(ranks: RankPools, tmp_path: Path, low: bool) -> None:
    changes = {**SITES, "train.precision": "bf16" if low else "fp32", "moe.bias_rate": 0.01}
    sites = []
    for site, layout in enumerate(({"parallel.ep": 2}, {"parallel.pp": 2})):
        folder = tmp_path / "trial" / "sites" / str(site) / "checkpoints"
        sites.append(assemble(ranks(2).run(train_site, str(folder), {**changes, **layout}, site)))
    config = replace(small_config(changes), run=RunConfig(name="trial"))
    dump_config(config, tmp_path / "trial" / "config.yaml")
    path = write_merged(tmp_path / "trial").checkpoint
    wanted = by_hand(sites, residency_plan(config))
    losses = []
    for count, layout in ((1, {}), (2, {"parallel.ep": 2, "parallel.tp": 2, "parallel.sp": True})):
        found = ranks(count).run(load_and_train, str(path), str(tmp_path / "trial" / "merged"), layout)
        before, after = assemble([parts[0] for parts in found]), assemble([parts[2] for parts in found])
        assert before.keys() == wanted.keys()
        for name, tensor in wanted.items():
            if low and not name.startswith("optimizer."):
                tensor = wanted[f"optimizer.state.param.{name}"].bfloat16() if f"optimizer.state.param.{name}" in wanted else tensor
            assert torch.equal(before[name], tensor), name
        losses.append(found[0][1])
        expert = "optimizer.state.param.decoder.layers.1.mlp.experts.3.w_in"
        assert not torch.equal(before[expert], after[expert]), "experts of both sites are trained on"
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if low else 1e-5)


def go_on(run_dir: str, data: str, changes: dict[str, Any]) -> Outcome:
    """The run in `run_dir` from its newest checkpoint to its sixth step."""
    return run(run_config(data, {**changes, "train.steps": 6, "optim.schedule": "constant"}), run_dir, resumed=True)


def begin(run_dir: str, data: str, changes: dict[str, Any]) -> Outcome:
    return run(run_config(data, {**changes, "train.steps": 3, "optim.schedule": "constant"}), run_dir)


def test_a_merge_of_one_site_goes_on_as_the_run_itself(ranks: RankPools, tmp_path: Path) -> None:
    data, run_dir = corpus(tmp_path / "set"), tmp_path / "trial"
    ranks(1).run(begin, str(run_dir), data, dict(MOE))
    dump_config(replace(run_config(data, MOE), run=RunConfig(name="trial")), run_dir / "config.yaml")
    merged = write_merged(run_dir).run_dir
    (own,) = ranks(1).run(go_on, str(run_dir), data, dict(MOE))
    (other,) = ranks(1).run(go_on, str(merged), data, dict(MOE))
    assert own.progress == other.progress and own.progress["step"] == 6
    mine, theirs = assemble([own.state]), assemble([other.state])
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
