"""Small data sets, written on the spot."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from train.data.indexed import IndexedWriter

# A busy machine draws its examples slowly: that is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

WriteDocuments = Callable[..., str]


@pytest.fixture
def write_documents(tmp_path: Path) -> WriteDocuments:
    """Return a function that writes lists of ids as an indexed data set without a manifest and returns its prefix."""

    def write(documents: Sequence[Sequence[int]], name: str = "data", vocab_size: int = 257) -> str:
        prefix = tmp_path / name
        with IndexedWriter(f"{prefix}.bin", vocab_size) as writer:
            for ids in documents:
                writer.add_document(np.array(ids, dtype=np.int64))
            writer.finish(f"{prefix}.idx")
        return str(prefix)

    return write


@pytest.fixture
def documents() -> list[list[int]]:
    """Return 40 documents of 1 to 60 ids below 256, each ended by 256, the tokens of each telling which document it is."""
    rng = np.random.default_rng(0)
    return [[*rng.integers(0, 256, size=rng.integers(0, 60)).tolist(), 256] for _ in range(40)]
