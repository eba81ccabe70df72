"""How much memory this machine has for a run, found without importing torch: what `offload.mode=auto` needs to know."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def gpu_bytes(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int | None:
    """Memory of the smallest NVIDIA GPU of this host in bytes, as nvidia-smi tells; None when the run takes the CPU.

    Raises OSError, in words, when there are GPUs and nvidia-smi does not tell.
    """
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(devices.glob("nvidia[0-9]*")):
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in told.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise OSError("nvidia-smi does not tell the GPU's memory") from error


def host_bytes() -> int:
    """Host memory that this process and its children can still take: what is available, or the rest of the container's limit."""
    rooms = [psutil.virtual_memory().available]
    for limit, used in _LIMITS:
        if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
            rooms.append(int(limit.read_text()) - int(used.read_text()))
    return max(0, min(rooms))


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
