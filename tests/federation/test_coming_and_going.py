"""A site that is asked to stop leaves, the others go on; started again it catches up and goes on with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federated_run import FEDERATED, PARTIAL
from ranks import RankPools
from small_engine import assemble
from stopped_site import lives

CHANGES: dict[str, Any] = {
    **FEDERATED,
    **PARTIAL,
    "train.steps": 16,
    "train.global_batch": 3,
    "federation.quorum": 2,
    "federation.deadline": 30.0,
}
STOPS_AT, GO_ON_FROM = 5, 8


@pytest.mark.slow
def test_a_stopped_site_comes_back(ranks: RankPools, corpus: str, tmp_path: Path, endpoint: str) -> None:
    (zero,), told = (answers := ranks(3).run(lives, corpus, str(tmp_path), endpoint, CHANGES, STOPS_AT, GO_ON_FROM, timeout=240.0))[0]
    (one,), _ = answers[1]
    (first, second), own = answers[2]
    assert first.status == "preempted" and first.progress["step"] == STOPS_AT
    assert [outcome.status for outcome in (zero, one, second)] == ["completed"] * 3
    rounds = [(line["step"], line["sites_present"], line["experts_orphaned"]) for line in zero.lines if "outer_round" in line]
    assert [step for step, *_ in rounds] == list(range(2, 17, 2)) and zero.lines[-1]["outer_failed"] == 0
    assert {present for step, present, _ in rounds if step <= 4} == {3}
    # Expert 2 of block 1 is at site 2 alone.
    assert (6, 2, 1) in rounds and (8, 2, 1) in rounds and rounds[-1][1:] == (3, 0)
    back = next(step for step, present, _ in rounds if step > 8 and present == 3)
    assert back <= GO_ON_FROM + 4, "within two rounds"
    assert any("site 2 is missing; the other 2 go on" in line for line in told)
    assert any("no site that is there holds expert 2 of block 1" in line for line in told)
    assert any("site 2 is back" in line for line in told) and any("site 2 is behind" in line for line in told)
    # The one that came back has steps, schedule and shared weights of the others, and its own expert.
    assert second.lines[0]["step"] == back + 1 and second.progress["step"] == 16
    assert [line["lr"] for line in second.lines] == [line["lr"] for line in zero.lines[back:]]
    assert any("this site was" in line and "behind and has the others' weights now" in line for line in own)
    assert any("no other site holds decoder.layers.1.mlp.experts.2.w_in" in line for line in own)
    states = [assemble([outcome.state]) for outcome in (zero, one, second)]
    for name, value in states[0].items():
        if "exp_avg" not in name and ".experts." not in name and "router" not in name and name != "optimizer.step":
            assert all(torch.equal(value, state[name]) for state in states[1:]), name
    assert any(name.endswith("experts.2.w_in") for name in states[2])
