"""What sites agree on at a meeting, as pure functions of what each of them said: all sites come to the same answer by themselves.

A site says where it stands (`Word`): whether it is just starting, ready to train, or at the end of a round, and which complete
checkpoints it has. Sites that start together begin from checkpoints of one round; a site that starts while others train joins their
round. Sites whose configurations differ in what makes the model stop (`disagreements`). Free of torch.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from moe.membership import Meeting
from train.config.convert import known_keys
from train.config.errors import show
from train.config.schema import Config
from train.config.sites import MAY_DIFFER, get, listed

Phase = Literal["start", "ready", "round"]
_MAY_DIFFER = (*MAY_DIFFER, "federation.quorum", "federation.deadline")
"""A quorum that one site alone lowers or a deadline of its own changes no weights."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of a site."""

    step: int
    round: int
    """Outer steps that it had taken."""
    line: str
    """Which outer steps they were (`OuterStep.line`)."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What a site tells the others at a meeting; travels as JSON."""

    phase: Phase
    step: int
    """Local steps that it has taken."""
    line: str
    """See `OuterStep.line`."""
    fragment: int | None = None
    """The part of the layers that is due; None: all of them."""
    residency: int = 0
    """Round of the residency plan that its experts are those of."""
    tokens: int = 0
    """Tokens that it has seen."""
    saved: Sequence[Saved] = field(default_factory=tuple)
    waited: float = 0.0
    """Seconds since it began to wait for the others."""
    config: Mapping[str, str] = field(default_factory=dict)
    """A short hash of each key in which sites must agree (`fingerprints`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"saved": [asdict(each) for each in self.saved], "config": dict(self.config)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Word":
        """The word of `to_dict`. Raises ValueError on anything else: it comes from another host."""
        fault = _fault(data)
        if fault is not None:
            raise ValueError(f"federation: the word of another site has no right {fault}; run one version of the program at all sites")
        return Word(**{**data, "saved": tuple(Saved(**each) for each in data["saved"])})


def words_of(meeting: Meeting) -> dict[int, Word]:
    """What each member said. Raises ValueError when one made no sense."""
    return {site: Word.from_dict(meeting.data[site]) for site in meeting.members}


def fingerprints(config: Config) -> dict[str, str]:
    """A short hash of the value of each key in which the sites of a run must agree."""
    keys = [key for key in known_keys() if not listed(key, _MAY_DIFFER)]
    return {key: hashlib.sha256(show(get(config, key)).encode()).hexdigest()[:8] for key in keys}


def disagreements(words: Mapping[int, Word]) -> list[str]:
    """The keys that are not the same at all sites."""
    keys = sorted({key for word in words.values() for key in word.config})
    return [key for key in keys if len({word.config.get(key) for word in words.values()}) > 1]


def _fault(data: Any) -> str | None:
    """What is wrong in a word that arrived; None: nothing."""
    if not isinstance(data, Mapping) or data.keys() != {each.name for each in fields(Word)}:
        return "set of fields"
    right = {
        "phase": data["phase"] in get_args(Phase),
        "step": _count(data["step"]),
        "line": isinstance(data["line"], str),
        "fragment": data["fragment"] is None or _count(data["fragment"]),
        "residency": _count(data["residency"]),
        "tokens": _count(data["tokens"]),
        "saved": isinstance(data["saved"], list) and all(map(_is_saved, data["saved"])),
        "waited": type(data["waited"]) in (int, float),
        "config": isinstance(data["config"], Mapping) and all(isinstance(text, str) for pair in data["config"].items() for text in pair),
    }
    return next((name for name, fine in right.items() if not fine), None)


def _is_saved(data: Any) -> bool:
    names = {each.name for each in fields(Saved)}
    return isinstance(data, Mapping) and data.keys() == names and _count(data["step"], data["round"]) and isinstance(data["line"], str)


def _count(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def action(words: Mapping[int, Word]) -> Phase:
    """What a meeting is for: a `round`, as soon as one member is at the end of one; else getting `ready`; else the `start` of all."""
    phases = {word.phase for word in words.values()}
    return "round" if "round" in phases else "ready" if "ready" in phases else "start"


def complete(words: Mapping[int, Word], sites: int, deadline: float) -> bool:
    """Whether sites that start go on from this meeting: all are there, or one has waited long enough for the rest."""
    return len(words) == sites or max(word.waited for word in words.values()) >= deadline


def place(words: Mapping[int, Word]) -> tuple[int, int | None]:
    """Step and fragment of the round that a meeting ends: those of the member that is furthest."""
    furthest = max((word for word in words.values() if word.phase == "round"), key=lambda word: word.step)
    return furthest.step, furthest.fragment


def due(step: int, sync_every: int, fragments: int) -> tuple[bool, int | None]:
    """Whether an outer step follows local step `step` (counted from 1), and of which fragment (None: there is but one)."""
    interval = sync_every // fragments
    if step % interval:
        return False, None
    return True, (step // interval - 1) % fragments if fragments > 1 else None


def beginnings(saved: Mapping[int, Sequence[Saved]], every: int) -> dict[int, int | None]:
    """Step of the checkpoint that each site begins from when all start together; None: it has none that fits, and catches up.

    All begin from one round, the newest of which every site has a checkpoint; when there is none, the newest of all. Sites
    train alone within a round, so each could take its own newest checkpoint of it, and does so when they were stopped together,
    that is less than `every` steps apart (0: no regular checkpoints). Otherwise they take the newest step that all have, so that
    none has to wait for the rest. A site without any checkpoint has no say.
    """
    old = {site: list(checkpoints) for site, checkpoints in saved.items() if checkpoints}
    if not old:
        return dict.fromkeys(saved)
    having = Counter(key for checkpoints in old.values() for key in {(each.round, each.line) for each in checkpoints})
    chosen = max(having, key=lambda key: (having[key] == len(old), key[0], having[key], key[1]))
    steps = {site: {each.step for each in checkpoints if (each.round, each.line) == chosen} for site, checkpoints in old.items()}
    steps = {site: found for site, found in steps.items() if found}
    newest = {site: max(found) for site, found in steps.items()}
    common = set.intersection(*steps.values())
    if common and every and max(newest.values()) - min(newest.values()) >= every:
        newest = dict.fromkeys(newest, max(common))
    return {site: newest.get(site) for site in saved}
