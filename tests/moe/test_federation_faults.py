"""Sites as processes: whole rounds, one killed in mid-exchange, one stopped and back, and a lighthouse that starts again."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_sites import Party, expected
from torch import Tensor

pytestmark = pytest.mark.slow


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Party]]:
    parties = []

    def start(sites: int, **settings: Any) -> Party:
        parties.append(Party(sites, folder=str(tmp_path), **settings))
        return parties[-1]

    yield start
    for each in parties:
        each.close()


def weights_of(tmp_path: Path, site: int) -> dict[str, Tensor]:
    return torch.load(tmp_path / f"site{site}.pt")


def check(tmp_path: Path, party: Party, sites: list[int], replication: int = 2) -> dict[int, dict[str, Tensor]]:
    """Sites that ended agree to the bit on all they share, and with the formula over the members of each round."""
    party.wait_for(lambda event: event["what"] in ("end", "error"), len(sites))
    assert not [event for event in party.events if event["what"] == "error"]
    history = [(event["round"], event["current"]) for event in party.of("step", sites[0])]
    wanted = expected(party.settings["sites"], replication, history)
    ends = {site: weights_of(tmp_path, site) for site in sites}
    for site, weights in ends.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5, msg=f"{name} at site {site}")
            assert all(torch.equal(tensor, other[name]) for other in ends.values() if name in other)
    return ends


def test_a_site_killed_in_mid_exchange_is_survived(tmp_path: Path, party: Callable[..., Party]) -> None:
    four = party(4, quorum=3, die=[[2, 2]], rounds=5)
    check(tmp_path, four, [0, 1, 3])
    failures = [event for event in four.events if event["what"] == "failed"]
    assert {event["site"] for event in failures} == {0, 1, 3} and all(event["round"] == 2 for event in failures)
    for site in (0, 1, 3):
        members = {event["round"]: event["members"] for event in four.of("step", site)}
        assert members == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3], **{round: [0, 1, 3] for round in range(2, len(members))}}
        assert all(event["orphans"] == [] for event in four.of("step", site))


def test_a_stopped_site_is_left_out_and_catches_up(tmp_path: Path, party: Callable[..., Party]) -> None:
    four = party(4, quorum=3, pause=[[1, 2]], rounds=7, deadline=3.0)
    (event,) = four.wait_for(lambda event: event["what"] == "paused")
    assert event["site"] == 1
    four.wait_for(lambda event: event["what"] == "step" and event["site"] == 0 and event["members"] == [0, 2, 3], 2)
    os.kill(four.of("pid", 1)[0]["pid"], signal.SIGCONT)
    four.wait_for(lambda event: event["what"] in ("end", "error"), 4)
    back = four.of("step", 1)
    first = next(index for index, event in enumerate(back) if 1 not in event["current"])
    assert back[first]["came"] == ["dense", "expert.2", "expert.3"] and back[first]["stayed"] == []
    for event in back[first:]:
        others = [other for site in (0, 2, 3) for other in four.of("step", site) if other["round"] == event["round"]]
        assert others and all(other["digest"] == event["digest"] for other in others)
    assert all(event["current"] == [0, 1, 2, 3] for event in back[first + 1 :]) and len(back) > first + 1
    check(tmp_path, four, [0, 1, 2, 3])


def test_a_lighthouse_that_starts_again_is_found_again(tmp_path: Path, party: Callable[..., Party]) -> None:
    three = party(3, rounds=8, train=0.3)
    three.wait_for(lambda event: event["what"] == "step" and event["round"] == 2, 3)
    three.lighthouse.kill()
    three.lighthouse.wait()
    three.start_lighthouse()
    check(tmp_path, three, [0, 1, 2])
    assert all(event["members"] == [0, 1, 2] for event in three.events if event["what"] == "step")
