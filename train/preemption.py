"""Asked to leave: a signal sets a flag, and the ranks agree at the next step boundary to save and go.

SIGTERM is what schedulers, container engines and our launcher send; SIGUSR1 what Slurm sends ahead of its limit (`--signal=USR1@300`).
Either may reach one rank only: the flag travels with the step's own all-reduce, so that all ranks stop after the same step.
"""

import os
import signal
from types import FrameType


class StopRequest:
    """Whether this rank was asked to leave. `signal` is the first signal's number, None so far."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def listen_early(self) -> None:
        """Take SIGUSR1 from now on; SIGTERM still ends the process, as long as there is nothing to save."""
        signal.signal(signal.SIGUSR1, self._take)

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 from now on."""
        self.listen_early()
        signal.signal(signal.SIGTERM, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            # Not print: the signal may have come in the middle of one, and a buffered stream cannot be entered twice.
            os.write(2, f"asked to stop by {signal.Signals(number).name}: saving after this step\n".encode())


class NeverStop(StopRequest):
    """Nobody asks: for runs inside tests, whose process has other signals."""

    def listen(self) -> None:
        """Take none."""
