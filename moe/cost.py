"""What partitioned experts cost: bytes on the wire, memory per site, and how both scale. A model in plain Python, no torch.

With H local steps between outer steps, classes c of parameters (dense, each router row, each expert) of P_c parameters that
n_c sites exchange in b bytes a parameter, one site moves, per step,

    payload   (1/H) * 2 * sum over classes with n_c >= 2 of b P_c                what it hands over and gets back
    ring      (1/H) * sum over classes of 2 (n_c - 1)/n_c b P_c                  what a bandwidth-optimal sum sends, once

The two differ: a public figure for one must not be set beside the other. A class that one site holds costs nothing. Moving
experts of a `rotating` plan are counted apart (`moved_bytes`). State memory is 18 bytes a resident parameter on the device
(bf16 weight, fp32 main gradient, master and two Adam moments) and 8 on the host (fp32 anchor and momentum of the outer step).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .residency import ResidencyPlan

Accounting = Literal["payload", "ring"]
RouterRows = Literal["holders", "all"]

DEVICE_BYTES = 18
"""Training state of a resident parameter on the device: 2 weight, 4 main gradient, 4 master, 8 Adam moments."""
HOST_BYTES = 8
"""State of the outer step on the host: 4 anchor, 4 momentum."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of a model by class, whole model (all tensor- and pipeline-parallel ranks)."""

    dense: int
    """Parameters that every site holds: all but experts and router rows."""
    expert: Mapping[int, int]
    """Parameters of one expert, by layer."""
    router_row: Mapping[int, int]
    """Parameters of one router row, by layer. Every site holds all rows."""

    @staticmethod
    def uniform(*, dense: int, expert: int, router_row: int, layers: Iterable[int]) -> "Sizes":
        """Sizes of a model whose layers with experts, `layers`, are alike."""
        numbers = list(layers)
        return Sizes(dense=dense, expert=dict.fromkeys(numbers, expert), router_row=dict.fromkeys(numbers, router_row))

    def total(self, num_experts: int) -> int:
        """Parameters of the whole model with `num_experts` experts in each layer that has some."""
        return self.dense + num_experts * (sum(self.expert.values()) + sum(self.router_row.values()))


def comm_bytes(
    plan: ResidencyPlan,
    sizes: Sizes,
    sync_every: int,
    accounting: Accounting = "payload",
    *,
    site: int = 0,
    round: int = 0,
    bytes_per_parameter: float = 4.0,
    router_rows: RouterRows = "holders",
) -> float:
    """Bytes that `site` moves per local step, averaged over the `sync_every` steps of a round.

    Router rows go to the holders of their expert, or with `router_rows="all"` to all sites. Raises ValueError on an unknown
    accounting, on sync_every < 1, and on sizes whose layers are not the plan's.
    """
    _check_accounting(accounting)
    _check_layers(plan, sizes)
    if sync_every < 1:
        raise ValueError(f"sync_every={sync_every}: a round has at least one local step; give 1 or more")
    classes = [(plan.sites, sizes.dense)]
    for layer in plan.layers:
        held = plan.resident(site, layer, round)
        classes += [(len(plan.holders(expert, layer, round)), sizes.expert[layer]) for expert in held]
        if router_rows == "all":
            classes += [(plan.sites, sizes.router_row[layer])] * plan.num_experts
        elif router_rows == "holders":
            classes += [(len(plan.holders(expert, layer, round)), sizes.router_row[layer]) for expert in held]
        else:
            raise ValueError(f"router_rows={router_rows}: must be holders or all; choose one")
    return sum(_share(holders, accounting) * count for holders, count in classes) * bytes_per_parameter / sync_every


def ddp_bytes(sizes: Sizes, num_experts: int, sites: int, accounting: Accounting = "payload", *, bytes_per_parameter: float = 4.0) -> float:
    """Bytes a site moves per step when everything is resident everywhere and gradients are summed in every step."""
    _check_accounting(accounting)
    return _share(sites, accounting) * sizes.total(num_experts) * bytes_per_parameter


def moved_bytes(
    plan: ResidencyPlan,
    sizes: Sizes,
    round: int,
    *,
    bytes_per_parameter: float = 4.0,
    row_bytes_per_parameter: float = 0.0,
    site: int | None = None,
) -> float:
    """Bytes of experts that change hands before `round`, over all sites, or as sent by `site`.

    Each is sent once to each new holder, by its first old one; `row_bytes_per_parameter` are those of its router row.
    """
    _check_layers(plan, sizes)
    return sum(
        sizes.expert[layer] * bytes_per_parameter + sizes.router_row[layer] * row_bytes_per_parameter
        for layer, expert, _ in plan.moves(round)
        if site is None or plan.holders(expert, layer, round - 1)[0] == site
    )


def resident_parameters(plan: ResidencyPlan, sizes: Sizes, site: int, round: int = 0) -> int:
    """Parameters that `site` holds: dense ones, all router rows, and its experts."""
    _check_layers(plan, sizes)
    experts = sum(len(plan.resident(site, layer, round)) * sizes.expert[layer] for layer in plan.layers)
    return sizes.dense + plan.num_experts * sum(sizes.router_row.values()) + experts


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of training state at a site, all its ranks together; activations are not in it."""

    device: int
    host: int


def state_memory(parameters: int, *, federated: bool = True) -> Memory:
    """Training state of `parameters` resident parameters; without outer steps (`federated=False`) the host keeps none."""
    return Memory(device=DEVICE_BYTES * parameters, host=HOST_BYTES * parameters if federated else 0)


def projected_parameters(total: float, expert_share: float, fraction: float) -> float:
    """Parameters a site holds of a model of `total` parameters, a share `expert_share` of them in experts, at `fraction` resident.

    A model, not a measurement: total * (1 - f + f rho).
    """
    for key, value in (("expert_share", expert_share), ("fraction", fraction)):
        if not 0 <= value <= 1:
            raise ValueError(f"{key}={value}: is a share; give a number from 0 to 1")
    return total * (1 - expert_share + expert_share * fraction)


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """One row of the trade-off table; bytes and parameters are those of the site that has most."""

    sites: int
    replication: int
    sync_every: int
    payload: float
    """Bytes per site and step by payload."""
    ring: float
    """Bytes per site and step by ring."""
    parameters: int
    """Resident parameters."""
    memory: Memory


def trade_offs(
    sizes: Sizes,
    num_experts: int,
    sites: Iterable[int],
    replications: Iterable[int],
    sync_every: Iterable[int],
    *,
    bytes_per_parameter: float = 4.0,
) -> list[TradeOff]:
    """Rows for every possible combination, in the given order; a replication above the number of sites is left out."""
    replications, sync_every = list(replications), list(sync_every)
    rows = []
    for m in sites:
        for r in replications:
            if r > m or r * num_experts < m:
                continue
            plan = ResidencyPlan.build(num_experts, m, r, "contiguous", 0, sorted(sizes.expert))
            parameters = max(resident_parameters(plan, sizes, site) for site in range(m))
            for h in sync_every:
                payload, ring = (
                    max(comm_bytes(plan, sizes, h, kind, site=site, bytes_per_parameter=bytes_per_parameter) for site in range(m))
                    for kind in ("payload", "ring")
                )
                rows.append(
                    TradeOff(
                        sites=m,
                        replication=r,
                        sync_every=h,
                        payload=payload,
                        ring=ring,
                        parameters=parameters,
                        memory=state_memory(parameters, federated=m > 1),
                    )
                )
    return rows


def _share(holders: int, accounting: Accounting) -> float:
    if holders < 2:
        return 0.0
    return 2.0 if accounting == "payload" else 2.0 * (holders - 1) / holders


def _check_accounting(accounting: str) -> None:
    if accounting not in ("payload", "ring"):
        raise ValueError(f"accounting={accounting}: must be payload or ring; choose one")


def _check_layers(plan: ResidencyPlan, sizes: Sizes) -> None:
    for name, by_layer in (("expert", sizes.expert), ("router_row", sizes.router_row)):
        if set(by_layer) != set(plan.layers):
            raise ValueError(f"sizes.{name}: has layers {sorted(by_layer)}, the plan {list(plan.layers)}; give one size for each")
