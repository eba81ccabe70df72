"""Two devices train as one does, whatever they share, and checkpoints move between layouts; over NCCL, with S2 in its kernels."""

import pytest
from on_devices import on_devices

from benchmarks.layout_cases import CASES, MOVES, STEPS, Cases, deviations

PRECISIONS = ("fp32", "bf16")


@pytest.mark.parametrize(
    ("device", "name", "precision"),
    on_devices(
        [(name, precision) for precision in PRECISIONS for name in CASES],
        [("TP 2 + SP", "fp32"), ("S2 dense head, TP 2", "bf16"), ("offload half of it, DP 2", "fp32")],
    ),
    indirect=["device"],
)
def test_two_ranks_train_as_one(cases: Cases, name: str, precision: str) -> None:
    found = cases.compare(name, precision)
    assert len(found["losses"]) == STEPS and found["holds"], found


@pytest.mark.parametrize(
    ("device", "name", "precision"),
    on_devices([(name, precision) for precision in PRECISIONS for name in MOVES], [("PP 2, interleaved -> EP 2", "bf16")]),
    indirect=["device"],
)
def test_a_checkpoint_moves_bit_for_bit(cases: Cases, name: str, precision: str) -> None:
    found = cases.move(name, precision)
    assert found["tensors"] > 100 and found["holds"], found["differ"]


def test_what_is_not_equal_is_told() -> None:
    wanted = [(4.0, 1.0, 100), (3.0, 2.0, 90)]
    assert deviations(wanted, wanted) == (0.0, 0.0)
    assert deviations([(4.0, 1.5, 100), (3.3, 2.0, 90)], wanted) == pytest.approx((0.1, 0.5))
    with pytest.raises(ValueError, match="other numbers of tokens"):
        deviations([(4.0, 1.0, 100), (3.0, 2.0, 91)], wanted)
    with pytest.raises(ValueError, match="did not fall"):
        deviations([(4.0, 1.0, 100), (4.0, 2.0, 90)], wanted)
