"""The package as a stranger meets it: lazy, complete, free of Megatron-core, and its documentation's code runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe

ROOT = Path(moe.__file__).resolve().parents[1]


def test_every_name_is_there() -> None:
    assert sorted(moe._HOME) == moe.__all__ == sorted(moe.__all__)
    for name in moe.__all__:
        assert getattr(moe, name).__module__ == f"moe.{moe._HOME[name]}"
    with pytest.raises(AttributeError, match="no attribute 'Routr'"):
        moe.Routr  # noqa: B018


def test_importing_it_loads_neither_torch_nor_core() -> None:
    code = """
import sys, moe, moe.config, moe.residency, moe.cost, moe.membership, moe.lighthouse
assert "torch" not in sys.modules and "torchft" not in sys.modules
for name in moe.__all__: getattr(moe, name)
assert "torch" in sys.modules and not any(m.split(".")[0] in ("megatron", "train", "launch", "s2") for m in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_documentation_runs() -> None:
    page = (ROOT / "docs" / "moe.md").read_text()
    blocks = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "\nimport " in f"\n{code}" or "\nfrom " in f"\n{code}"]
    assert len(blocks) >= 3
    for code in blocks:
        exec(compile(code, "docs/moe.md", "exec"), {})
