"""How much a site counts in each mean of an outer step: alike, or by the tokens it trained on since the last one."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from moe.residency import ResidencyPlan
from train.config.schema import Config
from train.engine.checkpoint import unwrap


@dataclass(frozen=True)
class _Counts:
    tokens: int
    experts: dict[str, list[int]]
    """Assignments by block (JSON's keys are text) and expert."""

    def of(self, layer: int, expert: int) -> int:
        counts = self.experts.get(str(layer))
        return counts[expert] if counts is not None else 0


class Seen:
    """Tokens that this site, and each expert at it, trained on; counted since the last outer step of each fragment."""

    def __init__(self, config: Config, plan: ResidencyPlan | None, chunks: list[Any]) -> None:
        self._by_tokens = config.federation.weights == "tokens"
        fragments = config.federation.fragments
        self._fragments = [str(fragment) for fragment in (range(fragments) if fragments > 1 else (None,))]
        self._plan, self._site = plan, config.federation.site or 0
        self._frozen = config.moe.mode == "frozen" and plan is not None
        self._load: Any = None
        if self._by_tokens and config.moe.experts:
            from moe.load import ExpertLoad

            self._load = ExpertLoad([unwrap(chunk) for chunk in chunks], config.model.layers, config.moe.experts)
        self._now = _Counts(0, {})
        self._begun: dict[str, _Counts] = {}
        self._since: dict[str, _Counts] = {}

    def add(self, tokens: int) -> None:
        """A local step of the site with so many tokens."""
        self._now = _Counts(self._now.tokens + tokens, self._now.experts)

    def weights(
        self, fragment: int | None, names: Iterable[str], experts: Mapping[str, tuple[int, int]], residency: int = 0
    ) -> dict[str, float] | None:
        """The weight of each of `names`, of which `experts` are parts of (block, expert); None when sites count alike (collective).

        To be called at the beginning of an outer step of `fragment` (None: of everything); `residency` is the round of the plan in force.
        """
        self._collect()
        self._begun[str(fragment)] = self._now
        if not self._by_tokens and not self._frozen:
            return None
        since = self._since.get(str(fragment), _Counts(0, {}))
        weights = dict.fromkeys(names, float(self._now.tokens - since.tokens) if self._by_tokens else 1.0)
        for name, (layer, expert) in experts.items():
            if self._by_tokens:
                weights[name] = float(self._now.of(layer, expert) - since.of(layer, expert))
            if self._frozen and self._plan is not None and self._site not in self._plan.holders(expert, layer, residency):
                weights[name] = 0.0
        return weights

    def mark(self, fragment: int | None) -> None:
        """The outer step of `fragment` that began last has been taken: what came since its beginning counts for the next one."""
        self._since[str(fragment)] = self._begun[str(fragment)]

    def restart(self) -> None:
        """This site has taken over others' weights, so what it did is gone: count from here for every fragment (collective)."""
        self._collect()
        self._since = dict.fromkeys(self._fragments, self._now)

    def state_dict(self) -> dict[str, Any]:
        """The counts as JSON, for a resumed run to end its round as if it had not stopped (collective)."""
        self._collect()
        parts = {"begun": self._begun, "since": self._since}
        return {"now": asdict(self._now), **{part: {key: asdict(value) for key, value in of.items()} for part, of in parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict()`."""
        self._now = _Counts(**state["now"])
        self._begun, self._since = ({key: _Counts(**value) for key, value in state[part].items()} for part in ("begun", "since"))

    def _collect(self) -> None:
        if self._load is None:
            return
        experts = dict(self._now.experts)
        for number, layer in self._load.collect(dist.group.WORLD).items():
            before = experts.get(str(number - 1), [0] * len(layer.load))
            experts[str(number - 1)] = [one + more for one, more in zip(before, layer.load.tolist(), strict=True)]
        self._now = _Counts(self._now.tokens, experts)
