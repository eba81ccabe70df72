"""What the pictures are made of: block kinds against the pattern's definition, distinct layers, running means, expert loads."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2.pattern import S2Pattern
from train.report.curves import running_mean
from train.report.experts import MOST_COLUMNS, binned, layer_loads
from train.report.patterns import FUTURE, LEFT_OUT, STRIPE, WINDOW, distinct_layers, kinds, number_ranges
from train.tracking.readers import RunMetrics

PATTERN = S2Pattern(num_heads=8, num_kv_heads=4, block_size=16, local_blocks=2, stride=4, dense_layers=(0, 3))


def test_block_kinds_follow_the_definition() -> None:
    view = PATTERN.for_layer(1)
    got = kinds(view, 9)
    for head in range(8):
        for i in range(9):
            for j in range(9):
                if j > i:
                    expected = FUTURE
                elif i - j < 2:
                    expected = WINDOW
                else:
                    expected = STRIPE if view.attends(head, i, j) else LEFT_OUT
                assert got[head, i, j] == expected, (head, i, j)
    assert (got.max(axis=0)[np.tril_indices(9)] != LEFT_OUT).all(), "the heads together reach the whole context"


def test_a_dense_layer_has_neither_stripes_nor_gaps() -> None:
    got = kinds(PATTERN.for_layer(0), 9)
    assert (got[:, *np.tril_indices(9)] == WINDOW).all() and (got[:, *np.triu_indices(9, 1)] == FUTURE).all()


def test_layers_with_one_pattern_share_a_picture() -> None:
    assert list(distinct_layers(PATTERN, 6).values()) == [[0, 3], [1, 2, 4, 5]]
    rotating = S2Pattern(num_heads=2, num_kv_heads=2, block_size=16, local_blocks=2, stride=4, rotate=2)
    assert list(distinct_layers(rotating, 4).values()) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 0, 2, 3], "0, 2-3, 5"), ([], "")])
def test_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=200), st.integers(1, 40))
def test_a_running_mean_stays_inside_its_values(values: list[float], span: int) -> None:
    got = running_mean(np.array(values), span)
    finite = [value for value in values if math.isfinite(value)]
    assert len(got) == len(values)
    if not finite:
        assert np.isnan(got).all()
    else:
        inside = got[np.isfinite(got)]
        assert (inside >= min(finite) - 1e-6).all() and (inside <= max(finite) + 1e-6).all()


def test_a_running_mean_of_a_line_is_the_line_and_of_noise_is_smoother() -> None:
    line = np.arange(100.0)
    assert np.allclose(running_mean(line, 20)[:95], line[:95])
    noise = np.random.default_rng(0).standard_normal(1000)
    assert running_mean(noise, 50)[50:].std() < 0.5 * noise.std()


def test_expert_loads_are_relative_to_an_even_share_and_in_layer_order() -> None:
    lines = [{"step": step, "loss": 1.0, "expert_load": {"10": [0.5, 0.5], "2": [0.75, 0.25]}} for step in (5, 10)]
    got = layer_loads(RunMetrics(training=[*lines, {"step": 11, "loss": 1.0}]))
    assert list(got) == ["2", "10"]
    assert got["2"][0].tolist() == [5, 10] and got["2"][1].tolist() == [[1.5, 0.5], [1.5, 0.5]]


def test_binning_keeps_the_means() -> None:
    steps, loads = np.arange(2000.0), np.random.default_rng(0).random((2000, 4))
    columns, values = binned(steps, loads)
    assert len(columns) == len(values) == MOST_COLUMNS and columns[0] == 0
    assert np.allclose(values.mean(axis=0), loads.mean(axis=0))
    short, same = binned(steps[:3], loads[:3])
    assert short.tolist() == [0, 1, 2] and np.array_equal(same, loads[:3])
