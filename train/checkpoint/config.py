"""When checkpoints are written and kept. Pure data, importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """One checkpoint is always written at the end of a run."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints that are kept."""
