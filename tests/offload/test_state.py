"""What comes back from a state dict: the exact states, in any mode, read with weights_only; and what is refused."""

import io
import itertools
from typing import Any

import pytest
import torch
from adam_cases import BUCKET, Reference, groups, parameters, set_gradients

from train.offload import OffloadedAdam

BF16, FP32 = torch.bfloat16, torch.float32
PLACES = (("none", 1.0), ("stream", 1.0), ("stream", 0.4), ("cpu_step", 1.0), ("cpu_step", 0.7))


def make(params: list[torch.nn.Parameter], mode: str, fraction: float, bucket: int = BUCKET) -> OffloadedAdam:
    return OffloadedAdam(groups(params), mode=mode, fraction=fraction, bucket_elements=bucket)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACES, PLACES)), ids=str)
def test_going_on_in_another_mode_is_bitwise(source: tuple[str, float], target: tuple[str, float]) -> None:
    params = parameters((BF16, FP32))
    reference, optimizer = Reference(params), make(params, *source)
    for step in range(3):
        set_gradients(params, step, missing=(1,) if step else ())
        reference.step(params)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": list(params)}, file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)

    others = parameters((BF16, FP32))
    with torch.no_grad():
        for param, value in zip(others, stored["model"], strict=True):
            param.copy_(value)
    resumed = make(others, *target, bucket=192)
    resumed.load_state_dict(stored["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.125
    reference.optimizer.param_groups[0]["lr"] = 0.125
    for step in range(3, 5):
        set_gradients(others, step)
        reference.step(others)
        resumed.step()
    for param, weight, master in zip(others, reference.weights, reference.masters, strict=True):
        assert torch.equal(param, weight)
        states = resumed.states_of(param)
        assert all(torch.equal(states[name], value) for name, value in reference.optimizer.state[master].items())


@pytest.mark.parametrize("mode", ["stream", "cpu_step"])
def test_states_of_torchs_adamw_are_taken_over(mode: str) -> None:
    params = parameters((FP32,))
    plain = torch.optim.AdamW(groups(params), fused=True)
    set_gradients(params, 0, missing=(1,))
    plain.step()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = make(others, mode, 0.5)
    optimizer.load_state_dict(plain.state_dict())
    for step in range(1, 3):
        for each, by in ((params, plain), (others, optimizer)):
            set_gradients(each, step)
            by.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_a_state_dict_is_a_snapshot_and_two_of_them_are_equal() -> None:
    params = parameters((BF16,))
    optimizer = make(params, "stream", 1.0)
    set_gradients(params, 0)
    optimizer.step()
    first = optimizer.state_dict()
    again = make(parameters((BF16,)), "cpu_step", 0.3)
    again.load_state_dict(first)
    for number, states in again.state_dict()["state"].items():
        assert states.keys() == first["state"][number].keys() == {"step", "master", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(states[name], first["state"][number][name]) for name in states)
    kept = first["state"][0]["exp_avg"].clone()
    optimizer.step()
    assert torch.equal(first["state"][0]["exp_avg"], kept)


def test_single_states_are_set_and_read() -> None:
    params = parameters((BF16, FP32))
    optimizer = make(params, "stream", 0.5)
    for param in params:
        value = torch.rand(param.shape)
        optimizer.set_states_of(param, {"exp_avg_sq": value, "step": 7})
        assert torch.equal(optimizer.states_of(param)["exp_avg_sq"], value)
        assert float(optimizer.states_of(param)["step"]) == 7 and float(optimizer.state[param]["step"]) == 7
    optimizer.state[params[0]]["step"].fill_(9)
    assert float(optimizer.states_of(params[0])["step"]) == 9
    with pytest.raises(ValueError, match="63 elements"):
        optimizer.set_states_of(params[0], {"exp_avg": torch.zeros(63)})
    with pytest.raises(ValueError, match="not among the parameters"):
        optimizer.states_of(torch.zeros(3))


def test_another_models_state_is_refused() -> None:
    params = parameters((BF16,))
    stored = make(params, "stream", 1.0).state_dict()
    with pytest.raises(ValueError, match=r"param_groups: they hold \[4, 3\] parameters there and \[7\] here"):
        OffloadedAdam(parameters((BF16,))).load_state_dict(stored)
    stored["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        make(params, "stream", 1.0).load_state_dict(stored)


def test_a_closed_optimiser_says_so() -> None:
    params = parameters((BF16,))
    optimizer = make(params, "stream", 1.0)
    optimizer.close()
    optimizer.close()
    set_gradients(params, 0)
    uses: list[Any] = [optimizer.step, optimizer.refresh_masters, optimizer.state_dict, lambda: optimizer.planned_bytes]
    for use in uses:
        with pytest.raises(RuntimeError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "fast"}, "mode=fast"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"bucket_elements": 0}, "bucket_elements=0"),
        ({"cpu_threads": 0}, "cpu_threads=0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OffloadedAdam(parameters((BF16,)), **settings)


def test_parameters_that_cannot_be_served_are_refused() -> None:
    whole = torch.nn.Parameter(torch.zeros(4, 6))
    cases = {
        "float16": [torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))],
        "not contiguous": [torch.nn.Parameter(torch.zeros(4, 6).t())],
        "must share one device": [whole, torch.nn.Parameter(torch.zeros(3, device="meta"))],
        "amsgrad=True": [{"params": [whole], "amsgrad": True}],
        "AdamW": [{"params": [whole], "decoupled_weight_decay": False}],
    }
    for words, params in cases.items():
        with pytest.raises(ValueError, match=words):
            OffloadedAdam(params)
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        OffloadedAdam([{"params": [whole, whole]}])
    optimizer = OffloadedAdam([whole])
    with pytest.raises(ValueError, match="groups cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    whole.grad = torch.zeros(4, 6).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
