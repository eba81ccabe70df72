"""The benchmark's frame: bounds from rates, rows that fail or take too long, and a file that holds everything so far."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import offload
from benchmarks.offload import Bench, add_bounds, bound_seconds, find_largest, measure_modes
from benchmarks.offload_row import MODEL, configuration

RATES = {"both_ways": 4e10, "h2d": 5e10, "host_adam": 1e9}
STEP = {"waited_ms": None, "peak_device_gib": None, "host_rss_gib": 1.0, "tokens_per_second": 1.0}


def bench(tmp_path: Path, budget: float = 60.0, **settings: Any) -> Bench:
    given = {"budget": budget, "out": tmp_path / "out.json", "tokens": [64], "steps": 1, "modes": ["none", "stream"], **MODEL, **settings}
    made = Bench(argparse.Namespace(**given))
    made.content["rates"] = RATES
    return made


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have every row run `script` (sh) instead; $4 is the file for the result."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(offload.sys, "executable", str(path))


def test_bounds() -> None:
    rows: list[dict[str, Any]] = [
        {"mode": "none", "parameters": 10**9, "steps": [{"tokens": 64, "ms": 100.0}]},
        {"mode": "stream_late", "parameters": 10**9, "steps": [{"tokens": 64, "ms": 350.0}, {"tokens": 128, "ms": 1.0}]},
        {"mode": "cpu_step_deepspeed", "parameters": 10**9, "host_adam": 5e8, "steps": [{"tokens": 64, "ms": 50.0}]},
        {"mode": "hybrid", "error": "no"},
    ]
    add_bounds(rows, RATES)
    assert [step["over_none_ms"] for row in rows for step in row.get("steps", ())] == [0.0, 250.0, None, -50.0]
    late, deepspeed = rows[1]["steps"][0], rows[2]["steps"][0]
    assert late["bound_ms"] == pytest.approx(12e9 / 4e10 * 1e3) and rows[0]["steps"][0]["bound_ms"] is None
    assert deepspeed["bound_ms"] == pytest.approx((2 + 4 * 2**24 / 5e10) * 1e3)
    assert bound_seconds({"mode": "stream", "parameters": 1}, {}) is None


def test_a_row_that_takes_too_long_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"parameters": 8, "optimizer_device_bytes": 0, "optimizer_host_bytes": 0, "build_seconds": 1.0, "planned_bytes": None}
    row["steps"] = [{"tokens": 64, "ms": 5.0, **STEP}]  # type: ignore[assignment]
    child(tmp_path, monkeypatch, f"echo '{json.dumps(row)}' > $4; exec sleep 600")
    started = time.monotonic()
    made = bench(tmp_path, budget=3.0)
    measure_modes(made)
    assert time.monotonic() - started < 60
    first, second = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert first["steps"][0]["ms"] == 5.0 and first["error"].startswith("stopped after ")
    assert second == {"mode": "stream", "error": "not begun: --budget 3 is used up"}


def test_a_row_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    child(tmp_path, monkeypatch, "echo out of luck >&2; exit 7")
    made = bench(tmp_path, modes=["cpu_step"])
    measure_modes(made)
    assert made.content["rows"] == [{"mode": "cpu_step", "error": "exit code 7: out of luck"}]
    assert "failed: exit code 7: out of luck" in capsys.readouterr().out
    child(tmp_path, monkeypatch, """echo '{"mode": "cpu_step", "error": "ValueError: no"}' > $4; exit 1""")
    assert made.ask({})["error"] == "ValueError: no"


def test_the_largest_is_looked_for_from_the_plan_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "gpu_bytes", lambda: 24 * 2**30)
    monkeypatch.setattr(offload, "host_bytes", lambda: 48 * 2**30)
    asked: list[dict[str, Any]] = []

    def answer(self: Bench, request: dict[str, Any], most: float = 0.0) -> dict[str, Any]:
        asked.append(request)
        runs = request["layers"] < asked[0]["layers"]
        return {"runs": runs, **({"step_seconds": [1.0]} if runs else {"reason": "OutOfMemoryError: no"})}

    monkeypatch.setattr(Bench, "ask", answer)
    made = bench(tmp_path, largest=["stream"])
    find_largest(made)
    first, second, third = (request["layers"] for request in asked)
    assert 0 < second < third < first and all(0 < request["fraction"] <= 1 and request["recompute"] == "full" for request in asked)
    assert [row["runs"] for row in json.loads((tmp_path / "out.json").read_text())["largest"]] == [False, True, True]
    monkeypatch.setattr(offload, "gpu_bytes", lambda: None)
    find_largest(made)
    assert len(asked) == 3


def test_the_model_is_the_one_asked_for() -> None:
    config = configuration({**MODEL, "width": 256, "heads": 4, "ffn_width": 640}, layers=3)
    sizes = config.model
    assert (sizes.layers, sizes.width, sizes.ffn_width, sizes.heads, sizes.kv_heads, sizes.head_dim) == (3, 256, 640, 4, 4, 64)
