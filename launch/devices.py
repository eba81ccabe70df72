"""How many GPUs the processes of this host will find, without importing torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from train.config.errors import ConfigError

NEED_A_GPU = ("triton", "flex")
"""Attention back ends that train on a GPU only."""


def visible_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a process here sees; 0 means that the run takes the CPU."""
    present = [entry for entry in devices.glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit()]
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return len(present)
    return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])


def check_devices(processes: int, gpus: int, backend: str = "auto") -> None:
    """Raise ConfigError when processes would share a GPU, or when the attention back end asked for needs one and there is none.

    Any number of processes may share the CPU.
    """
    if gpus == 0 and backend in NEED_A_GPU:
        rule = "this host shows no GPU, and the back end has no backward pass on the CPU"
        raise ConfigError("attention.backend", backend, rule, "use attention.backend=auto")
    if 0 < gpus < processes:
        rule = f"this host shows {gpus} GPU{'s' if gpus > 1 else ''}, and each process needs its own"
        raise ConfigError("parallel.processes", processes, rule, f"use {gpus} or fewer, or CUDA_VISIBLE_DEVICES= to run on the CPU")
