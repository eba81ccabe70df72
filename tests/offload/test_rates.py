"""Rates measured on this machine take the place of the assumed ones in the plan; what fits is what the plan's own bytes say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch import plan_offload
from launch.bandwidth import bandwidth
from launch.cli import main
from launch.plan_offload import show_offload
from train.config.check import check
from train.config.check_offload import DEVICE_SHARE, HOST_SHARE
from train.config.compose import compose
from train.config.errors import ConfigError
from train.config.largest import largest_models
from train.config.plan import make_plan, memory_model, optimizer_parts
from train.engine.layout import ParallelLayout
from train.offload import bandwidth as measuring
from train.offload.config import OffloadConfig
from train.offload.machine import cores
from train.offload.plan import place
from train.offload.rates import ASSUMED, current, keep, rates_path

GIB = 2**30


def test_without_a_measurement_the_rates_are_the_assumed_ones() -> None:
    assert not rates_path().exists() and current() is ASSUMED


def test_what_was_measured_counts_and_says_so() -> None:
    keep({"host_adam": 2e8})
    rates = current()
    assert (rates.host_adam, rates.both_ways, rates.one_way) == (2e8, ASSUMED.both_ways, ASSUMED.one_way)
    assert rates.source.startswith("this machine (host_adam, measured on 20") and rates.source.endswith(ASSUMED.source)
    keep({"host_adam": 2e8, "both_ways": 1e10, "one_way": 2e10})
    rates = current()
    assert (rates.both_ways, rates.one_way) == (1e10, 2e10) and rates.source.startswith("this machine, measured on 20")


def test_the_plans_seconds_and_the_choice_follow() -> None:
    config = check(compose(["offload=stream"]), 1)
    before = make_plan(config, 1)["offload"]
    keep({"both_ways": ASSUMED.both_ways / 10, "host_adam": ASSUMED.host_adam * 4, "one_way": ASSUMED.one_way})
    after = make_plan(config, 1)["offload"]
    old, new = ({each["mode"]: each["seconds"] for each in plan["modes"]} for plan in (before, after))
    assert new["stream"] == pytest.approx(10 * old["stream"]) and new["cpu_step"] < old["cpu_step"] and new["none"] == old["none"] == 0
    assert after["assumptions"]["measured_on"].startswith("this machine, measured on 20")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"rates": {}}', '{"date": "x", "rates": {"host_adam": -1}}', '{"date": "x", "rates": {"one_way": "fast"}}']
)
def test_a_damaged_file_is_one_line(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    keep({"host_adam": 1e8}).write_text(content)
    with pytest.raises(ConfigError, match=r"the rates measured on this machine cannot be read .*doctor --bandwidth"):
        current()
    assert main(["pretrain", "model=tiny", "offload=stream", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_measured_here_on_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The real measurement, of small sizes; what there is no GPU for stays assumed, in words."""
    monkeypatch.setattr(measuring.torch.cuda, "is_available", lambda: False)
    for name in ("host_copy_rate", "host_adam_rate"):
        real = getattr(measuring, name)
        monkeypatch.setattr(measuring, name, lambda *given, real=real, **named: real(10_000, *given, **named))
    assert bandwidth() == 0
    told = capsys.readouterr().out
    assert "link to a GPU: not measured, there is no CUDA device" in told and "plan: still 47.8 GB/s each way" in told
    assert "GB/s\nfused AdamW on the host" in told and str(rates_path()) in told
    kept = json.loads(rates_path().read_text())["rates"]
    assert list(kept) == ["host_adam"] and 0 < kept["host_adam"] == current().host_adam


def test_all_rates_of_a_gpu_replace_all_assumptions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"h2d": 5e10, "d2h": 4e10, "both_ways": 3e10, "host_copy": 1e10, "host_adam": 6e8, "host_adam_with_casts": 5e8}
    monkeypatch.setattr(measuring, "measure", lambda threads: found)
    assert main(["doctor", "--bandwidth"]) == 0
    rates = current()
    assert (rates.both_ways, rates.one_way, rates.host_adam) == (3e10, 4e10, 6e8 / cores())
    assert "plan: 30 GB/s each way now, instead of 47.8" in capsys.readouterr().out
    assert main(["doctor", "--fast"]) == 2


@pytest.mark.parametrize("overrides", [[], ["parallel=pp2"], ["moe=mixtral", "parallel=ep2"]], ids=str)
def test_the_largest_model_fits_and_one_more_layer_does_not(overrides: list[str]) -> None:
    world = 2 if overrides else 1
    config = check(compose(["model=gpt_1b", "train.recompute=full", "train.global_batch=8", *overrides]), world)
    layout = ParallelLayout.build(config, world)
    device, host = 24 * GIB, 48 * GIB
    found = {each.mode: each for each in largest_models(config, layout, device, host)}
    assert 0 < found["none"].layers < found["stream"].layers <= found["cpu_step"].layers

    def fits(layers: int, mode: str, fraction: float) -> bool:
        other = replace(config, model=replace(config.model, layers=layers), offload=OffloadConfig(mode=mode, fraction=fraction))
        states = place(optimizer_parts(other, layout), True, mode, fraction, 1)
        return memory_model(other, layout)["total"] * GIB <= DEVICE_SHARE * device and states.host_bytes <= HOST_SHARE * host

    for mode, each in found.items():
        assert each.layers % layout.pp == 0 and fits(each.layers, mode, each.fraction or 1.0)
        assert not any(fits(each.layers + layout.pp, mode, step / 20) for step in range(1, 21))


def test_nothing_fits_into_nothing() -> None:
    config = check(compose(["model=gpt_1b"]), 1)
    assert {each.layers for each in largest_models(config, ParallelLayout.build(config, 1), GIB // 8, GIB)} == {0}


@pytest.mark.parametrize("gpu", [None, 24 * GIB, GIB // 8])
def test_plan_shows_all_of_it(gpu: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(plan_offload, "gpu_bytes", lambda: gpu)
    monkeypatch.setattr(plan_offload, "host_bytes", lambda: 48 * GIB)
    config: Any = check(compose(["model=gpt_1b", "train.recompute=full", "offload=stream"]), 1)
    show_offload(config, make_plan(config, 1), 1, Console(width=200))
    told = capsys.readouterr().out
    assert "optimiser states of a process (model)" in told and ">  stream" in told and "upper bounds at these rates" in told
    if gpu is None:
        assert "largest model: not shown, there is no GPU here" in told
    else:
        assert "largest model (model): layers of this width on a GPU of" in told
        assert told.count("not even the embedding and a layer fit") == (0 if gpu > GIB else 3)
