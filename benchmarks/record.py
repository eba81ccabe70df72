"""What a benchmark's JSON says of where it comes from."""

import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Commit (`-dirty` when files that git knows differ from it), Python, torch, and the device that torch would use."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    return {"commit": commit(), "python": platform.python_version(), "torch": torch.__version__, "device": device}


def commit() -> str:
    """The commit checked out, from git; `unknown` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
