"""The devices of these tests: two GPUs with NCCL between them, or, marked slow, two gloo ranks on the CPU where there are no two GPUs.

On a CPU a few cases of each kind run, to keep the code alive; `python -m benchmarks.layouts --device cpu --small` runs all of them there.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import RankPools

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks.layout_cases import Cases


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """`cuda` or `cpu`, as the test's parameter says; skips, with the reason, where it is not the one to test."""
    count = torch.cuda.device_count()
    if request.param == "cuda" and count < 2:
        pytest.skip(f"needs two CUDA devices and finds {count}")
    if request.param == "cpu" and count >= 2:
        pytest.skip(f"{count} CUDA devices are here, on which this runs")
    return str(request.param)


@pytest.fixture(scope="session")
def pools(device: str, request: pytest.FixtureRequest) -> Iterator[RankPools]:
    """Pools of ranks on the device."""
    if device == "cpu":
        yield request.getfixturevalue("ranks")
        return
    made = RankPools(device)
    yield made
    made.close()


@pytest.fixture(scope="session")
def cases(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """The cases on the device; what one rank does is computed once."""
    return Cases(pools, tmp_path_factory.mktemp("cases"))
