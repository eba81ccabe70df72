"""Runs `interpreted*.py`, the tests of the Triton kernels, in a process where Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", ["interpreted.py", "interpreted_decode.py", "interpreted_masked.py"])
def test_the_kernels_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
