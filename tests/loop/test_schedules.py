"""The learning rate against its closed forms, at the ends and in between."""

import itertools
import math

import pytest

from train.optim import OptimConfig, learning_rate

TOTAL = 100


def rates(**settings: object) -> list[float]:
    config = OptimConfig(lr=2.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(config, step, TOTAL) for step in range(1, TOTAL + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str, warmup: int) -> None:
    values = rates(schedule=schedule, warmup_steps=warmup)
    assert values[:warmup] == pytest.approx([2.0 * step / warmup for step in range(1, warmup + 1)] if warmup else [])
    if warmup:
        assert values[warmup - 1] == 2.0
    assert max(values) <= 2.0 and values[0] > 0.0


def test_cosine_falls_to_the_minimum() -> None:
    values = rates(schedule="cosine", warmup_steps=20, min_lr=0.5)
    for step in range(20, TOTAL + 1):
        assert values[step - 1] == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi * (step - 20) / 80)) / 2, rel=1e-12)
    after = values[19:]
    assert all(later < earlier for earlier, later in itertools.pairwise(after))
    assert values[59] == pytest.approx(1.25) and values[-1] == pytest.approx(0.5)


@pytest.mark.parametrize(("decay", "length"), [(None, 10), (25, 25), (80, 80)])
def test_wsd_is_stable_then_falls_linearly(decay: int | None, length: int) -> None:
    values = rates(schedule="wsd", warmup_steps=20, min_lr=0.25, decay_steps=decay)
    start = TOTAL - length
    assert values[20 - 1 : start] == [2.0] * (start - 20 + 1)
    for step in range(start + 1, TOTAL + 1):
        assert values[step - 1] == pytest.approx(0.25 + 1.75 * (TOTAL - step) / length, rel=1e-12)
    assert values[-1] == 0.25


def test_constant_stays() -> None:
    assert rates(schedule="constant", warmup_steps=5)[4:] == [2.0] * 96


def test_a_run_of_one_step_has_a_rate() -> None:
    for schedule in ("cosine", "wsd", "constant"):
        value = learning_rate(OptimConfig(lr=2.0, min_lr=0.5, schedule=schedule), 1, 1)
        assert 0.5 <= value <= 2.0


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.schedule=linear: use cosine, wsd or constant"):
        learning_rate(OptimConfig(schedule="linear"), 1, 10)
