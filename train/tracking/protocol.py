"""The interface of everything that receives a run's figures, what its kinds share, and the one that receives and does nothing."""

from collections.abc import Mapping
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""One line of figures: names to numbers, and nested mappings or lists of numbers; `step` is always there."""


class Tracker(Protocol):
    """Receives a line of figures at each log step and the run's last word."""

    def log(self, metrics: Metrics) -> None:
        """Take one line: training lines carry `loss`, evaluation lines `val_loss`."""

    def finish(self, status: str) -> None:
        """Close; `status` is how the run ended, in `status.json`'s words: `completed`, `preempted` or `failed`."""


class NullTracker:
    """What every rank but the first uses, so that no caller asks which rank it is."""

    def log(self, metrics: Metrics) -> None:
        """Nothing."""

    def finish(self, status: str) -> None:
        """Nothing."""


class TrackerStartError(RuntimeError):
    """The tracker did not start; the message is one line."""


def flatten(metrics: Metrics) -> dict[str, Any]:
    """One level of `a/b` names. Lists become their extremes, `<name>_min` and `<name>_max`: trackers keep a chart for each name."""
    flat: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": item for name, item in flatten(value).items()}
        elif isinstance(value, list | tuple):
            if value and all(isinstance(item, int | float) for item in value):
                flat |= {f"{key}_min": min(value), f"{key}_max": max(value)}
        else:
            flat[key] = value
    return flat
