"""Where sites meet in tests, and a small data set."""

from collections.abc import Iterator

import pytest
from small_run import phrases


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of a lighthouse of this process, on loopback."""
    from moe.lighthouse import serve

    server, address = serve("127.0.0.1:0")
    yield address
    server.shutdown()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of the data set that `small_run.phrases` writes."""
    return phrases(tmp_path_factory.mktemp("corpus") / "phrases")
