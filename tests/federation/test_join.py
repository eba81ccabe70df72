"""How a site gets among those that train, step by step, with everything around it stood in for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_engine import small_config

from moe.membership import Meeting
from train.config.schema import Config
from train.federation.agreement import Word, fingerprints
from train.federation.landing import Landing
from train.federation.presence import Presence
from train.federation.run import Federation
from train.federation.weights import Seen
from train.worker import Hopeless

CONFIG: Config = replace(small_config(), federation=replace(small_config().federation, sites=2, site=1, endpoint="127.0.0.1:1"))


def meeting(rounds: dict[int, int], phase: Any = "ready", config: dict[int, Config] | None = None) -> Meeting:
    """Sites that have taken so many outer steps; site 0 is in `phase`, the others are ready."""

    def word(site: int) -> dict[str, Any]:
        own = fingerprints((config or {}).get(site, CONFIG))
        return Word(phase=phase if site == 0 else "ready", step=8, line=str(rounds[site]), config=own).to_dict()

    return Meeting(
        members=tuple(rounds), number=max(rounds.values()), prefix="p", group="p", store="", steps=rounds, data={s: word(s) for s in rounds}
    )


class Traced(Federation):
    """Site 1 of two on one rank, which writes down what it does."""

    def __init__(self, meetings: list[Meeting], owed: bool = False, landing: Landing | None = None) -> None:
        self.did: list[Any] = []
        self.site, self.sites, self._config, self._round, self._line = 1, 2, CONFIG, 0, ""
        self._agreed, self._first, self._met, self._owed, self._landing = fingerprints(CONFIG), None, 0.0, owed, landing
        self._outer = SimpleNamespace(drop=lambda: self.did.append("drop"))  # type: ignore[assignment]
        self._presence = Presence(CONFIG, SimpleNamespace(is_first=False))  # type: ignore[arg-type]
        pull = SimpleNamespace(pull=lambda: self.did.append("pull"))
        self._placement = SimpleNamespace(round=0, parameters=pull)  # type: ignore[assignment]
        self._turning = SimpleNamespace(follow=lambda *_: None)  # type: ignore[assignment]
        coming = iter(meetings)
        self._meetings = SimpleNamespace(  # type: ignore[assignment]
            meet_at_start=lambda *_: next(coming), commit=lambda _meeting, ok: self.did.append(("vote", ok))
        )

    def after_step(self, standing: Any, stopping: bool = False) -> None:
        self.did.append("outer step")

    def _land(self, standing: Any) -> None:
        self._landing = None
        self.did.append("land")


def standing(step: int = 5) -> Any:
    return SimpleNamespace(step=step, tokens=0)


class Joining(Traced):
    def _round_of(self, meeting: Meeting, standing: Any) -> bool:
        self._round += 1
        self.did.append("round")
        return True


def test_an_owed_outer_step_is_taken_once() -> None:
    alone = Joining([meeting({0: 0, 1: 0})], owed=True)
    alone.join(standing())
    assert alone.did == ["outer step"] and not alone._owed
    joined = Joining([meeting({0: 0, 1: 0}, "round")], owed=True)
    joined.join(standing())
    assert joined.did == ["round"] and not joined._owed


def pending() -> Landing:
    return Landing(step=6, fragment=None, meeting=None, begun=True, behind=0)


def test_a_step_in_flight_that_the_others_missed_is_applied_first() -> None:
    site = Traced([], landing=pending())
    both = meeting({0: 0, 1: 0}, "round")
    assert site._round_of(both, standing()) is False
    assert site.did == [("vote", False), "land"]


def test_a_step_in_flight_that_the_others_have_taken_is_dropped() -> None:
    site = Traced([], landing=pending())
    site._voting = SimpleNamespace(connect=lambda _: True, agree=lambda *_: (False, None))  # type: ignore[assignment]
    assert site._catch_up(meeting({0: 2, 1: 0}), standing()) is False
    assert site.did == ["drop", "pull"] and site._landing is None


def test_sites_of_different_configurations_do_not_train_together() -> None:
    other = replace(
        CONFIG, train=replace(CONFIG.train, precision="bf16"), federation=replace(CONFIG.federation, outer_lr=0.3, deadline=9.0)
    )
    both = meeting({0: 0, 1: 0}, config={0: other})
    with pytest.raises(Hopeless, match=r"sites 0, 1 differ in federation\.outer_lr, train\.precision; "):
        Joining([both]).join(standing())


def test_the_vote_on_a_delayed_step_waits_for_slower_sites() -> None:
    landing, config = pending(), replace(CONFIG, train=replace(CONFIG.train, timeout=900.0, hang_timeout=600.0))
    assert landing.patience(config) == pytest.approx(60.0)
    landing.since -= 100.0
    assert 150.0 <= landing.patience(config) < 250.0
    landing.since -= 1e6
    assert landing.patience(config) == 570.0
    assert landing.patience(replace(config, train=replace(config.train, hang_timeout=0.0))) == 870.0


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_a_site_did_before_it_took_over_weights_does_not_count(fragments: int) -> None:
    config = replace(CONFIG, federation=replace(CONFIG.federation, weights="tokens", fragments=fragments, sync_every=4))
    seen, fragment = Seen(config, None, []), 1 if fragments > 1 else None
    seen.add(100)
    assert seen.weights(fragment, ["w"], {}) == {"w": 100.0}
    seen.restart()
    seen.add(7)
    assert seen.weights(fragment, ["w"], {}) == {"w": 7.0}


def test_a_failed_last_step_is_not_said_to_be_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, train=replace(CONFIG.train, steps=8), federation=replace(CONFIG.federation, sync_every=4))
    presence = Presence(config, SimpleNamespace(is_first=True))  # type: ignore[arg-type]
    presence.failed("too few came", 4)
    assert "the next one is tried when it is due" in capsys.readouterr().out
    presence.failed("too few came", 8)
    assert "it was the last one" in capsys.readouterr().out
