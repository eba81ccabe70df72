"""Where the optimiser's states lie. Pure data, importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Masters and moments of Adam: on the device, or on the host."""

    mode: str = "none"
    """`none`, `stream` (states pass through the GPU), `cpu_step` (the CPU updates them) or `auto` (the least that fits)."""
    fraction: float = 1.0
    """Share of the states' bytes that the host holds."""
    prefetch: bool = True
    """`stream`: states arrive while the last micro-batch's backward runs, in memory that is free then; false: only in their turn."""
    cpu_adam: str = "torch"
    """`cpu_step`: the host's Adam: `torch` (its fused one), `deepspeed` (extra `deepspeed`; compiled on first use) or `auto`."""
