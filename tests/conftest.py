"""Fixtures for all tests: pools of ranks, run folders, and the reason why a GPU test is skipped.

`tests/support` holds plain helper modules, importable from every test by their bare name (`from ranks import RankError`).
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ranks import RankPools

gc.disable()  # until all is collected: importing makes half a million objects that stay

LONGEST = ("s2/test_kernels.py", "launch/test_run.py", "checkpoint/test_going_on.py", "engine/test_layouts.py", "offload/test_engine.py")
"""Files that begin first, so that several workers end together."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(n)` is a long-lived pool of n gloo ranks; see tests/support/ranks.py."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's directory, not made yet, in a folder of this test's own."""
    return tmp_path / "runs" / "test"


def _why_no_cuda() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    built = (
        f"torch {torch.__version__} built for CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"torch {torch.__version__} is a CPU build"
    )
    return f"needs a CUDA device: {built} and finds none"


@pytest.fixture
def requires_cuda() -> None:
    """Skip, with the reason, where there is no CUDA device."""
    reason = _why_no_cuda()
    if reason is not None:
        pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        reason = _why_no_cuda()
        if reason is not None:
            pytest.skip(reason)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not walk it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first. Slow tests start real runs: they get a longer limit than the rest, unless they set one."""
    folder = Path(__file__).parent
    items.sort(key=lambda item: not (item.path.is_relative_to(folder) and item.path.relative_to(folder).as_posix() in LONGEST))
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))
