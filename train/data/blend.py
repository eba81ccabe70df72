"""Weighted blends of data sets: which set each sample comes from, evenly spread, without randomness and without state.

The sequence is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): after any number k of samples
the count of each set differs from its weight times k by less than one sample. Weights are brought to integers of sum P (exactly when
they are fractions of a small common denominator such as 0.7 and 0.3, else to the nearest 1/65,536), so the sequence repeats
after P samples, at which all counts are exact; sample k then needs one division, whatever was read before.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

_MAX_PERIOD = 1 << 16


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in proportion to `weights` (0 or more, not all 0), of sum at most 65,536.

    Raises:
        ValueError: if a weight is above 0 but below 1/65,536 of the sum.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [share / total for share in exact]
    period = lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return [int(share * period) for share in shares]
    smallest = min(share for share in shares if share)
    if smallest * _MAX_PERIOD < 1:
        raise ValueError(f"a share of {float(smallest):.3g} is below 1/{_MAX_PERIOD}")
    floors = [int(share * _MAX_PERIOD) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: floors[i] - shares[i] * _MAX_PERIOD)
    for i in by_rest[: _MAX_PERIOD - sum(floors)]:
        floors[i] += 1
    return floors


def chairman_sequence(weights: Sequence[int]) -> NDArray[np.int64]:
    """Return one period, (sum of weights,) int64: the set of each sample, by Tijdeman's rule.

    At step k a set is a candidate when its lead w k - P c (weight, period, count so far) is at least P / (2n - 2); of the candidates the
    one whose lead would first pass P (1 - 1/(2n - 2)) is taken.
    """
    n, period = len(weights), sum(weights)
    sequence = np.zeros(period, dtype=np.int64)
    if n == 1:
        return sequence
    leads = [0] * n
    parts = 2 * n - 2
    for k in range(period):
        best, best_time = -1, (0, 1)
        for i, weight in enumerate(weights):
            leads[i] += weight
            if leads[i] * parts >= period:
                time = (period * (parts - 1) - leads[i] * parts, weight)
                if best < 0 or time[0] * best_time[1] < best_time[0] * time[1]:
                    best, best_time = i, time
        sequence[k] = best
        leads[best] -= period
    return sequence


class Blend:
    """The sequence of data sets for given weights.

    Args:
        weights: (n,) floats, 0 or more (0: takes no part), not all 0; only their proportions matter.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = integer_weights(weights)
        self.period = sum(self.weights)
        self._sequence = chairman_sequence(self.weights)
        self._rank = np.zeros(self.period, dtype=np.int64)
        for i, weight in enumerate(self.weights):
            self._rank[self._sequence == i] = np.arange(weight)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each global sample number its data set and its number within that set (both int64, same shape)."""
        turns, within = np.divmod(samples, self.period)
        sets = self._sequence[within]
        return sets, turns * np.array(self.weights, dtype=np.int64)[sets] + self._rank[within]
