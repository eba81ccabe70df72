"""The frame of the benchmark of several GPUs: what a trace tells, rows that fail, a budget that ends; and sites, on the CPU."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import layouts
from benchmarks.layout_cases import RankError
from benchmarks.layout_figure import draw, summary
from benchmarks.layout_speed import length, spent, union
from benchmarks.layouts import GROUPS, Bench, Row, chosen_device

ROOT = Path(__file__).resolve().parents[2]


def event(name: str, start: float, duration: float, cat: str = "kernel", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "tid": tid}


def test_spans_that_touch_or_overlap_become_one() -> None:
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (0.5, 1.0)]) == [(0.0, 4.0), (5.0, 6.0)]
    assert length(union([(0.0, 4.0), (1.0, 2.0), (7.0, 9.0)])) == 6.0


def test_exposed_is_communication_without_a_kernel_beside_it() -> None:
    found = spent(
        [
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 1000, 4000),
            event("ncclDevKernel_SendRecv(args)", 4000, 2000),  # overlaps the first for 1 ms: 5 ms of communication
            event("gemm", 0, 2000),
            event("adam", 5500, 2500),
            event("Memcpy HtoD", 2000, 2000, cat="gpu_memcpy"),
            event("nccl:all_reduce", 0, 9000, cat="gpu_user_annotation"),
            event("gloo:all_reduce", 0, 9000, cat="user_annotation"),
            {"ph": "i", "name": "ncclDevKernel", "ts": 0},
        ]
    )
    assert found["communication_ms"] == 5.0 and found["computing_ms"] == 4.5
    assert found["exposed_ms"] == 5.0 - 1.0 - 0.5
    assert found["communication_by_kind_ms"] == {"AllReduce_Sum_f32_RING_LL": 4.0, "SendRecv": 2.0}


def test_on_a_cpu_gloos_own_copies_are_no_computing() -> None:
    found = spent(
        [
            event("gloo:all_gather", 0, 3000, cat="user_annotation", tid=7),
            event("aten::copy_", 1000, 1000, cat="cpu_op", tid=7),
            event("aten::mm", 2000, 4000, cat="cpu_op"),
        ]
    )
    assert (found["communication_ms"], found["exposed_ms"], found["computing_ms"]) == (3.0, 2.0, 4.0)


def bench(tmp_path: Path, budget: float = 60.0) -> Bench:
    given = {"budget": budget, "small": True, "steps": 1, "only": list(GROUPS), "out": tmp_path / "out.json"}
    return Bench(argparse.Namespace(**given), "cpu", tmp_path)


def fails(_: float) -> dict[str, Any]:
    raise RankError("train: rank 1 failed\n--- rank 1 of 2\n  File x\nRuntimeError: a link is down", {})


def test_rows_after_a_failing_one_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = bench(tmp_path)
    good = {"loss": 1e-7, "grad_norm": 1e-7, "tolerance_loss": 1e-5, "tolerance_grad_norm": 1e-5, "holds": True}
    made.rows = lambda: [Row("layouts", "bad", 9.0, fails), Row("layouts", "good", 9.0, lambda _: dict(good))]  # type: ignore[method-assign]
    assert not made.run()
    bad, after = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert bad["error"] == "train: rank 1 failed: RuntimeError: a link is down" and "File x" in bad["details"]
    assert after["holds"] and "failed: train" in capsys.readouterr().out
    made.content["rows"] = []
    made.rows = lambda: [Row("layouts", "good", 9.0, lambda _: {**good, "holds": False})]  # type: ignore[method-assign]
    assert not made.run()
    made.content["rows"] = []
    made.rows = lambda: [Row("layouts", "good", 9.0, lambda _: dict(good))]  # type: ignore[method-assign]
    assert made.run()


def test_rows_that_the_budget_does_not_reach_are_named(tmp_path: Path) -> None:
    made = bench(tmp_path, budget=1.0)
    assert made.run()
    assert all("used up" in row["skipped"] for row in made.content["rows"])
    assert {row["group"] for row in made.content["rows"]} == set(GROUPS)
    assert made.content["summary"]["lines"][-1].startswith("not begun: TP 2, fp32; ")


def test_no_row_gets_more_than_what_is_left(tmp_path: Path) -> None:
    made, given = bench(tmp_path, budget=50.0), []
    made.measure(Row("speed", "long", 900.0, lambda seconds: given.append(seconds) or {}))
    made.measure(Row("speed", "short", 9.0, lambda seconds: given.append(seconds) or {}))
    assert 5 < given[0] <= 50 and given[1] == 9.0


def test_scaling_is_over_as_many_single_devices(tmp_path: Path) -> None:
    parts = {"exposed_ms": 2.0, "profiled_ms": 20.0, "ms": 16.0}
    rows = [
        {"group": "speed", "name": "one", "ranks": 1, "tokens_per_second": 100.0, "base": None, **parts},
        {"group": "speed", "name": "DP", "ranks": 2, "tokens_per_second": 150.0, "base": "one", **parts},
        {"group": "speed", "name": "TP", "error": "no", "base": "one"},
        {"group": "sites", "name": "one site", "sites": 1, "tokens_per_second": 10.0},
        {"group": "sites", "name": "two", "sites": 2, "tokens_per_second": 19.0},
    ]
    found = summary(rows)
    assert found["weak_scaling"] == {"DP": 0.75} and found["exposed_share"] == {"DP": 0.1} and found["over_one_site"] == {"two": 1.9}
    assert draw(rows, "CPU", tmp_path / "out.png") and (tmp_path / "out.png").stat().st_size > 5000
    assert not draw([], "CPU", tmp_path / "none.png")


def test_devices_that_are_not_there_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="needs two CUDA devices and finds 1; use --device cpu --small"):
        chosen_device("auto", False)
    with pytest.raises(SystemExit, match="add --small"):
        chosen_device("cpu", False)
    assert chosen_device("cpu", True) == "cpu"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_one_command_runs_and_reads_two_sites(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.layouts", "--device", "cpu", "--small", "--only", "sites"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    files = ["--out", str(tmp_path / "out.json"), "--figure", str(tmp_path / "out.png")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    one, whole, half = found["rows"]
    assert found["small"] and found["commit"] and whole["holds"] and half["holds"] and one["sites"] == 1
    for row in (whole, half):
        assert [site["rounds"] for site in row["bytes"]] == [2, 2] and row["outer_seconds"] > 0
    # Experts at one site only do not travel.
    assert half["bytes"][0]["sent"] < whole["bytes"][0]["sent"] / 2
    assert found["summary"]["over_one_site"].keys() == {whole["name"], half["name"]}
    assert (tmp_path / "out.png").stat().st_size > 5000
