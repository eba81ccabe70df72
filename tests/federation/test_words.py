"""Words from other hosts: what is no word is refused in one line; sites tell each other what they must agree in."""

import json
from dataclasses import replace
from typing import Any

import pytest

from train.config.schema import Config
from train.federation.agreement import Saved, Word, disagreements, fingerprints

WORD = Word(phase="start", step=7, line="a", tokens=5, saved=(Saved(4, 1, "a"),), config=fingerprints(Config()))


def test_configurations_survive_json() -> None:
    assert Word.from_dict(json.loads(json.dumps(WORD.to_dict()))) == WORD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"phase": "end"}, "phase"),
        ({"phase": []}, "phase"),
        ({"step": "7"}, "step"),
        ({"step": True}, "step"),
        ({"tokens": -1}, "tokens"),
        ({"line": None}, "line"),
        ({"fragment": "0"}, "fragment"),
        ({"saved": {}}, "saved"),
        ({"saved": [{"step": 4, "round": 1}]}, "saved"),
        ({"saved": [[4, 1, "a"]]}, "saved"),
        ({"waited": "long"}, "waited"),
        ({"config": {"train.steps": 3}}, "config"),
        ({"more": 1}, "set of fields"),
    ],
)
def test_what_is_no_word_is_refused_in_one_line(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        Word.from_dict({**WORD.to_dict(), **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, [], {}, {"phase": "start"}, "word"])
def test_what_is_nothing_like_a_word_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="set of fields"):
        Word.from_dict(data)


def test_keys_in_which_sites_differ_are_named() -> None:
    config = Config()
    same = replace(config, run=replace(config.run, dir="elsewhere"), federation=replace(config.federation, site=1, quorum=2, deadline=5.0))
    other = replace(config, train=replace(config.train, seed=8), optim=replace(config.optim, lr=0.5))
    words = {site: replace(WORD, config=fingerprints(each)) for site, each in enumerate((config, same))}
    assert disagreements(words) == []
    assert disagreements({**words, 2: replace(WORD, config=fingerprints(other))}) == ["optim.lr", "train.seed"]
