"""A small data set of bytes for runs of the training loop."""

import pytest
from small_run import phrases


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the data set that `small_run.phrases` writes."""
    return phrases(tmp_path_factory.mktemp("corpus") / "phrases")
