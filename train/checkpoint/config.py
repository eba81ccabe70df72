"""When checkpoints are written and kept. Pure data, importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """One checkpoint is always written at the end of a run."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    async_save: bool = True
    """Copy the state to host memory and write it while training goes on; false: training waits for the write."""
    on_failure: str = "stop"
    """After a checkpoint that could not be written: `stop` the run, or `continue` without it. The last one of a run must be written."""
