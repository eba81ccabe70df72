"""The plan's bytes are those of the optimiser, `auto` takes the least that fits, and what cannot be is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from launch.plan import show_plan
from train.config import check_offload
from train.config.check import check
from train.config.compose import compose
from train.config.errors import ConfigError
from train.config.plan import make_plan
from train.offload import OffloadedAdam
from train.offload.machine import gpu_bytes, host_bytes
from train.offload.plan import choose, every_mode, place
from train.offload.rates import ASSUMED

GIB = 2**30


@pytest.mark.parametrize("mode", ["none", "stream", "cpu_step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planned_bytes_are_those_of_the_optimiser(mode: str, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (30_000, 4_096, 77)]
    taken = OffloadedAdam(params, mode=mode, fraction=0.6).planned_bytes
    planned = place([sum(param.numel() for param in params)], dtype == torch.bfloat16, mode, 0.6, 4)
    assert planned.device_bytes == pytest.approx(taken["device"], rel=0.01, abs=2048)
    assert planned.host_bytes == pytest.approx(taken["host"], rel=0.01, abs=2048)


def test_seconds_follow_the_rates() -> None:
    count = 2**30
    none, stream, step = every_mode([count], True, 1.0, 8)
    assert none.seconds == 0.0
    assert stream.seconds == pytest.approx(12 * count / ASSUMED.both_ways)
    assert step.seconds == pytest.approx(count / (8 * ASSUMED.host_adam), rel=0.01)
    half = place([count], True, "stream", 0.5, 8)
    assert half.seconds == pytest.approx(stream.seconds / 2, rel=0.01)
    assert place([count // 2, count // 2], True, "stream", 1.0, 8).seconds == pytest.approx(stream.seconds)


@pytest.mark.parametrize(
    ("device", "host", "threads", "wanted"),
    [
        (13.0, 0.0, 16, ("none", 0.0)),
        (6.6, 20.0, 16, ("cpu_step", 0.47)),  # 16 cores update faster than the link carries 12 bytes both ways
        (6.6, 20.0, 1, ("stream", 0.5)),
        (6.6, 5.0, 16, None),
        (0.01, 20.0, 16, None),
    ],
)
def test_auto_takes_the_least_that_fits_then_the_quicker(device: float, host: float, threads: int, wanted: Any) -> None:
    chosen = choose([2**30], True, device * GIB, host * GIB, threads)
    assert wanted is None if chosen is None else (chosen.mode, pytest.approx(chosen.fraction, abs=0.011)) == wanted
    if chosen is not None and chosen.mode != "none":
        less = place([2**30], True, chosen.mode, chosen.fraction - 0.01, threads)
        assert less.device_bytes > device * GIB >= chosen.device_bytes


def planned(*overrides: str, world: int = 1) -> tuple[Any, dict[str, Any]]:
    config = check(compose(["model=gpt_1b", "train.recompute=full", *overrides]), world)
    return config, make_plan(config, world)


def test_the_plan_shows_all_modes_and_counts_what_stays(capsys: pytest.CaptureFixture[str]) -> None:
    config, plan = planned("offload=stream", "offload.fraction=0.75")
    json.dumps(plan)
    modes = {each["mode"]: each for each in plan["offload"]["modes"]}
    assert list(modes) == ["none", "stream", "cpu_step"] and plan["offload"]["assumptions"]
    assert plan["memory_model"]["optimizer"] * GIB == modes["stream"]["device_bytes"] < modes["none"]["device_bytes"]
    count = plan["parameters"]["total"]
    assert modes["none"]["device_bytes"] == pytest.approx(12 * count)
    assert modes["stream"]["host_bytes"] == pytest.approx(0.75 * 12 * count)
    show_plan(config, plan, Console(width=200))
    shown = capsys.readouterr().out
    assert "> stream 75%" in shown and "cpu_step 75%" in shown and "none: " in shown and "GB/s" in shown
    show_plan(*planned(), Console(width=200))
    assert "states (model)" not in capsys.readouterr().out


def test_two_processes_share_the_states() -> None:
    (_, one), (_, two) = planned("offload=stream"), planned("offload=stream", world=2)
    assert two["offload"]["modes"][1]["host_bytes"] == pytest.approx(one["offload"]["modes"][1]["host_bytes"] / 2)


def test_auto_is_resolved_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_offload, "host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(check_offload, "cores", lambda: 16)

    def mode(gpu: float | None) -> tuple[str, float]:
        monkeypatch.setattr(check_offload, "gpu_bytes", lambda: None if gpu is None else int(gpu * GIB))
        offload = planned("offload=auto")[0].offload
        return offload.mode, offload.fraction

    assert mode(None) == mode(80) == ("none", 1.0)
    big, small = mode(20), mode(16)
    assert big[0] == small[0] == "cpu_step" and 0.0 < big[1] < small[1] < 1.0
    with pytest.raises(ConfigError, match=r"offload\.mode=auto: no share of the states on the host makes the run fit"):
        mode(6)
    # The choice is itself a configuration that can be checked: keys of the mode that was not chosen are gone.
    for gpu, mode_of, adam in ((None, "none", "torch"), (80, "none", "torch"), (20, "cpu_step", "auto")):
        monkeypatch.setattr(check_offload, "gpu_bytes", lambda gpu=gpu: None if gpu is None else int(gpu * GIB))
        resolved = planned("offload=auto", "offload.cpu_adam=auto", "offload.prefetch=false")[0]
        assert (resolved.offload.mode, resolved.offload.cpu_adam, resolved.offload.prefetch) == (mode_of, adam, True)
        check(resolved, 1)

    def silent() -> int:
        raise OSError("nvidia-smi does not tell the GPU's memory")

    monkeypatch.setattr(check_offload, "gpu_bytes", silent)
    with pytest.raises(ConfigError, match=r"offload\.mode=auto: nvidia-smi does not tell"):
        planned("offload=auto")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("offload.mode=disk",), "offload.mode=disk: there is no such choice"),
        (("offload=stream", "offload.fraction=0.0"), "offload.fraction=0.0: it is a share of the states' bytes"),
        (("offload=stream", "offload.fraction=1.5"), "offload.fraction=1.5: it is a share of the states' bytes"),
        (("offload.fraction=0.5",), "offload.fraction=0.5: nothing is on the host with offload.mode=none; leave it out"),
        (("offload=auto", "offload.fraction=0.5"), "offload.fraction=0.5: offload.mode=auto chooses its own; leave it out"),
        (("offload=stream", "parallel.distributed_optimizer=false"), "offload.mode=stream: offloaded states are those of"),
        (("offload=cpu_step", "offload.prefetch=false"), "offload.prefetch=false: only offload=stream brings states ahead of the step"),
        (("offload.prefetch=false",), "offload.prefetch=false: only offload=stream brings states ahead of the step"),
        (("offload=stream", "offload.cpu_adam=auto"), "offload.cpu_adam=auto: only offload=cpu_step updates on the host"),
        (("offload=cpu_step", "offload.cpu_adam=apex"), "offload.cpu_adam=apex: there is no such choice"),
    ],
)
def test_what_cannot_be_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(compose(list(overrides)), 1)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


def test_the_machine_is_asked_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, tools = tmp_path / "dev", tmp_path / "bin"
    devices.mkdir()
    tools.mkdir()
    assert gpu_bytes({}, devices) is None
    (devices / "nvidia0").touch()
    assert gpu_bytes({"CUDA_VISIBLE_DEVICES": ""}, devices) is None
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(OSError, match="does not tell"):
        gpu_bytes({}, devices)
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 143771\necho 81559\n")
    (tools / "nvidia-smi").chmod(0o755)
    assert gpu_bytes({}, devices) == 81559 * 2**20
    assert 0 < host_bytes() < 2**50
