"""How many GPUs the processes of this host will find, without importing torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from train.config.errors import ConfigError


def visible_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a process here sees; 0 means that the run takes the CPU."""
    present = [entry for entry in devices.glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit()]
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return len(present)
    return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])


def check_devices(processes: int, gpus: int) -> None:
    """Raise ConfigError when more processes than GPUs would share one; any number may share the CPU."""
    if 0 < gpus < processes:
        rule = f"this host shows {gpus} GPU{'s' if gpus > 1 else ''}, and each process needs its own"
        raise ConfigError("parallel.processes", processes, rule, f"use {gpus} or fewer, or CUDA_VISIBLE_DEVICES= to run on the CPU")
