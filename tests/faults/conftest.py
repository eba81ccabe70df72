"""Forked runs and their data."""

from collections.abc import Iterator

import pytest
from real_runs import TINY, Forge, corpus


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """Starts ranks by forking; see tests/support/real_runs.py."""
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of milliseconds a step, its data included."""
    return [*TINY, f"data.paths=[{corpus(tmp_path_factory.mktemp('corpus') / 'letters')}]"]
