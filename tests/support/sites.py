"""Sites of a federation for tests: plans, what a site holds, and sites as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from moe.exchange import Exchange, Hub, PairwiseExchange
from moe.outer import Named
from moe.residency import ResidencyPlan


def build_plan(sites: int, replication: int, experts: int = 4, policy: str = "contiguous", layers: int = 1) -> ResidencyPlan:
    return ResidencyPlan.build(experts, sites, replication, policy, 0, layers)


def at_sites(count: int, job: Callable[[Exchange], Any]) -> list[Any]:
    """`job` at each of `count` sites, threads of this process."""
    hub = Hub(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda site: job(hub.exchange(site)), range(count)))


class QueueExchange(PairwiseExchange):
    """Sites as threads that send bytes to each other: the exchange over gloo without the processes."""

    def __init__(self, site: int, boxes: dict[tuple[int, int], SimpleQueue], **settings: Any) -> None:
        super().__init__(site, settings.get("transfer", "fp32"), settings.get("bucket", 2**20))
        self._boxes = boxes

    def _send(self, site: int, raw: Tensor) -> Any:
        self._boxes[self.site, site].put(raw.clone())

    def _receive(self, site: int, raw: Tensor) -> Any:
        return raw, self._boxes[site, self.site]

    def _wait(self, work: Any) -> None:
        if work is not None:
            raw, box = work
            raw.copy_(box.get(timeout=60))


def over_queues(count: int, job: Callable[[PairwiseExchange], Any], **settings: Any) -> list[Any]:
    """`job` at each of `count` sites, which send each other bytes; settings are `transfer` and `bucket`."""
    boxes: dict[tuple[int, int], SimpleQueue] = {(a, b): SimpleQueue() for a in range(count) for b in range(count)}
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda site: job(QueueExchange(site, boxes, **settings)), range(count)))


class Alone:
    """A federation of one: any exchange would be a fault."""

    site = bytes_sent = bytes_received = payload_bytes = 0

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        raise AssertionError("nothing to exchange")

    def copy(self, source: int, group: tuple[int, ...], tensors: list[Tensor]) -> None:
        raise AssertionError("nothing to exchange")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts_of(plan: ResidencyPlan, site: int, start: float) -> dict[str, Named]:
    """Everything a site of one-number experts holds: a dense weight, all router rows, its experts; each at its own start."""
    named = {"dense": Named(torch.full((2,), start), "dense")}
    for layer in plan.layers:
        rows = torch.full((plan.num_experts, 1), start)
        for expert in range(plan.num_experts):
            named[f"router.{layer}.{expert}"] = Named(rows[expert], "router_row", layer, expert)
        stack = torch.full((len(plan.resident(site, layer)), 3), start)
        for slot, expert in enumerate(plan.resident(site, layer)):
            named[f"expert.{layer}.{expert}"] = Named(stack[slot], "expert", layer, expert)
    return named
