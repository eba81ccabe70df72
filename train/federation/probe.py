"""The router monitor of a run over several sites: what the routers choose on one probe batch, before and after each outer step.

Every site passes the same rows through its model without gradients, once as it comes to an outer step and once with the new weights; hooks
on the routers note the experts of each token before any is skipped. The sites then compare (`moe.monitor`) over connections of the
probe's own, so that the outer step's bytes are counted apart and a comparison that fails costs its figures and nothing else.

The rows are the first validation rows, or without validation (`train.eval_steps=0`) the run's first training rows. At most
`MOST_TOKENS` of their tokens are compared, evenly spread; with sequence parallelism those of the first tensor-parallel rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.exchange import MeetingExchange
from moe.megatron import SiteRouter
from moe.membership import Meeting
from moe.monitor import RouterFigures, Snapshot, compare, probe_tokens
from train.config.schema import Config
from train.data.dataset import Batch
from train.engine.checkpoint import unwrap
from train.engine.parallel import Ranks
from train.engine.step import run_micro_batches

MOST_TOKENS = 1024
"""Tokens of a probe that are compared in a layer."""


def probe_rows(config: Config) -> int:
    """Rows of the probe batch: `federation.probe`, rounded up to whole groups of stages where chunks interleave; 0: none."""
    rows, pp = config.federation.probe, config.parallel.pp
    if not rows or not config.moe.experts or config.federation.sites == 1:
        return 0
    return -(-rows // pp) * pp if config.parallel.vpp > 1 else rows


class NoProbe:
    """Nothing is watched."""

    def before(self, meeting: Meeting) -> None:
        pass

    def after(self) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class RouterProbe:
    """This rank's part in its site's monitor. `before`, `after` and `figures` are collective in the site."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        chunks: list[Any],
        batches: Sequence[Batch],
        exchange: MeetingExchange | None,
        say: Callable[[str], None],
    ) -> None:
        """`batches`: one micro-batch of one row each, the same on every rank of every site. `exchange`: on the rank that compares."""
        self._seq_len, self._ranks, self._chunks, self._batches = config.train.seq_len, ranks, chunks, list(batches)
        self._exchange, self._say = exchange, say
        self._before: Snapshot | None = None
        self._meeting: Meeting | None = None
        self._found: RouterFigures | None = None
        self._news = False
        self._failed, self._group, self._name = False, "", ""

    def before(self, meeting: Meeting) -> None:
        """The weights are those that this site brings to the outer step of `meeting`."""
        self._before, self._meeting = self._snapshot(), meeting

    def after(self) -> None:
        """The weights are the outer step's: compare with the sites of its meeting."""
        before, meeting = self._before, self._meeting
        self._before = self._meeting = None
        if before is None or meeting is None:
            return
        after, self._news = self._snapshot(), True
        if self._exchange is None or not before.chosen or len(meeting.members) == 1:
            return
        try:
            self._exchange.use(self._named(meeting))
            self._found = compare(self._exchange, meeting.members, before, after)
            self._failed = False
        except (RuntimeError, OSError, ValueError) as error:
            self._exchange.close()
            self._failed = True
            self._say(f"federation: the routers were not compared ({' '.join(str(error).split())})")

    def figures(self) -> dict[str, dict[str, float]]:
        """Figures of the last comparison by 0-based layer, over all stages, on every rank; {} when there is none since the last call."""
        if not self._news:
            return {}
        self._news = False
        gathered: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(gathered, self._found)
        self._found = None
        merged: dict[str, dict[str, float]] = {"router_agreement_before": {}, "router_agreement_after": {}, "router_drift": {}}
        for found in gathered:
            for name, values in zip(merged, (found.agreement_before, found.agreement_after, found.drift) if found else (), strict=False):
                merged[name] |= {str(layer): value for layer, value in values.items()}
        return {name: dict(sorted(values.items(), key=lambda item: int(item[0]))) for name, values in merged.items() if values}

    def close(self) -> None:
        """End the connections."""
        if self._exchange is not None:
            self._exchange.close()

    def _named(self, meeting: Meeting) -> Meeting:
        """The meeting under the name of the probe's connections: a new one after a failure, of which the outer step's know nothing."""
        if self._failed or meeting.group != self._group:
            self._group, self._name = meeting.group, meeting.prefix
        return replace(meeting, group=self._name)

    @torch.no_grad()
    def _snapshot(self) -> Snapshot:
        """One pass of the probe batch through the model, on all ranks alike."""
        chosen: dict[int, list[Tensor]] = {}
        routers = [router for chunk in self._chunks for router in unwrap(chunk).modules() if isinstance(router, SiteRouter)]
        with ExitStack() as stack:
            for router in routers:
                stack.enter_context(_noting(router, chosen.setdefault(_layer(router), [])))
            for chunk in self._chunks:
                chunk.eval()
            run_micro_batches(
                self._chunks, lambda: iter(self._batches), self._ranks, len(self._batches), 1, self._seq_len, train=False
            )  # fmt: skip
            for chunk in self._chunks:
                chunk.train()
        whole = {layer: torch.cat(parts) for layer, parts in chosen.items()}
        return Snapshot(
            chosen={layer: tokens[probe_tokens(len(tokens), MOST_TOKENS).to(tokens.device)].cpu() for layer, tokens in whole.items()},
            weights={_layer(router): router.weight.detach().to("cpu", torch.float32, copy=True) for router in routers},
        )


def router_probe(
    config: Config, ranks: Ranks, chunks: list[Any], batches: Sequence[Batch], sends: bool, address: str, say: Callable[[str], None]
) -> RouterProbe | NoProbe:
    """The monitor of a run on this rank; `sends`: it exchanges its coordinate's parameters, from `address`."""
    if not batches:
        return NoProbe()
    tp, pp = ranks.groups.tp.rank(), ranks.groups.pp.rank()
    exchange = MeetingExchange(config.federation.site or 0, f"probe.{pp}", address=address) if sends and tp == 0 else None
    return RouterProbe(config, ranks, chunks, batches, exchange, say)


def _layer(router: SiteRouter) -> int:
    return int(router.layer_number or 0) - 1


@contextmanager
def _noting(router: SiteRouter, into: list[Tensor]) -> Iterator[None]:
    """Append to `into` which experts the router chooses for each token, (tokens, E) bool, before skipping."""

    def note(module: SiteRouter, inputs: tuple[Tensor, ...], _output: Any) -> None:
        scores = module.gating(inputs[0]).flatten(0, -2)
        if module.mode == "mask":
            scores = scores.masked_fill(~module.here, -torch.inf)
        if module.expert_bias is not None:
            scores = scores + module.expert_bias
        into.append(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(module.topk, dim=1).indices, True))

    handle = router.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()
