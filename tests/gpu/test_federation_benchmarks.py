"""The benchmark of skipped experts at its small size on a GPU, in bf16 through the grouped multiplication and events."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
def test_skipping_is_measured_on_the_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.skip_throughput", "--small", "--out", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    whole, half, quarter, mask = found["rows"]
    assert whole["skip_rate"] == mask["skip_rate"] == 0.0 and 0 < half["skip_rate"] < quarter["skip_rate"] < 1
    parts = found["parts_ms"]
    assert 0 < parts["experts"] < parts["layer"] < parts["step"] and 0 < parts["share"] < 1
