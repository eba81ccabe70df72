"""The host's Adam: DeepSpeed's where it can be had, torch's with one line where not; a build that hangs, dies or fails ends in one line.

Most tests have a stand-in for DeepSpeed: a package with the same operation in plain torch. With DeepSpeed installed and built, the real
one is compared too.
"""

import fcntl
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adam_cases import BUCKET, Reference, groups, parameters, set_gradients

from train.config.check import check
from train.config.check_offload import prepare_offload
from train.config.compose import compose
from train.config.errors import ConfigError
from train.offload import OffloadedAdam, deepspeed
from train.offload.config import OffloadConfig
from train.offload.host_adam import host_adam, torch_adam

OPERATION = """
objects = set()

def create_adam(number, lr, beta1, beta2, eps, decay, adamw, log):
    assert adamw and number not in objects
    objects.add(number)

def destroy_adam(number):
    objects.remove(number)

def adam_update(number, step, lr, beta1, beta2, eps, decay, corrected, weight, gradient, first, second):
    assert corrected and number in objects
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.mul_(1 - lr * decay)
    weight.addcdiv_(first / (1 - beta1**step), (second / (1 - beta2**step)).sqrt() + eps, value=-lr)
"""
STAND_IN = f"""
import os, sys, time, types

class CPUAdamBuilder:
    def load(self):
        folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
        os.makedirs(folder, exist_ok=True)
        lock = os.path.join(folder, "lock")
        started = time.monotonic()
        while os.path.exists(lock):  # as torch does, only not for ever
            time.sleep(0.05)
            if time.monotonic() - started > 60:
                sys.exit("waited for the lock file")
        with open(os.path.join(folder, "builds"), "a") as log:
            log.write("build\\n")
        exec(os.environ.get("STAND_IN_DOES", ""))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        path = os.path.join(folder, "cpu_adam.py")
        with open(path, "w") as module:
            module.write({OPERATION!r})
        return types.SimpleNamespace(__file__=path)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DeepSpeed's stand-in is importable, here and in children; its compiler is there. Returns the folder of builds."""
    package = tmp_path / "site" / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    for folder in (package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("c++", "ninja"):
        (tools / tool).write_text("#!/bin/sh\n")
        (tools / tool).chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(deepspeed.sysconfig, "get_path", lambda name: str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(deepspeed, "_loaded", [])
    return deepspeed.folder()


def make(params: list[torch.nn.Parameter], cpu_adam: str, mode: str = "cpu_step") -> OffloadedAdam:
    return OffloadedAdam(groups(params), mode=mode, bucket_elements=BUCKET, cpu_adam=cpu_adam)


@pytest.mark.parametrize("choice", ["deepspeed", "auto"])
def test_deepspeeds_operation_gets_what_it_needs(stand_in: Path, choice: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Groups, decay, own counts of steps: as torch's Adam to the last digits of the weights."""
    params = parameters((torch.bfloat16, torch.float32))
    reference, optimizer = Reference(params), make(params, choice)
    for step in range(5):
        set_gradients(params, step, missing=(2, 4) if step == 1 else ())
        reference.step(params)
        optimizer.step()
    for number, (param, master) in enumerate(zip(params, reference.masters, strict=True)):
        states, wanted = optimizer.states_of(param), reference.optimizer.state[master]
        got = states.get("master", param.detach())
        assert torch.allclose(got, master.detach(), rtol=1e-6, atol=1e-3 * optimizer.param_groups[number % 2]["lr"])
        assert float(states["step"]) == float(wanted["step"])
        assert torch.allclose(states["exp_avg_sq"], wanted["exp_avg_sq"], rtol=1e-5)
    assert capfd.readouterr().out == ""
    # Built once, in a process of its own; then loaded by everyone who comes, without DeepSpeed itself.
    deepspeed._loaded.clear()
    make(params, choice)
    assert (stand_in / "cpu_adam" / "builds").read_text() == "build\n"
    assert "deepspeed" not in sys.modules


def test_objects_of_the_operation_go_with_the_optimiser(stand_in: Path) -> None:
    operation = deepspeed.load()
    optimizer = make(parameters((torch.float32,)), "deepspeed")
    assert len(operation.objects) == 1
    optimizer.close()
    assert not operation.objects


def no_package(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(deepspeed.importlib.util, "find_spec", lambda name: None)


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def no_ninja(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (Path(deepspeed.os.environ["PATH"]) / "ninja").unlink()


def failing_build(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("STAND_IN_DOES", "sys.exit('cpu_adam.cpp:1: error: no such header')")


def endless_build(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("STAND_IN_DOES", "time.sleep(600)")
    limited(monkeypatch, 1.0)


def somebody_building(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir(parents=True)
    holder = open(folder / "building", "w")  # noqa: SIM115 - held for the whole test
    fcntl.flock(holder, fcntl.LOCK_EX)
    monkeypatch.setattr(deepspeed, "_holder", holder, raising=False)
    limited(monkeypatch, 1.0)


def limited(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = deepspeed.load
    monkeypatch.setattr(deepspeed, "load", lambda: real(seconds))
    monkeypatch.setattr("train.config.check_offload.load", lambda: real(seconds))


CANNOT = [
    (no_package, "deepspeed is not installed", True),
    (no_compiler, "there is no C++ compiler (no-such-compiler) on PATH", True),
    (no_ninja, "there is no build tool (ninja) on PATH", True),
    (failing_build, "its build failed (cpu_adam.cpp:1: error: no such header)", False),
    (endless_build, "its build took over 1 s", False),
    (somebody_building, "another process has been building it for 1 s", False),
]


@pytest.mark.parametrize(("break_it", "words", "seen_by_check"), CANNOT, ids=[case[0].__name__ for case in CANNOT])
def test_what_cannot_work_is_refused_or_one_line(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], break_it: Any, words: str, seen_by_check: bool
) -> None:
    break_it(monkeypatch, stand_in)
    started = time.monotonic()
    assert host_adam("auto") is torch_adam
    told = capfd.readouterr().out
    assert told.startswith("offload.cpu_adam=auto: the host updates with torch's fused AdamW, because ") and words in told
    assert told.count("\n") == 1
    with pytest.raises(ValueError, match="cpu_adam=deepspeed: ") as caught:
        make(parameters((torch.float32,)), "deepspeed")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        prepare_offload(OffloadConfig(mode="cpu_step", cpu_adam="deepspeed"))
    assert words in str(refused.value) and "\n" not in str(refused.value)
    if seen_by_check:
        with pytest.raises(ConfigError) as early:
            check(compose(["offload=cpu_step", "offload.cpu_adam=deepspeed"]), 1)
        assert words in str(early.value)
    assert time.monotonic() - started < 120
    assert check(compose(["offload=cpu_step", "offload.cpu_adam=auto"]), 1).offload.cpu_adam == "auto"


def test_a_lock_file_of_a_dead_build_does_not_hang_the_next(stand_in: Path) -> None:
    lock = stand_in / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert deepspeed.load() is not None and not lock.exists()


def test_tools_of_the_environment_are_found_without_activating_it(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("STAND_IN_DOES", "assert os.environ['PATH'].startswith('/nowhere:')")
    assert deepspeed.why_not() is None and deepspeed.load() is not None
    assert deepspeed.os.environ["PATH"] == "/nowhere"
    monkeypatch.setattr(deepspeed.sysconfig, "get_path", lambda name: "/nowhere either")
    assert deepspeed.why_not() == "there is no C++ compiler (c++) on PATH, and its operation is compiled here"


def test_a_module_that_went_is_named(stand_in: Path) -> None:
    deepspeed.load()
    deepspeed._loaded.clear()
    (stand_in / "cpu_adam" / "cpu_adam.py").unlink()
    with pytest.raises(ValueError, match=r"its operation does not load .*; delete .* to have it built anew"):
        make(parameters((torch.float32,)), "deepspeed")


def test_the_build_is_only_prepared_where_it_is_insisted_on(stand_in: Path) -> None:
    for mode, cpu_adam in (("none", "torch"), ("stream", "torch"), ("cpu_step", "torch"), ("cpu_step", "auto")):
        prepare_offload(OffloadConfig(mode=mode, cpu_adam=cpu_adam))
    assert not stand_in.exists()
    prepare_offload(OffloadConfig(mode="cpu_step", cpu_adam="deepspeed"))
    assert (stand_in / "built").is_file()


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu_adam=apex: there is no such choice; choose one of torch, deepspeed, auto"):
        make(parameters((torch.float32,)), "apex")


def test_the_real_operation_is_torchs_to_the_rounding_of_the_weights() -> None:
    """Half a unit in the last place of a weight and operation; the moments likewise."""
    reason = deepspeed.why_not()
    if reason is not None or not (deepspeed.folder() / "built").is_file():
        pytest.skip(f"DeepSpeed's operation is not built here: {reason or 'it has not been used yet'}")
    torch.manual_seed(0)
    update, count = host_adam("deepspeed"), 10_007
    ours = [torch.randn(count), torch.empty(count), torch.zeros(count), torch.zeros(count)]
    theirs = [tensor.clone() for tensor in ours]
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for step in range(1, 11):
        ours[1].normal_().mul_(10.0 ** (step % 5 - 3))
        theirs[1].copy_(ours[1])
        for call, tensors in ((torch_adam, ours), (update, theirs)):
            call(*([tensor] for tensor in tensors), [torch.tensor(float(step))], group)  # type: ignore[call-arg]
    rounding = torch.finfo(torch.float32).eps
    assert torch.allclose(ours[0], theirs[0], rtol=0, atol=float(10 * 2 * rounding * ours[0].abs().max()))
    assert torch.allclose(ours[3], theirs[3], rtol=1e-5)
