"""Show what a run over several sites holds and moves, and what other arrangements would: the second half of `leantron plan`."""

from typing import Any

from rich.console import Console
from rich.table import Table

from launch.plan import mib


def show_sites(federation: dict[str, Any], console: Console | None = None) -> None:
    """Print the `federation` part of a plan (`train.federation.planning.federation_plan`)."""
    console = console or Console(highlight=False)
    sizes = federation["sizes"]
    counts = f"{sizes['dense']:,} dense, {sizes['experts']:,} in experts, {sizes['router_rows']:,} in router rows"
    console.print(f"\nparameters, from {sizes['source']}: {counts}", soft_wrap=True)
    for title, table in (_sites(federation), _traffic(federation), _trade_offs(federation), _projection(federation["projection_model"])):
        console.print(f"\n{title}", soft_wrap=True)
        console.print(table)
    if federation["moved_per_rotation"]:
        moved = mib(federation["moved_per_rotation"])
        console.print(f"\nbesides, {moved} of experts change hands at the first rotation, all sites together", soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _sites(federation: dict[str, Any]) -> tuple[str, Table]:
    title = (
        "each site, all its processes together: parameters it holds, their state (model: 18 bytes a parameter on the device, 8 on the "
        "host), and the bytes it moves"
    )
    table = _table("site", "parameters", "device", "host", "payload a step", "ring a step")
    moved = federation["bytes_per_step"][0]
    for site, (count, memory) in enumerate(zip(federation["site_parameters"], federation["site_memory_model"], strict=True)):
        bytes_moved = [mib(moved[kind][site]) for kind in ("payload", "ring")]
        table.add_row(str(site), f"{count:,}", mib(memory["device"]), mib(memory["host"]), *bytes_moved)
    return title, table


def _traffic(federation: dict[str, Any]) -> tuple[str, Table]:
    title = "bytes that the busiest site moves a step: payload is what it hands over and gets back, ring what a bandwidth-optimal sum sends"
    table = _table("run", "steps a round", "bytes an element", "payload", "ring", "payload / this run", "ring / this run")
    mine = federation["bytes_per_step"][0]
    for line in federation["bytes_per_step"]:
        ratios = [f"{max(line[kind]) / max(mine[kind]):.2f}x" if max(mine[kind]) else "" for kind in ("payload", "ring")]
        figures = [mib(max(line[kind])) for kind in ("payload", "ring")]
        table.add_row(line["name"], str(line["sync_every"]), f"{line['bytes_per_element']:g}", *figures, *ratios)
    return title, table


def _trade_offs(federation: dict[str, Any]) -> tuple[str, Table]:
    """One line for each number of sites and holders, a column for each number of local steps."""
    rows = federation["trade_offs"]
    every = sorted({row["sync_every"] for row in rows})
    title = "other arrangements (model): sites M, holders r, local steps H; bytes a step by payload / ring"
    table = _table("M", "r", "parameters a site", "device", "host", *(f"H = {steps}" for steps in every))
    by_key = {(row["sites"], row["replication"], row["sync_every"]): row for row in rows}
    for sites, holders in dict.fromkeys((row["sites"], row["replication"]) for row in rows):
        cells = [by_key[sites, holders, steps] for steps in every]
        here = (sites, holders) == (federation["sites"], federation["replication"])
        moved = [f"{mib(cell['payload'])} / {mib(cell['ring'])}" for cell in cells]
        memory = cells[0]["memory"]
        first = f"> {sites}" if here else f"  {sites}"
        table.add_row(first, str(holders), f"{cells[0]['parameters']:,}", mib(memory["device"]), mib(memory["host"]), *moved)
    return title, table


def _projection(projected: dict[str, Any]) -> tuple[str, Table]:
    title = (
        f"a model of {projected['parameters'] / 1e9:,.0f} B parameters, projected, not measured: what a site holds at a resident fraction"
    )
    table = _table("share in experts", *(f"{fraction:g}" for fraction in projected["fractions"]))
    for line in projected["by_expert_share"]:
        cells = [
            f"{count / 1e9:.1f} B, {memory['device'] / 1e12:.2f} TB + {memory['host'] / 1e12:.2f} TB host"
            for count, memory in zip(line["site_parameters"], line["site_memory"], strict=True)
        ]
        table.add_row(f"{line['share']:.3f} ({line['which']})", *cells)
    return title, table
