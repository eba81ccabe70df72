"""OffloadedAdam where the host is not the device: torch's bits, whatever stream is late, in the memory that was planned."""

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "offload"))

from adam_cases import BUCKET, Reference, groups, parameters, set_gradients

from train.offload import OffloadedAdam
from train.offload.memory import Lane, free_room

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 2**20


def make(params: list[torch.nn.Parameter], mode: str, fraction: float = 1.0) -> OffloadedAdam:
    return OffloadedAdam(groups(params), mode=mode, fraction=fraction, bucket_elements=BUCKET, cpu_threads=2)


def train(optimizer: OffloadedAdam, params: list[torch.nn.Parameter], main_grads: bool, steps: int = 6, room: int = 0) -> None:
    """Steps on gradients that lie ready, so that the host does not wait for copies of them; states come ahead as far as `room` goes.

    Memory that a step gives back is written to at once by the next work of the caller's stream.
    """
    ready = []
    for step in range(steps):
        set_gradients(params, step, main_grads)
        ready.append([(param.grad, getattr(param, "decoupled_grad", None)) for param in params])
    torch.cuda.synchronize()
    for gradients in ready:
        spoil()
        optimizer.prefetch(room)
        spoil()
        for param, (gradient, main_gradient) in zip(params, gradients, strict=True):
            param.grad, param.decoupled_grad = gradient, main_gradient
        optimizer.step()


def spoil() -> None:
    """Take blocks of a bucket's sizes from the allocator, fill them with NaN and give them back."""
    blocks = [torch.full((BUCKET,), float("nan"), device="cuda") for _ in range(24)]
    del blocks


@pytest.mark.parametrize("dtypes", [(BF16,), (FP32,), (BF16, FP32, FP32)], ids=str)
@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize(("mode", "fraction"), [("none", 1.0), ("stream", 1.0), ("stream", 0.37), ("cpu_step", 1.0), ("cpu_step", 0.37)])
def test_updates_are_those_of_torch(dtypes: tuple[torch.dtype, ...], main_grads: bool, mode: str, fraction: float) -> None:
    """Bitwise where the GPU updates; the CPU's arithmetic differs in last bits, thousands of times less than a learning rate."""
    params = parameters(dtypes, "cuda")
    reference, optimizer = Reference(params), make(params, mode, fraction)
    for step in range(6):
        set_gradients(params, step, main_grads)
        reference.step(params)
        optimizer.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    for number, (param, weight, master) in enumerate(zip(params, reference.weights, reference.masters, strict=True)):
        states = optimizer.states_of(param)
        wanted = {"master": master.detach(), **reference.optimizer.state.get(master, {})}
        if mode != "cpu_step":
            assert torch.equal(param, weight)
            assert all(torch.equal(states[name], wanted[name].cpu()) for name in states)
        else:
            got = states["master"] if param.dtype == BF16 else param.detach().cpu()
            assert torch.allclose(got, master.detach().cpu(), rtol=1e-6, atol=1e-3 * rates[number % 2])
            assert float(states["step"]) == 6 and torch.equal(param, got.to(param.dtype).cuda())
    optimizer.close()


@pytest.mark.parametrize("late", ["up", "down", "compute", "all"])
@pytest.mark.parametrize(("mode", "room"), [("stream", 0), ("stream", 5 * 12 * BUCKET), ("stream", 2**30), ("cpu_step", 0)])
def test_no_delay_of_any_stream_changes_anything(late: str, mode: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted_params = parameters((BF16, FP32), "cuda")
    wanted = make(wanted_params, mode, 0.8)
    train(wanted, wanted_params, False)
    params = parameters((BF16, FP32), "cuda")
    optimizer = make(params, mode, 0.8)
    torch.cuda.synchronize()
    chance = random.Random(late)
    up, down = optimizer._traffic.up, optimizer._traffic.down
    slow = {"up": (up,), "down": (down,), "compute": (), "all": (up, down)}[late]
    real_after, real_copy = Lane.after, torch._foreach_copy_

    def sleep() -> None:
        torch.cuda._sleep(chance.choice((0, 200_000, 2_000_000)))

    @contextmanager
    def after(lane: Lane, *events: Any) -> Iterator[None]:
        with real_after(lane, *events):
            if lane in slow:
                sleep()
            yield
            if lane in slow:
                sleep()

    def copy(*arguments: Any) -> None:
        if late in ("compute", "all"):
            sleep()
        real_copy(*arguments)

    monkeypatch.setattr(Lane, "after", after)
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    train(optimizer, params, False, room=room)
    for number, (param, other) in enumerate(zip(params, wanted_params, strict=True)):
        assert torch.equal(param, other), number
        states, others = optimizer.states_of(param), wanted.states_of(other)
        assert all(torch.equal(states[name], others[name]) for name in others), number


def test_states_come_ahead_only_into_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve is left alone; memory that came ahead goes back once its states have left."""
    weight = torch.nn.Parameter(torch.zeros(64 * MIB, dtype=BF16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    optimizer = OffloadedAdam([weight], mode="stream", bucket_elements=4 * MIB)
    before = torch.cuda.memory_allocated()
    total = torch.cuda.mem_get_info()[1]
    assert 0 < free_room(weight.device) <= 0.95 * total
    assert not optimizer.prefetch()
    assert torch.cuda.memory_allocated() - before == pytest.approx(64 * MIB * 12, rel=0.05)
    optimizer.step()
    optimizer.synchronize()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    monkeypatch.setattr("train.offload.memory.RESERVE", 1.0)
    assert optimizer.prefetch() and torch.cuda.memory_allocated() == before
    optimizer.close()


def test_exposed_time_is_what_the_gpu_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are late count; copies that came while the GPU had other work do not."""
    weight = torch.nn.Parameter(torch.zeros(32 * MIB, dtype=BF16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    optimizer = OffloadedAdam([weight], mode="stream", bucket_elements=8 * MIB)
    optimizer.step()
    optimizer.exposed_seconds(wait=True)
    optimizer.step()
    plain = optimizer.exposed_seconds(wait=True)
    optimizer.synchronize()
    optimizer.prefetch()
    torch.cuda._sleep(2_000_000_000)  # about a second: far longer than 384 MiB take
    optimizer.step()
    hidden = optimizer.exposed_seconds(wait=True)
    assert plain is not None and hidden is not None
    assert 0 <= hidden < plain / 2 and plain > 32 * MIB * 12 / 200e9
    optimizer.close()


def test_the_hosts_memory_is_pinned_and_has_the_size_asked_for() -> None:
    params = [torch.nn.Parameter(torch.zeros(3 * MIB + 5, dtype=BF16, device="cuda"))]
    optimizer = OffloadedAdam(params, mode="stream")
    for tensor in optimizer._hosted.tensors.values():
        assert tensor.is_pinned() and tensor.nbytes < 4 * (3 * MIB + 100)
    kept = optimizer._hosted.tensors["exp_avg"]
    optimizer.close()
    assert not kept.is_pinned()


@pytest.mark.parametrize("mode", ["none", "stream", "cpu_step"])
def test_memory_is_what_was_planned_and_level_over_five_cycles(mode: str) -> None:
    process = psutil.Process()
    warm = parameters((BF16,), "cuda")
    train(make(warm, mode), warm, False, steps=1)
    weight = torch.nn.Parameter(torch.zeros(128 * MIB, dtype=BF16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    levels = []
    for _ in range(6):
        gc.collect()
        device, host = torch.cuda.memory_allocated(), process.memory_info().rss
        optimizer = OffloadedAdam([weight], mode=mode, bucket_elements=4 * MIB)
        optimizer.step()
        torch.cuda.synchronize()
        planned = optimizer.planned_bytes
        assert torch.cuda.memory_allocated() - device == pytest.approx(planned["device"], rel=0.05, abs=MIB)
        assert process.memory_info().rss - host == pytest.approx(planned["host"], rel=0.1, abs=64 * MIB)
        optimizer.close()
        del optimizer
        levels.append((torch.cuda.memory_allocated(), process.memory_info().rss))
    assert len({device for device, _ in levels}) == 1
    assert max(host for _, host in levels) - levels[0][1] < 64 * MIB


def engine_losses(offload: dict[str, Any], folder: Path, load: str | None = None) -> tuple[list[float], str, dict[str, torch.Tensor]]:
    """Losses of three steps (none after a load), the path of a checkpoint, and the optimiser's states by parameter."""
    from small_engine import assemble, build, pieces, small_config, take_step

    from train.engine import checkpoint, parallel

    dense = {"attention.kind": "dense", "model.head_dim": 64, "train.precision": "bf16", "optim.clip": 0.05}
    try:
        engine = build(small_config({**dense, **offload}), load)
        losses = [take_step(engine, step).loss for step in range(3)] if load is None else []
        states = assemble([[piece for piece in pieces(engine) if piece.name.startswith("optimizer.state")]])
        path = str(checkpoint.save(folder, 3, engine.chunks, engine.optimizer, {}))
    finally:
        parallel.shutdown()
    return losses, path, states


@pytest.mark.parametrize(
    "offload",
    [
        {"offload.mode": "stream", "offload.fraction": 0.5},
        {"offload.mode": "stream", "offload.prefetch": False},
        {"offload.mode": "cpu_step"},
        {"offload.mode": "cpu_step", "offload.cpu_adam": "auto"},
    ],
    ids=str,
)
def test_the_engine_trains_as_with_none_and_checkpoints_move(
    offload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import small_engine

    real = small_engine.make_rows
    monkeypatch.setattr(small_engine, "make_rows", lambda *arguments: on_gpu(real(*arguments)))
    wanted, _, _ = engine_losses({}, tmp_path / "none")
    losses, path, states = engine_losses(offload, tmp_path / "offloaded")
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert losses == pytest.approx(wanted, rel=1e-3) and losses[-1] != losses[0]
    _, _, again = engine_losses({}, tmp_path / "again", load=path)
    assert states.keys() == again.keys() and all(torch.equal(states[name], again[name]) for name in states)


def on_gpu(batch: Any) -> Any:
    bounds = batch.cu_seqlens
    return replace(replace(batch, cu_seqlens=None).to(torch.device("cuda")), cu_seqlens=bounds)
