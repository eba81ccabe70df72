"""A site whose checkpoint holds a delayed step in flight comes back when the others are rounds further."""

import json
from pathlib import Path
from typing import Any

import torch
from federated_run import FEDERATED
from ranks import RankPools
from small_engine import assemble
from stopped_site import lives

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


def test_a_site_comes_back_with_a_step_in_flight(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    ((zero,), _), ((one,), _), ((first, second), own) = ranks(3).run(
        lives, corpus, str(tmp_path), endpoint, CHANGES, STOPS_AT, GO_ON_FROM, timeout=240.0
    )
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
