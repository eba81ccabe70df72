"""Bytes between sites, counted, beside the formula and the network interface: DDP, DiLoCo (r = M) and partitioned experts.

    python -m benchmarks.federation_bytes --out bytes.json --figure bytes.png
    python -m benchmarks.federation_bytes --sites 2 --parameters 300000        # seconds: does it run at all

Real processes, one a site, over gloo on the loopback interface; real outer steps on tensors of the sizes below, through the same
`OuterStep` and exchange as a run. DDP is a sum of all parameters over all sites in every step. The exchange counts what a site sends
and what it hands over and gets back; the formula (`moe.cost`) has the sizes and the plan. `lo` is what the kernel counted on the
interface meanwhile, all sites together, over what the sites say they sent: it counts everybody's traffic on the machine, so run
alone, or in a network of its own:

    unshare --map-root-user --net sh -c 'ip link set lo up; python -m benchmarks.federation_bytes'

Three quarters of the parameters are in experts; beside that, the point f (1 - rho) = .2958 with H = 32 (f = .5916, rho = 1/2).
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import provenance
from moe.cost import Sizes, comm_bytes
from moe.residency import ResidencyPlan

EVERY = 32
"""Local steps between outer steps, H."""
EXPERTS, LAYERS, WIDTH = 8, 2, 64
"""Experts in a layer, layers, numbers in a router row."""
POINT = 0.5916
"""Share of experts at which half of the experts saves .2958 of the parameters."""
TOLERANCE = 0.05
ENOUGH = 2**20
"""Bytes from which the interface counters are compared: below, connection traffic shows."""


@dataclass(frozen=True)
class Case:
    """One line of the table: what M sites exchange, and how often."""

    name: str
    sites: int
    replication: int
    every: int
    share: float
    """Share of the parameters in experts and their router rows."""

    @property
    def plan(self) -> ResidencyPlan:
        """Who holds what."""
        return ResidencyPlan.build(EXPERTS, self.sites, self.replication, "contiguous", 0, LAYERS)

    def sizes(self, parameters: int) -> Sizes:
        """A model of `parameters`, as nearly as whole experts allow."""
        expert = round(parameters * self.share / (LAYERS * EXPERTS)) - WIDTH
        dense = parameters - LAYERS * EXPERTS * (expert + WIDTH)
        return Sizes.uniform(dense=dense, expert=expert, router_row=WIDTH, layers=range(LAYERS))


def cases(sites: Sequence[int], share: float) -> list[Case]:
    """DDP, DiLoCo and every replication for each number of sites."""
    found = []
    for count in sites:
        found.append(Case("DDP", count, count, 1, share))
        found.append(Case("DiLoCo", count, count, EVERY, share))
        found += [Case(f"FoMoE r={r}", count, r, EVERY, share) for r in sorted({1, 2, count}) if r <= count]
    return found


def exchange_once(exchange: Any, case: Case, parameters: int) -> dict[str, int]:
    """What one outer step (of DDP, one step) counts at this site."""
    import torch

    from moe.outer import Named, OuterStep

    plan, sizes = case.plan, case.sizes(parameters)
    named = {f"dense.{i}": Named(part, "dense") for i, part in enumerate(torch.randn(sizes.dense).tensor_split(7))}
    for layer in plan.layers:
        rows = torch.randn(EXPERTS, sizes.router_row[layer])
        named |= {f"router.{layer}.{expert}": Named(rows[expert], "router_row", layer, expert) for expert in range(EXPERTS)}
        held = plan.resident(exchange.site, layer)
        named |= {f"experts.{layer}.{expert}": Named(torch.randn(sizes.expert[layer]), "expert", layer, expert) for expert in held}
    before = counters(exchange)
    OuterStep(named, plan, exchange, lr=1.0, momentum=0.0).step()
    return {name: value - before[name] for name, value in counters(exchange).items()}


def counters(exchange: Any) -> dict[str, int]:
    """The exchange's counts so far."""
    return {"sent": exchange.bytes_sent, "received": exchange.bytes_received, "payload": exchange.payload_bytes}


def loopback_bytes() -> int:
    """Bytes that the kernel has sent over `lo`."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def site(rank: int, wanted: list[Case], parameters: int, transfer: str, store: str, answers: Any) -> None:
    """A site's process: every case in turn, its counts to `answers`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from moe.exchange import GlooExchange

    torch.set_num_threads(1)
    world = wanted[0].sites
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    exchange = GlooExchange(transfer=transfer)
    exchange_once(exchange, wanted[0], parameters)  # connections are made on the first message
    for index, case in enumerate(wanted):
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        counted = exchange_once(exchange, case, parameters)
        dist.barrier()
        answers.put((index, rank, counted, loopback_bytes() - before))
    dist.destroy_process_group()


def measure(wanted: list[Case], parameters: int, transfer: str) -> list[dict[str, Any]]:
    """Run the sites of `wanted`, all with the same number of them; one line a case."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    count = wanted[0].sites
    with tempfile.TemporaryDirectory() as folder:
        arguments = (wanted, parameters, transfer, f"{folder}/store", answers)
        processes = [context.Process(target=site, args=(rank, *arguments), daemon=True) for rank in range(count)]
        for process in processes:
            process.start()
        found = [answers.get(timeout=600) for _ in range(count * len(wanted))]
        for process in processes:
            process.join()
    return [
        line(case, parameters, transfer, {rank: (counted, lo) for at, rank, counted, lo in found if at == index})
        for index, case in enumerate(wanted)
    ]


def line(case: Case, parameters: int, transfer: str, by_site: dict[int, tuple[dict[str, int], int]]) -> dict[str, Any]:
    """Counted bytes of the busiest site and step, the formula for the same site, and the interface over all sites."""
    from train.federation.planning import TRANSFER_BYTES

    sizes, busiest = case.sizes(parameters), max(by_site, key=lambda rank: by_site[rank][0]["sent"])
    counted = by_site[busiest][0]
    formula = {
        kind: comm_bytes(case.plan, sizes, case.every, kind, site=busiest, bytes_per_parameter=TRANSFER_BYTES[transfer])
        for kind in ("payload", "ring")
    }
    sent = sum(each["sent"] for each, _ in by_site.values())
    return {
        **asdict(case),
        "parameters": sizes.total(EXPERTS),
        "counted_payload": counted["payload"] / case.every,
        "counted_sent": counted["sent"] / case.every,
        "formula_payload": formula["payload"],
        "formula_ring": formula["ring"],
        "payload_ratio": counted["payload"] / case.every / formula["payload"],
        "ring_ratio": counted["sent"] / case.every / formula["ring"],
        "sent_by_all_sites": sent,
        "lo_over_sent": max(lo for _, lo in by_site.values()) / sent if sent >= ENOUGH else None,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table: MiB a site and step."""
    print("MiB a site and step")
    print(f"{'':4}{'':12}{'H':>4} {'payload':>11} {'formula':>9} {'ratio':>7} {'sent':>11} {'ring':>9} {'ratio':>7} {'lo/sent':>8}")
    for row in rows:
        figures = [row[key] / 2**20 for key in ("counted_payload", "formula_payload", "counted_sent", "formula_ring")]
        lo = f"{row['lo_over_sent']:8.3f}" if row["lo_over_sent"] else f"{'-':>8}"
        print(
            f"M={row['sites']} {row['name']:12}{row['every']:4d} {figures[0]:11.4f} {figures[1]:9.4f} {row['payload_ratio']:7.4f} "
            f"{figures[2]:11.4f} {figures[3]:9.4f} {row['ring_ratio']:7.4f} {lo}"
        )


def ratios(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """DDP over DiLoCo, DiLoCo over the partitioned run, DDP over it."""
    by_name = {row["name"]: row[key] for row in rows}
    ddp, diloco, partitioned = by_name["DDP"], by_name["DiLoCo"], by_name["FoMoE r=2"]
    return {"DDP/DiLoCo": ddp / diloco, "DiLoCo/FoMoE": diloco / partitioned, "DDP/FoMoE": ddp / partitioned}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Counted bytes as bars, the formula as a mark on each, on a logarithmic scale."""
    from train.report.style import BLACK, BLUE, ORANGE, figure, save, tidy

    labels = [f"M={row['sites']} {row['name']}" for row in rows]
    drawn = figure(8.0, 0.8 + 0.42 * len(rows))
    axes = drawn.add_subplot()
    for shift, colour, kind, counted, formula in (
        (-0.2, BLUE, "payload", "counted_payload", "formula_payload"),
        (0.2, ORANGE, "sent (ring)", "counted_sent", "formula_ring"),
    ):
        places = [index + shift for index in range(len(rows))]
        axes.barh(places, [row[counted] / 2**20 for row in rows], height=0.36, color=colour, label=f"{kind}, counted")
        axes.plot([row[formula] / 2**20 for row in rows], places, "|", color=BLACK, markersize=9, label=None if shift < 0 else "formula")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    tidy(axes, f"Bytes between sites, {rows[0]['parameters'] / 1e6:.1f} M parameters, H = {EVERY}", x="MiB a site and step")
    axes.legend(fontsize=8.5, frameon=False)
    save(drawn, path)


def main() -> None:
    """Measure and print; fails when a count is not the formula's or the interface disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--transfer", choices=("fp32", "bf16", "int8"), default="fp32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for count in arguments.sites:
        measured = measure(cases([count], 0.75) + cases([count], POINT), arguments.parameters, arguments.transfer)
        rows += [row for row in measured if row["share"] != POINT]
        points += [row for row in measured if row["share"] == POINT]
    show(rows)
    at_point = [row for row in points if row["sites"] == 4]
    if at_point:
        print(f"\nf = {POINT}, M = 4, r = 2, H = {EVERY}, f (1 - rho) = {POINT / 2}")
        show(at_point)
        for kind, key in (("payload", "counted_payload"), ("ring", "counted_sent")):
            print(f"by {kind:8}" + ", ".join(f"{name} {value:.2f}x" for name, value in ratios(at_point, key).items()))
    if arguments.figure is not None:
        draw(rows, arguments.figure)
    if arguments.out is not None:
        found = (
            {kind: ratios(at_point, key) for kind, key in (("payload", "counted_payload"), ("ring", "counted_sent"))} if at_point else None
        )
        result = {**provenance(), "transfer": arguments.transfer, "rows": rows, "point": at_point, "ratios_at_point": found}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for row in rows + points if abs(row["payload_ratio"] - 1) > 1e-3 or abs(row["ring_ratio"] - 1) > 1e-3]
    apart = [row for row in rows + points if row["lo_over_sent"] and abs(row["lo_over_sent"] - 1) > TOLERANCE]
    for row in wrong:
        print(f"M={row['sites']} {row['name']}: counted bytes are not the formula's")
    for row in apart:
        times = f"{row['lo_over_sent']:.2f} times what the sites sent"
        print(f"M={row['sites']} {row['name']}: the interface counted {times}; was it in other use?")
    if wrong or apart:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
