"""States that come ahead of the step: as many as there is room for, the same bits, never older than the host's."""

from typing import Any

import pytest
import torch
from adam_cases import BUCKET, Reference, groups, parameters, set_gradients

from train.offload import OffloadedAdam, memory
from train.offload.stream import Streamed

BF16, FP32 = torch.bfloat16, torch.float32
BYTES = 12 * BUCKET


def make(params: list[torch.nn.Parameter], fraction: float = 1.0, mode: str = "stream") -> OffloadedAdam:
    return OffloadedAdam(groups(params), mode=mode, fraction=fraction, bucket_elements=BUCKET)


def ahead(optimizer: OffloadedAdam) -> int:
    assert optimizer._streamed is not None
    return len(optimizer._streamed._ahead)


@pytest.mark.parametrize("dtypes", [(BF16,), (FP32,), (BF16, FP32, FP32)], ids=str)
@pytest.mark.parametrize("fraction", [0.37, 1.0])
@pytest.mark.parametrize("rooms", [[BYTES], [2 * BYTES, 0, BYTES], [10**9]], ids=str)
def test_a_step_is_the_same_bits(dtypes: tuple[torch.dtype, ...], fraction: float, rooms: list[int]) -> None:
    """Also where some parameters, and with them whole buckets that came ahead, have no gradient."""
    params = parameters(dtypes)
    reference, optimizer = Reference(params), make(params, fraction)
    for step in range(5):
        set_gradients(params, step, missing=(0, 3) if step == 2 else ())
        for room in rooms:
            optimizer.prefetch(room)
        assert ahead(optimizer) > 0
        reference.step(params)
        optimizer.step()
        assert ahead(optimizer) == 0
    for param, weight, master in zip(params, reference.weights, reference.masters, strict=True):
        assert torch.equal(param, weight)
        states = optimizer.states_of(param)
        assert all(torch.equal(states[name], value) for name, value in reference.optimizer.state[master].items())


def test_room_bounds_what_comes_and_all_of_it_ends_the_asking() -> None:
    optimizer = make(parameters((BF16,)))
    count = len(optimizer._traffic.layout.offloaded)
    assert count > 6
    assert optimizer.prefetch(BYTES - 1) and ahead(optimizer) == 0
    assert optimizer.prefetch(2 * BYTES + 5) and ahead(optimizer) == 2
    assert optimizer.prefetch(BYTES) and ahead(optimizer) == 3
    assert not optimizer.prefetch(10**9) and ahead(optimizer) == count
    assert not optimizer.prefetch(10**9) and ahead(optimizer) == count
    optimizer.drop_prefetched()
    assert ahead(optimizer) == 0
    for mode in ("none", "cpu_step"):
        assert not make(parameters((BF16,)), mode=mode).prefetch(10**9)


def test_on_the_cpu_there_is_no_room_by_itself() -> None:
    """Host and device are one memory there: a copy ahead of time would only take more of it."""
    optimizer = make(parameters((BF16,)))
    assert memory.free_room(torch.device("cpu")) == 0
    assert optimizer.prefetch() and ahead(optimizer) == 0


def write_states(optimizer: OffloadedAdam, params: list[torch.nn.Parameter]) -> None:
    for param in params:
        optimizer.set_states_of(param, {"exp_avg": torch.full(param.shape, 0.5), "exp_avg_sq": torch.ones(param.shape)})


def write_weights(optimizer: OffloadedAdam, params: list[torch.nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.fill_(2.0)
    optimizer.refresh_masters()


def load(optimizer: OffloadedAdam, params: list[torch.nn.Parameter]) -> None:
    others = parameters((BF16, FP32))
    other = make(others)
    set_gradients(others, 3)
    other.step()
    optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("write", [write_states, write_weights, load])
def test_what_was_written_after_states_came_ahead_counts(write: Any) -> None:
    results = []
    for room in (0, 10**9):
        params = parameters((BF16, FP32))
        optimizer = make(params)
        optimizer.prefetch(room)
        write(optimizer, params)
        set_gradients(params, 1)
        optimizer.step()
        results.append((params, [optimizer.states_of(param) for param in params]))
    (params, states), (others, other_states) = results
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    for one, two in zip(states, other_states, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_memory_that_is_free_in_pieces_only_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters((BF16,))
    optimizer, real = make(params), Streamed._buffer
    made: list[int] = []

    def one(self: Streamed, width: int) -> Any:
        made.append(width)
        if len(made) > 1:
            raise torch.OutOfMemoryError("no block of that size")
        return real(self, width)

    monkeypatch.setattr(Streamed, "_buffer", one)
    assert optimizer.prefetch(10**9) and ahead(optimizer) == 1
    reference = Reference(params)
    set_gradients(params, 0)
    reference.step(params)
    optimizer.step()
    assert all(torch.equal(param, weight) for param, weight in zip(params, reference.weights, strict=True))
