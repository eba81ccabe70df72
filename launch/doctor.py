"""`leantron doctor`: what this machine offers a run: interpreter, packages, devices, the attention back ends and the
host's Adams with their reasons."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

from launch.attention import attention_lines
from launch.torchrun import available_cores
from train.offload.deepspeed import why_not

PACKAGES = ("torch", "megatron-core", "hydra-core", "triton", "numpy", "wandb", "deepspeed", "transformers")


def doctor(overrides: Sequence[str] = ()) -> int:
    """Print the findings, attention for the configuration that `overrides` make; returns 0. Imports torch."""
    import torch

    print(f"python {platform.python_version()}, {available_cores()} cores")
    for name in PACKAGES:
        print(f"{name} {_version(name)}")
    if not torch.cuda.is_available():
        print("device: CPU (no CUDA device is visible); communication through gloo")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"device {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB; communication through NCCL")
    for line in attention_lines(overrides):
        print(line)
    print(_cpu_adam())
    return 0


def _cpu_adam() -> str:
    reason = why_not()
    return f"DeepSpeed's CPU Adam (offload.cpu_adam): {'can be built here on first use' if reason is None else f'no, {reason}'}"


def _version(name: str) -> str:
    try:
        return distribution_version(name)
    except PackageNotFoundError:
        return "is not installed"
