"""Where sites meet in tests, and a small data set."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from train.data.indexed import IndexedWriter


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Address of a lighthouse of this process, on loopback."""
    from moe.lighthouse import serve

    server, address = serve("127.0.0.1:0")
    yield address
    server.shutdown()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of an indexed data set of 120 documents of 20 to 300 bytes, each a phrase of its own said again and again."""
    prefix = tmp_path_factory.mktemp("corpus") / "phrases"
    rng = np.random.default_rng(5)
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        for _ in range(120):
            phrase = rng.integers(97, 123, size=rng.integers(3, 12))
            writer.add_document(np.append(np.resize(phrase, rng.integers(20, 300)), 256))
        writer.finish(f"{prefix}.idx")
    return str(Path(prefix))
