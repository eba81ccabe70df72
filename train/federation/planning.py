"""What a run over several sites will hold and move, before it starts: residents, bytes by both accountings, memory, trade-offs.

Everything is `moe.cost` with the run's own numbers: a model, nothing is measured. Counted bytes of a run stand beside the same formula
in `train/federation/accounting.py`. Free of torch.
"""

from dataclasses import asdict, replace
from typing import Any

from moe.cost import (
    Accounting,
    Sizes,
    comm_bytes,
    ddp_bytes,
    moved_bytes,
    projected_parameters,
    resident_parameters,
    state_memory,
    trade_offs,
)
from moe.residency import ResidencyPlan
from train.config.schema import Config
from train.federation.residency import residency_plan

ACCOUNTINGS: tuple[Accounting, ...] = ("payload", "ring")
TRANSFER_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256}
"""Bytes of a parameter on the wire, by `federation.transfer_dtype`; int8 sends a scale of 4 bytes for each 256 numbers of a tensor."""
DDP_BYTES = 4.0
"""Bytes of a gradient on the wire of a data-parallel run: the engine sums them in fp32."""
PROJECTED, PROJECTED_SHARE, FRACTIONS = 100e9, 0.95, (1.0, 0.5, 0.25, 0.125)
"""The model that is projected: parameters, the share of them in experts, and the resident fractions it is shown at."""
_SITES, _ROUNDS = (2, 4, 8), (8, 32, 128)


def federation_plan(config: Config, sizes: Sizes, source: str) -> dict[str, Any] | None:
    """The `federation` part of a run's plan; None for a run of one site. `source` says in words where `sizes` are from."""
    federation = config.federation
    if federation.sites == 1:
        return None
    plan, sizes, num_experts = meeting(config, sizes)
    held = everywhere(plan) if config.moe.mode == "frozen" else plan
    parameters = [resident_parameters(held, sizes, site) for site in range(federation.sites)]
    return {
        "sites": federation.sites,
        "replication": plan.replication,
        "fraction": plan.fraction,
        "policy": federation.policy,
        "sync_every": federation.sync_every,
        "residents": plan.describe().splitlines() if config.moe.experts else [],
        "sizes": {"source": source, "total": sizes.total(num_experts), **class_totals(sizes, num_experts)},
        "site_parameters": parameters,
        "site_memory_model": [asdict(state_memory(count)) for count in parameters],
        "bytes_per_step": traffic(config, sizes),
        "moved_per_rotation": rotation_bytes(config, sizes, federation.rotate_every or 0),
        "trade_offs": _trade_offs(config, sizes, num_experts),
        "projection_model": projection(sizes.total(num_experts) - sizes.dense, sizes.total(num_experts)),
    }


def meeting(config: Config, sizes: Sizes) -> tuple[ResidencyPlan, Sizes, int]:
    """Residency plan, sizes and number of experts that the cost model takes; a dense model counts as one expert of no size."""
    plan = residency_plan(config)
    if plan is not None:
        return plan, sizes, config.moe.experts
    sites = config.federation.sites
    return (
        ResidencyPlan.build(1, sites, sites, "contiguous", 0, [0]),
        Sizes.uniform(dense=sizes.dense, expert=0, router_row=0, layers=[0]),
        1,
    )


def everywhere(plan: ResidencyPlan) -> ResidencyPlan:
    """The plan in which every site holds every expert."""
    return ResidencyPlan.build(plan.num_experts, plan.sites, plan.sites, "contiguous", 0, plan.layers)


def class_totals(sizes: Sizes, num_experts: int) -> dict[str, int]:
    """Parameters of the whole model by class."""
    return {
        "dense": sizes.dense,
        "experts": num_experts * sum(sizes.expert.values()),
        "router_rows": num_experts * sum(sizes.router_row.values()),
    }


def traffic(config: Config, sizes: Sizes) -> list[dict[str, Any]]:
    """Bytes that each site moves per step, averaged over a round: this run, the same run with every expert everywhere, and DDP.

    Each line names its bytes per element. `payload` and `ring` hold one number a site.
    """
    federation = config.federation
    sites = range(federation.sites)
    width = TRANSFER_BYTES[federation.transfer_dtype]

    def line(name: str, all_here: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"name": name, "sync_every": federation.sync_every, "bytes_per_element": width}
        for kind in ACCOUNTINGS:
            found[kind] = [round_bytes(config, sizes, site, kind, all_here=all_here) / federation.sync_every for site in sites]
        return found

    ddp: dict[str, Any] = {"name": "DDP (gradients in every step)", "sync_every": 1, "bytes_per_element": DDP_BYTES}
    for kind in ACCOUNTINGS:
        ddp[kind] = [ddp_bytes(sizes, config.moe.experts, federation.sites, kind, bytes_per_parameter=DDP_BYTES)] * federation.sites
    return [
        line("this run", False),
        line("DiLoCo (every expert everywhere)", True),
        ddp,
    ]


def round_bytes(config: Config, sizes: Sizes, site: int, accounting: Accounting, *, all_here: bool = False) -> float:
    """Bytes that `site` moves in an outer step, by formula, moving experts left out; `all_here`: if it held every expert.

    In mode frozen every site takes over every expert, while router rows go by who trains the expert.
    """
    plan, sizes, _ = meeting(config, sizes)
    rows: Any = config.federation.router_rows

    def moved(held: ResidencyPlan, part: Sizes) -> float:
        width = TRANSFER_BYTES[config.federation.transfer_dtype]
        return comm_bytes(held, part, 1, accounting, site=site, bytes_per_parameter=width, router_rows=rows)

    if all_here:
        return moved(everywhere(plan), sizes)
    if config.moe.mode != "frozen":
        return moved(plan, sizes)
    none = dict.fromkeys(plan.layers, 0)
    return moved(everywhere(plan), replace(sizes, router_row=none)) + moved(plan, replace(sizes, dense=0, expert=none))


def rotation_bytes(config: Config, sizes: Sizes, round: int, site: int | None = None) -> float:
    """Bytes of the experts that change hands before `round`, by formula, as `site` sends them or all sites together; 0 if none do.

    In fp32 whatever the transfer type: of an expert the anchor, the outer momentum and Adam's two moments (in mode frozen, where every
    site has the weights, the moments), and of its router row, where rows go to holders, anchor and momentum.
    """
    plan, sizes, _ = meeting(config, sizes)
    outer = 4.0 * (1 + (config.federation.outer_momentum > 0))
    expert = 2 * 4.0 + (outer if config.moe.mode != "frozen" else 0.0)
    row = outer if config.federation.router_rows == "holders" else 0.0
    return moved_bytes(plan, sizes, round, bytes_per_parameter=expert, row_bytes_per_parameter=row, site=site)


def _trade_offs(config: Config, sizes: Sizes, num_experts: int) -> list[dict[str, Any]]:
    """Sites, replication and local steps around the run's own, contiguous residents."""
    federation = config.federation
    sites = sorted({*_SITES, federation.sites})
    replications = sorted({*sites, 1, federation.replication or federation.sites})
    every = sorted({*_ROUNDS, federation.sync_every})
    rows = trade_offs(sizes, num_experts, sites, replications, every, bytes_per_parameter=TRANSFER_BYTES[federation.transfer_dtype])
    if not config.moe.experts or config.moe.mode == "frozen":
        rows = [row for row in rows if row.replication == row.sites]
    return [asdict(row) for row in rows]


def projection(experts: int, total: int) -> dict[str, Any]:
    """A model, not a measurement: parameters and state that a site holds of a model of 100 B parameters, at four resident fractions.

    Once with the design's share of experts and once with this run's, `experts` of `total` parameters.
    """
    shares = {"assumed": PROJECTED_SHARE, "this run's": experts / total}
    return {
        "parameters": PROJECTED,
        "fractions": list(FRACTIONS),
        "by_expert_share": [
            {
                "share": share,
                "which": which,
                "site_parameters": (held := [projected_parameters(PROJECTED, share, fraction) for fraction in FRACTIONS]),
                "site_memory": [asdict(state_memory(round(count))) for count in held],
            }
            for which, share in shares.items()
        ],
    }
