"""Conditional entropy against a direct count in pure Python."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.build import build_dataset
from train.data.entropy import bigram_bits_per_byte, conditional_entropy
from train.data.tokenizer import load_tokenizer


def naive(documents: list[list[int]], order: int) -> float:
    """Return the mean of -log2 p(token | context) with p from the counts of the documents themselves."""
    grams = [tuple(doc[i : i + order + 1]) for doc in documents for i in range(len(doc) - order)]
    full, context = Counter(grams), Counter(gram[:-1] for gram in grams)
    return -sum(math.log2(full[gram] / context[gram[:-1]]) for gram in grams) / len(grams)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=60), min_size=1, max_size=6),
    order=st.integers(0, 4),
    scale=st.sampled_from([1, 28_000]),
)
def test_equals_the_direct_count(documents: list[list[int]], order: int, scale: int) -> None:
    documents = [[token * scale for token in doc] for doc in documents]  # large ids take the sorting way
    ids = np.array([token for doc in documents for token in doc], dtype=np.int32)
    starts = np.cumsum([0] + [len(doc) for doc in documents[:-1]])
    assert conditional_entropy(ids, order, starts) == pytest.approx(naive(documents, order), abs=1e-9)
    assert conditional_entropy(ids, order) == pytest.approx(naive([ids.tolist()], order), abs=1e-9)


def test_known_values() -> None:
    assert conditional_entropy(np.array([0, 1] * 50), 1) == 0.0
    assert conditional_entropy(np.arange(256).repeat(2), 0) == pytest.approx(8.0)
    fair = np.random.default_rng(0).integers(0, 2, 200_000)
    assert conditional_entropy(fair, 1) == pytest.approx(1.0, abs=1e-3)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="order=-1"):
        conditional_entropy(np.arange(5), -1)
    with pytest.raises(ValueError, match="no n-gram"):
        conditional_entropy(np.arange(2), 2)
    with pytest.raises(ValueError, match="no document"):
        conditional_entropy(np.arange(4), 1, np.arange(4))


def test_bits_per_byte_count_as_the_loss_does(tmp_path: Path) -> None:
    texts = ["abcabcabd", "aé", "b"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    build_dataset([tmp_path / f"{i}.txt" for i in range(3)], tmp_path / "set", "byte")
    documents = [[*text.encode(), 256] for text in texts]
    transitions = sum(len(doc) - 1 for doc in documents)
    predicted_bytes = sum(len(doc) - 2 for doc in documents)  # neither the first byte nor eod
    want = naive(documents, 1) * transitions / predicted_bytes
    assert bigram_bits_per_byte(str(tmp_path / "set"), load_tokenizer("byte")) == pytest.approx(want, rel=1e-12)
