"""A site whose checkpoint holds a delayed step in flight comes back when the others are rounds further."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from federated_run import FEDERATED, at_site
from ranks import RankPools
from small_engine import assemble
from small_run import Outcome
from sub_worlds import sub_worlds

from train.preemption import NeverStop

CHANGES: dict[str, Any] = {
    **FEDERATED,
    "moe.experts": 0,
    "train.steps": 16,
    "train.global_batch": 3,
    "federation.sync_every": 4,
    "federation.overlap_steps": 2,
    "federation.quorum": 2,
    "federation.deadline": 30.0,
    "federation.weights": "tokens",
}
STOPS_AT, GO_ON_FROM = 5, 9


class Asked(NeverStop):
    def __bool__(self) -> bool:
        return True


def wait_for(path: Path) -> None:
    end = time.monotonic() + 100
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def lives(corpus: str, place: str, endpoint: str) -> tuple[list[Outcome], list[str]]:
    """Site 2 of three is stopped at step 5, with the step of step 4 on its way, and starts again when the others are past step 8."""
    from megatron.core import parallel_state

    from train import loop
    from train.federation.presence import Presence
    from train.federation.run import Federation

    said: list[str] = []
    again, waits = Path(place, "again"), Path(place, "waits")
    step, start, say = loop.Trainer._step, Federation.start, Presence.say
    with sub_worlds(3) as here:

        def stepping(self: Any) -> Any:
            if here.site == 2 and self.progress.step == STOPS_AT - 1:
                self.stop = Asked()
            if here.site != 2 and self.progress.step == GO_ON_FROM:
                waits.touch()
                wait_for(again)
            return step(self)

        def starting(self: Any, standing: Any) -> Any:
            if standing.step == STOPS_AT:
                again.touch()
            return start(self, standing)

        Presence.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
        loop.Trainer._step, Federation.start = stepping, starting  # type: ignore[method-assign]
        try:
            outcomes = [at_site(corpus, place, CHANGES, endpoint, 3, here=here)]
            if here.site == 2:
                parallel_state.destroy_model_parallel()
                wait_for(waits)
                outcomes.append(at_site(corpus, place, CHANGES, endpoint, 3, True, here=here))
        finally:
            loop.Trainer._step, Federation.start, Presence.say = step, start, say  # type: ignore[method-assign]
    return outcomes, said


def test_a_site_comes_back_with_a_step_in_flight(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    ((zero,), _), ((one,), _), ((first, second), own) = ranks(3).run(lives, corpus, str(tmp_path), endpoint, timeout=240.0)
    assert first.status == "preempted" and first.progress["step"] == STOPS_AT
    manifest = json.loads((tmp_path / f"2/checkpoints/step_{STOPS_AT:08d}/leantron.json").read_text())
    assert manifest["progress"]["federation"]["landing"] == {"step": 6, "fragment": None, "behind": 0}
    assert [outcome.status for outcome in (zero, one, second)] == ["completed"] * 3
    assert second.progress["step"] == 16 and second.lines[0]["step"] > GO_ON_FROM
    assert any("behind and has the others' weights now" in line for line in own)
    states = [assemble([outcome.state]) for outcome in (zero, one, second)]
    for name, value in states[0].items():
        if not name.startswith("optimizer."):
            assert all(torch.equal(value, state[name]) for state in states[1:]), name
