"""The benchmarks of runs over several sites at sizes for a CPU: they run, and what must be equal is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(module: str, folder: Path, *arguments: str) -> tuple[str, Any]:
    """What `python -m benchmarks.<module>` prints and writes."""
    option = "--results" if module == "quality" else "--out"
    command = [
        sys.executable,
        "-m",
        f"benchmarks.{module}",
        *arguments,
        option,
        str(folder / "out.json"),
        "--figure",
        str(folder / "out.png"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "out.png").stat().st_size > 5000
    return done.stdout, json.loads((folder / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_counted_bytes_are_the_formulas_and_give_the_known_ratios(tmp_path: Path) -> None:
    # Under the size from which the interface is compared: others use it while the tests run.
    said, found = run("federation_bytes", tmp_path, "--sites", "4", "--parameters", "60000")
    assert [row["name"] for row in found["rows"]] == ["DDP", "DiLoCo", "FoMoE r=1", "FoMoE r=2", "FoMoE r=4"]
    for row in found["rows"] + found["point"]:
        assert row["payload_ratio"] == pytest.approx(1.0, abs=1e-6) and row["ring_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert "by payload DDP/DiLoCo 32.00x, DiLoCo/FoMoE 1.42x, DDP/FoMoE 45.44x" in said
    assert "by ring    DDP/DiLoCo 32.00x, DiLoCo/FoMoE 1.65x" in said


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_experts_everywhere_is_diloco_and_missing_arms_are_named(tmp_path: Path) -> None:
    said, records = run("quality", tmp_path, "--toy", "--tokens", "49152", "--sync-every", "16", "--arms", "diloco", "r4", "r2", "frozen")
    by_arm = {record["arm"]: record for record in records}
    assert (by_arm["r4"]["merged"], by_arm["r4"]["sliced"]) == (by_arm["diloco"]["merged"], by_arm["diloco"]["sliced"])
    assert by_arm["r2"]["merged"] != by_arm["diloco"]["merged"] and by_arm["r2"]["history"][-1]["skip_rate"] > 0.2
    assert abs(by_arm["frozen"]["merged"] - by_arm["frozen"]["sliced"]) < 0.01, "the sites differ in router rows alone"
    assert "missing: ddp, r1, r1_rows, r2_rows, kept, mask" in said
    for record in records:
        assert record["commit"] and [line["step"] for line in record["history"]] == [16, 32, 48]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_site_skips_what_it_does_not_hold_and_the_control_skips_nothing(tmp_path: Path) -> None:
    _, found = run("skip_throughput", tmp_path, "--small")
    whole, half, quarter, mask = found["rows"]
    assert whole["skip_rate"] == mask["skip_rate"] == 0.0 and 0 < half["skip_rate"] < quarter["skip_rate"] < 1
    assert whole["parameters"] > half["parameters"] == mask["parameters"] > quarter["parameters"]
    assert 0 < found["parts_ms"]["share"] < 1 and found["layer_ms"] > 0
    assert whole["model"] == 1.0 < half["model"] < quarter["model"] and mask["model"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_an_outer_step_over_a_slow_link_takes_what_the_formula_says(tmp_path: Path) -> None:
    from benchmarks.throttled_link import unavailable

    if (reason := unavailable()) is not None:
        pytest.skip(f"no link between network namespaces here: {reason}")
    _, found = run("throttled_link", tmp_path, "--rates", "10", "--replications", "1")
    free, shaped = found["rows"]
    assert (free["rate_mbit"], shaped["rate_mbit"], shaped["sent"]) == (None, 10.0, free["sent"])
    assert shaped["sent"] == shaped["formula_ring"] == shaped["formula_payload"] / 2
    assert free["measured"] < shaped["ring_seconds"] <= shaped["measured"] < shaped["payload_seconds"], "both directions at once"
    assert [path.name for path in Path("/run/netns").glob("leantron-link-*")] == []
