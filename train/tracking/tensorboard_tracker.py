"""TensorBoard behind the `Tracker` interface: event files in `<run>/tensorboard`, over the run's own steps.

After a rollback the repeated steps count once: a start that goes on from an earlier step hides what was logged after it. Every line
is flushed, so that a killed run keeps what it logged.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train.tracking.protocol import Metrics, TrackerStartError, flatten


class TensorboardTracker:
    """Writes each number of a line as a scalar of its name."""

    def __init__(self, run_dir: Path) -> None:
        """Raises TrackerStartError when the package is not there."""
        if find_spec("tensorboard") is None:
            raise TrackerStartError("tracking.kind=tensorboard needs the package tensorboard: pip install tensorboard")
        self.folder = run_dir / "tensorboard"
        """Where the event files are; `tensorboard --logdir <folder>` shows them."""
        self._writer: Any = None

    def log(self, metrics: Metrics) -> None:
        step = int(metrics["step"])
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        for name, value in flatten(metrics).items():
            if name not in ("step", "time") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, step, walltime=metrics.get("time"))
        self._writer.flush()

    def finish(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
