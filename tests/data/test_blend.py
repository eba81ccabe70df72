"""Blends: the realised counts stay within one sample of the weights at every moment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.blend import Blend, chairman_sequence, integer_weights


def counts_after_each(sequence: np.ndarray, sets: int) -> np.ndarray:
    """Return (n, sets) how often each set occurred among the first k samples, k = 1..n."""
    return np.cumsum(sequence[:, None] == np.arange(sets), axis=0)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_counts_are_within_one_sample_of_the_weights(weights: list[int]) -> None:
    period = sum(weights)
    counts = counts_after_each(chairman_sequence(weights), len(weights))
    ideal = np.arange(1, period + 1)[:, None] * np.array(weights) / period
    assert np.abs(counts - ideal).max() < 1
    assert counts[-1].tolist() == weights


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [0.5, 0.3, 0.2], [3, 1], [1e9, 1.0e9, 123_456_789.0], [0.9] + [0.0125] * 8, [np.pi, np.e, 1]]
)
def test_shares_hold_over_many_periods(weights: list[float]) -> None:
    n, blend = 200_000, Blend(weights)
    sets, _ = blend.locate(np.arange(n))
    counts = counts_after_each(sets, len(weights))
    ideal = np.arange(1, n + 1)[:, None] * np.array(weights) / sum(weights)
    # one sample, and what rounding weights to 1/65,536 can add over this many
    exact = blend.period < 1 << 16
    assert np.abs(counts - ideal).max() < (1 if exact else 1 + n / (1 << 16))


def test_decimal_weights_are_exact() -> None:
    assert integer_weights([0.7, 0.3]) == [7, 3]
    assert integer_weights([0.1, 0.2, 0.3, 0.4]) == [1, 2, 3, 4]
    assert integer_weights([2.5, 2.5]) == [1, 1]
    assert sum(integer_weights([1 / 3, 1 / 7, 0.123456])) == 1 << 16


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5), start=st.integers(0, 10**12))
def test_a_sample_is_found_without_the_ones_before(weights: list[int], start: int) -> None:
    blend = Blend([float(weight) for weight in weights])
    sets, within = blend.locate(np.arange(start, start + 300))
    for i in range(len(weights)):
        mine = within[sets == i]
        assert np.array_equal(mine, mine[0] + np.arange(mine.size)) if mine.size else True
    alone = [blend.locate(np.array([start + k])) for k in (0, 17, 299)]
    assert [(int(s[0]), int(w[0])) for s, w in alone] == [(int(sets[k]), int(within[k])) for k in (0, 17, 299)]


def test_too_small_a_share_is_refused() -> None:
    with pytest.raises(ValueError, match="below 1/65536"):
        Blend([1.0, 1e-7])
