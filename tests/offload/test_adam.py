"""OffloadedAdam against torch's AdamW, in every mode, on CPU tensors: the same bits."""

import itertools
from typing import Any

import pytest
import torch
from adam_cases import BUCKET, Reference, groups, parameters, set_gradients

from train.offload import OffloadedAdam

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {"bf16": (BF16,), "fp32": (FP32,), "mixed": (BF16, FP32, FP32)}
MODES = ("none", "stream", "cpu_step")


def make(params: list[torch.nn.Parameter], mode: str = "stream", fraction: float = 1.0, **settings: Any) -> OffloadedAdam:
    return OffloadedAdam(groups(params), mode=mode, fraction=fraction, bucket_elements=BUCKET, **settings)


def assert_equal_to(reference: Reference, params: list[torch.nn.Parameter], optimizer: OffloadedAdam) -> None:
    for param, weight, master in zip(params, reference.weights, reference.masters, strict=True):
        assert torch.equal(param, weight)
        states, wanted = optimizer.states_of(param), reference.optimizer.state.get(master, {})
        for name in wanted:
            assert torch.equal(states[name], wanted[name].cpu()), name
        assert ("master" in states) is (param.dtype == BF16)
        if "master" in states:
            assert torch.equal(states["master"], master.detach())


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("mode", "fraction"), [("none", 1.0), *itertools.product(("stream", "cpu_step"), (0.0, 0.37, 1.0))])
@pytest.mark.parametrize("main_grads", [False, True])
def test_updates_are_those_of_torch(dtypes: str, mode: str, fraction: float, main_grads: bool) -> None:
    params = parameters(DTYPES[dtypes])
    reference, optimizer = Reference(params), make(params, mode, fraction)
    for step in range(4):
        set_gradients(params, step, main_grads)
        reference.step(params)
        optimizer.step()
    assert_equal_to(reference, params, optimizer)
    assert all(not torch.equal(new, old) for new, old in zip(params, parameters(DTYPES[dtypes]), strict=True) if new.numel())


@pytest.mark.parametrize("mode", MODES)
def test_schedulers_and_groups(mode: str) -> None:
    params = parameters((BF16, FP32))
    reference, optimizer = Reference(params), make(params, mode, 0.6)
    schedules = [torch.optim.lr_scheduler.LambdaLR(x, lambda step: 1.0 / (step + 1)) for x in (reference.optimizer, optimizer)]
    for step in range(4):
        set_gradients(params, step)
        reference.step(params)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3 / 5, 1e-2 / 5]
    assert_equal_to(reference, params, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_keep_everything_and_count_their_own_steps(mode: str) -> None:
    params = parameters((BF16, FP32))
    reference, optimizer = Reference(params), make(params, mode, 0.6)
    for step in range(4):
        set_gradients(params, step, missing=(0, 2, 5) if step != 2 else (6,))
        reference.step(params)
        optimizer.step()
    assert_equal_to(reference, params, optimizer)
    assert [float(optimizer.states_of(param)["step"]) for param in params] == [1, 4, 1, 4, 4, 1, 3]
    set_gradients(params, 9, missing=range(len(params)))
    optimizer.step()
    assert_equal_to(reference, params, optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_shared_parameters_and_closures(mode: str) -> None:
    def train(make_optimizer: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
        model[2].weight = model[0].weight
        optimizer = make_optimizer(model.parameters())
        for _ in range(3):
            x = torch.randn(8, 16)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - x).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        return model[0].weight.detach()

    wanted = train(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    got = train(lambda params: OffloadedAdam(params, lr=1e-2, mode=mode, bucket_elements=64))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_and_clipping_are_the_callers_and_exact(mode: str) -> None:
    """Gradients that were summed and clipped in place arrive as they are; the optimiser never writes to them."""
    params = parameters((BF16, FP32))
    reference, optimizer = Reference(params), make(params, mode, 0.6)
    set_gradients(params, 0, main_grads=True)
    kept = [param.decoupled_grad.clone() for param in params]
    set_gradients(params, 1, main_grads=True)
    for param, first in zip(params, kept, strict=True):
        param.decoupled_grad += first
    norm = torch.nn.utils.get_total_norm([param.decoupled_grad for param in params])
    for param in params:
        param.decoupled_grad *= 1.0 / norm
    before = [param.decoupled_grad.clone() for param in params]
    reference.step(params)
    optimizer.step()
    assert_equal_to(reference, params, optimizer)
    assert all(torch.equal(param.decoupled_grad, old) for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_outside_writes_survive_a_step_once_masters_are_refreshed(mode: str) -> None:
    params = parameters((BF16, FP32))
    optimizer = make(params, mode, 0.6)
    set_gradients(params, 0)
    optimizer.step()
    loaded = [torch.randn(param.shape).to(param.dtype) for param in params]
    with torch.no_grad():
        for param, value in zip(params, loaded, strict=True):
            param.copy_(value)
    optimizer.refresh_masters()
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(params, loaded, strict=True))


def test_a_step_without_refresh_would_undo_an_outside_write() -> None:
    """What the test above protects from."""
    params = parameters((BF16,))
    optimizer = make(params)
    with torch.no_grad():
        params[0].fill_(5.0)
    set_gradients(params, 0)
    optimizer.step()
    assert params[0].float().mean() < 1.0


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_may_be_empty(mode: str) -> None:
    """A rank may have nothing of a group, or of all of them."""
    params = parameters((BF16,))
    reference = Reference(params)
    optimizer = OffloadedAdam([*groups(params), {"params": []}], mode=mode, bucket_elements=BUCKET)
    nothing = OffloadedAdam([{"params": []}], mode=mode)
    set_gradients(params, 0)
    for each in (optimizer, nothing):
        each.prefetch(10**9)
        each.step()
    nothing.refresh_masters()
    reference.step(params)
    assert_equal_to(reference, params, optimizer)
    assert nothing.planned_bytes == {"device": 0, "host": 0} and nothing.state_dict()["state"] == {}
    assert nothing.exposed_seconds() is None
    nothing.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_hosts_threads_are_set_for_its_step_only(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters((BF16,))
    optimizer = make(params, "cpu_step", cpu_threads=threads)
    seen = []
    real = torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **kwargs: (seen.append(torch.get_num_threads()), real(*args, **kwargs)))
    before = torch.get_num_threads()
    set_gradients(params, 0)
    optimizer.step()
    assert seen and set(seen) == {threads} and torch.get_num_threads() == before


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, train.offload, train.offload.layout; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
