"""`leantron doctor`: what this machine offers a run: interpreter, packages, devices, the attention back ends and the
host's Adams with their reasons."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

from launch.torchrun import available_cores
from train.offload.deepspeed import why_not

PACKAGES = ("torch", "megatron-core", "hydra-core", "triton", "numpy", "wandb", "deepspeed", "transformers")


def doctor() -> int:
    """Print the findings; returns 0. Imports torch."""
    import torch

    import s2

    print(f"python {platform.python_version()}, {available_cores()} cores")
    for name in PACKAGES:
        print(f"{name} {_version(name)}")
    if not torch.cuda.is_available():
        print("device: CPU (no CUDA device is visible); communication through gloo")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        print(f"device {index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB; communication through NCCL")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for label, stride in (("s2", 4), ("dense", 1)):
        pattern = s2.S2Pattern(num_heads=4, num_kv_heads=4, block_size=64, local_blocks=2, stride=stride)
        request = s2.Request(pattern=pattern, device=device, dtype="bfloat16", kv_heads=4, d_k=64, d_v=64, q_len=1024, k_len=1024)
        (choice,) = s2.explain([request])
        print(f"{label} attention (bfloat16, head dim 64, {device}): {choice.backend}")
        for name, reason in choice.refusals.items():
            print(f"  not {name}: {reason}")
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
