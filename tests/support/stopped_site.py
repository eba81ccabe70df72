"""A site of three that is asked to stop, leaves, and starts again when the others are further."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from federated_run import at_site
from small_run import Outcome
from sub_worlds import sub_worlds

from train.preemption import NeverStop


class _Asked(NeverStop):
    def __bool__(self) -> bool:
        return True


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 100
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def lives(
    corpus: str, place: str, endpoint: str, changes: dict[str, Any], stops_at: int, go_on_from: int, lost: Sequence[int] = ()
) -> tuple[list[Outcome], list[str]]:
    """Site 2 stops at `stops_at`, starts again when the others wait at `go_on_from`; returns the runs and the log lines of a rank.

    Its checkpoints of the steps `lost` are gone by then.
    A job on a pool of three ranks, each a site.
    """
    from megatron.core import parallel_state

    from train import loop
    from train.federation.presence import Presence
    from train.federation.run import Federation

    said: list[str] = []
    again, waits = Path(place, "again"), Path(place, "waits")
    step, start, say = loop.Trainer._step, Federation.start, Presence.say
    with sub_worlds(3) as here:

        def stepping(self: Any) -> Any:
            if here.site == 2 and self.progress.step == stops_at - 1:
                self.stop = _Asked()
            if here.site != 2 and self.progress.step == go_on_from:
                waits.touch()
                _wait_for(again)
            return step(self)

        def starting(self: Any, standing: Any) -> Any:
            if here.site == 2 and waits.exists():
                again.touch()
            return start(self, standing)

        Presence.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
        loop.Trainer._step, Federation.start = stepping, starting  # type: ignore[method-assign]
        try:
            outcomes = [at_site(corpus, place, changes, endpoint, 3, here=here)]
            if here.site == 2:
                parallel_state.destroy_model_parallel()
                _wait_for(waits)
                for step_lost in lost:
                    (Path(place) / f"2/checkpoints/step_{step_lost:08d}/leantron.json").unlink()
                outcomes.append(at_site(corpus, place, changes, endpoint, 3, True, here=here))
        finally:
            loop.Trainer._step, Federation.start, Presence.say = step, start, say  # type: ignore[method-assign]
    return outcomes, said
