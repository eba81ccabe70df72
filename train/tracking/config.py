"""Where a run's figures go besides `metrics.jsonl` and the console. Pure data, importable without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """The experiment tracker."""

    kind: str = "wandb"
    """`wandb`, `tensorboard` or `none`."""
    mode: str = "offline"
    """wandb's mode: `offline` or `online`."""
    project: str = "leantron"
    """wandb's project."""
    start_timeout: float = 60.0
    """Seconds to wait for the tracker to start; past that the run goes on without it and says so."""
