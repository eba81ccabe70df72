"""Who takes part in outer steps and what they move: lines in the site's log, figures for its metrics."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe.membership import Meeting
from train.config.schema import Config
from train.engine.parallel import Ranks
from train.federation.agreement import words_of

_NAMED = 8  # experts that a line lists


class Presence:
    """What this site says about the others. Lines are printed on rank 0; `figures` is collective."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self._site, self._sites, self._ranks = config.federation.site or 0, config.federation.sites, ranks
        self._steps, self._interval = config.train.steps, config.federation.sync_every // config.federation.fragments
        self._missing: set[int] = set()
        self._orphans: tuple[tuple[int, int], ...] = ()
        self._members = self._sites
        self._tokens = 0
        self._happened = False
        self._round = self._failures = 0
        self._logged = [0] * 6
        self._rotates = config.federation.policy == "rotating"
        self._residency = 0
        self._came = self._went = 0
        self._reason = ""

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self._ranks.is_first:
            print(line, flush=True)

    def note(self, error: Exception) -> None:
        """Why this rank could not do its part; told with the round's failure if it is rank 0's."""
        self._reason = " ".join(str(error).split())
        if not self._ranks.is_first:
            print(f"federation: {self._reason}", flush=True)

    def seen(self, meeting: Meeting, step: int) -> None:
        """A meeting has taken place: who is new, who is missing, who is behind."""
        missing = set(range(self._sites)) - set(meeting.members)
        if left := missing - self._missing:
            self.say(f"federation: step {step}: {_sites(left)} missing; the other {len(meeting.members)} go on")
        if back := self._missing - missing:
            self.say(f"federation: step {step}: {_sites(back)} back")
        late = set(meeting.members) - set(meeting.current) - {self._site}
        if late:
            self.say(f"federation: step {step}: {_sites(late)} behind, and brought up to date")
        self._missing, self._members = missing, len(meeting.members)
        self._tokens = sum(word.tokens for word in words_of(meeting).values())

    def failed(self, reason: str, step: int) -> None:
        """An outer step did not happen at local step `step`."""
        self._failures += 1
        self._happened = True
        why, self._reason = self._reason or reason, ""
        again = step // self._interval * self._interval + self._interval <= self._steps
        then = "the next one is tried when it is due" if again else "it was the last one, so the sites end with weights of their own"
        self.say(f"federation: step {step}: no outer step ({why}); the weights are as they were, {then}")

    def done(self, round: int, behind: int, stayed: Sequence[str], orphans: Iterable[tuple[int, int]], step: int) -> None:
        """Outer step number `round` is done; `behind`: rounds that this site was behind, `stayed`: what nobody else could give it."""
        self._happened, self._round, self._reason = True, round, ""
        if behind:
            self.say(
                f"federation: step {step}: this site was {behind} round{'s' if behind > 1 else ''} behind and has the others' weights now"
            )
            if stayed:
                more = f" and {len(stayed) - _NAMED} more" if len(stayed) > _NAMED else ""
                self.say(
                    f"federation: no other site holds {', '.join(stayed[:_NAMED])}{more}: as old as this site's checkpoint, {behind} rounds"
                )
        orphans = tuple(orphans)
        if orphans and orphans != self._orphans:
            named = ", ".join(f"{expert} of block {layer}" for layer, expert in orphans[:_NAMED])
            more = f" and {len(orphans) - _NAMED} more" if len(orphans) > _NAMED else ""
            self.say(f"federation: step {step}: no site that is there holds expert {named}{more}: frozen until one is back")
        self._orphans = orphans

    def turned(self, changes: Sequence[tuple[int, list[int], list[int]]] | None, residency: int, step: int) -> None:
        """Experts changed hands at this site: (block, those that came, those that went) of `changes`; None: they did not, though due.

        `residency`: the round of the plan that is in force.
        """
        self._happened, self._residency, why, self._reason = True, residency, self._reason or "not all sites had what they need", ""
        if changes is None:
            self.say(f"federation: step {step}: no experts changed hands ({why}); that is tried again after the next outer step")
            return
        self._came += sum(len(came) for _, came, _ in changes)
        self._went += sum(len(went) for _, _, went in changes)
        parts = [f"block {layer}: {_numbers(came)} came, {_numbers(went)} went" for layer, came, went in changes[:_NAMED]]
        more = [f"{len(changes) - _NAMED} more blocks"] if len(changes) > _NAMED else []
        self.say(f"federation: step {step}: experts changed hands; {'; '.join([*parts, *more]) or 'none at this site'}")

    def figures(self, moved: tuple[int, int, int] | None, handed: tuple[int, int, int] = (0, 0, 0)) -> dict[str, Any]:
        """Figures since the last line; {} without an outer step. `moved`: this sender's bytes sent, received and as payload, so far;
        `handed`: those of them that were experts which changed hands."""
        if not self._happened:
            return {}
        self._happened = False
        steps = [whole - part for whole, part in zip(moved or (0, 0, 0), handed, strict=True)]
        totals = torch.tensor([*steps, *handed], dtype=torch.int64, device=self._ranks.device)
        dist.all_reduce(totals)
        now = totals.tolist()
        sent, received, payload, handed_sent, handed_received, _ = (new - old for new, old in zip(now, self._logged, strict=True))
        self._logged = now
        rotation: dict[str, Any] = {}
        if self._rotates:
            rotation = {
                "moved_bytes": handed_sent,
                "moved_bytes_received": handed_received,
                "experts_came": self._came,
                "experts_went": self._went,
                "residency_round": self._residency,
            }
            self._came = self._went = 0
        return {
            "outer_bytes": sent,
            "outer_bytes_received": received,
            "outer_payload_bytes": payload,
            "outer_round": self._round,
            "outer_failed": self._failures,
            "sites_present": self._members,
            "experts_orphaned": len(self._orphans),
            "tokens_all_sites": self._tokens,
            **rotation,
        }


def _numbers(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts)) or "none"


def _sites(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"site{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} {'are' if len(found) > 1 else 'is'}"
