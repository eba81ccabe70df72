"""What sites agree on at a meeting, as pure functions of what each of them said: all sites come to the same answer by themselves.

A site says where it stands (`Word`): whether it is just starting, ready to train, or at the end of a round, and which complete
checkpoints it has. Sites that start together begin from checkpoints of one round; a site that starts while others train joins their
round. Free of torch.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Phase = Literal["start", "ready", "round"]


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
    tokens: int = 0
    """Tokens that it has seen."""
    saved: Sequence[Saved] = field(default_factory=tuple)
    waited: float = 0.0
    """Seconds since it began to wait for the others."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"saved": [asdict(each) for each in self.saved]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Word":
        """The word of `to_dict`."""
        return Word(**{**data, "saved": tuple(Saved(**each) for each in data["saved"])})


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
