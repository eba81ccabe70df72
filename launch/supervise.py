"""Watch over the torchrun worlds of one command until all have ended: signals, restarts, the place where sites meet."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from launch.torchrun import World

POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Helper(Protocol):
    """A process beside the worlds that must be there as long as they run."""

    def keep(self) -> None:
        """Start it, and again when it has died. Raises OSError, in words, when it does not come up."""

    def needed(self) -> bool:
        """Whether others need it when the worlds have ended."""

    def close(self) -> None:
        """End it."""


def supervise(worlds: Sequence[World], helper: Helper | None = None) -> None:
    """Start the worlds and wait until every one has ended for good; each has its `code` then.

    The first signal asks all of them to save and leave, the second one ends them. A world that fails is started again by itself
    while the others go on.
    """
    received: list[int] = []
    with _handlers(received.append, lambda: _resize(worlds)):
        for world in worlds:
            world.begin()
        passed = 0
        while _running(worlds):
            for number in received[passed:]:
                passed += 1
                for world in worlds:
                    world.forward(number)
            if helper is not None and not _keep(helper, worlds):
                helper = None
            time.sleep(POLL_SECONDS)
        while helper is not None and not received and helper.needed() and _keep(helper, worlds):
            time.sleep(1.0)
    if helper is not None:
        helper.close()


def _running(worlds: Sequence[World]) -> bool:
    ended = [world.poll() for world in worlds]  # each poll looks after its world: none is left out
    return not all(ended)


def _resize(worlds: Sequence[World]) -> None:
    for world in worlds:
        world.resize()


def _keep(helper: Helper, worlds: Sequence[World]) -> bool:
    """Look after the helper; without it nothing can go on, and the worlds are ended."""
    try:
        helper.keep()
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        for world in worlds:
            world.give_up()
        return False
    return True


@contextmanager
def _handlers(forward: Callable[[int], None], resize: Callable[[], None]) -> Iterator[None]:
    """Take signals while worlds run; only the main thread may (a sweep's jobs in threads have no handlers)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        forward(number)

    def handle_resize(_: int, __: FrameType | None) -> None:
        resize()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, handle_resize)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
