"""Show a run's plan before it starts: layout, parameters, tokens, attention and MLP of the layers, a model of the memory."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.config.schema import Config


def show_plan(config: Config, plan: dict[str, Any], console: Console | None = None) -> None:
    """Print the plan that `train.config.plan.make_plan` made."""
    console = console or Console(highlight=False)
    layout, parameters, memory = plan["layout"], plan["parameters"], plan["memory_model"]
    total, active, per_step = parameters["total"], parameters["active"], plan["tokens_per_step"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("run", str(config.resume or config.run.dir))
    table.add_row("processes", f"{layout['processes']}: {layout['description']}, {layout['micro_batches']} micro-batches a step")
    table.add_row("parameters", f"{total:,}" + (f", {active:,} active for a token" if active != total else ""))
    table.add_row("tokens", f"{per_step:,} a step x {config.train.steps:,} steps = {plan['tokens']:,}")
    for index, line in enumerate(layer_lines(plan["layers"])):
        table.add_row("" if index else "layers", line)
    parts = ", ".join(f"{name} {_size(value)}" for name, value in memory.items() if name != "total")
    table.add_row("memory (model)", f"{_size(memory['total'])} for the fullest process: {parts}")
    for index, line in enumerate(offload_lines(plan["offload"])):
        table.add_row("" if index else "states (model)", line)
    console.print(table)


def offload_lines(offload: dict[str, Any]) -> list[str]:
    """Return what each place of the optimiser's states takes and costs, one line each, the chosen one marked; [] when none is offloaded."""
    if offload["mode"] == "none":
        return []
    lines = []
    for each in offload["modes"]:
        mark = ">" if each["mode"] == offload["mode"] else " "
        share = f" {each['fraction']:.0%}" if each["mode"] != "none" else ""
        device, host = _size(each["device_bytes"] / 2**30), _size(each["host_bytes"] / 2**30)
        lines.append(f"{mark} {each['mode']}{share}: {device} on the device, {host} on the host, up to {each['seconds']:.2f} s a step")
    assumed = offload["assumptions"]
    lines.append(
        f"at {assumed['host_link_both_ways_gb_s']:.1f} GB/s each way and {assumed['host_adam_gparams_s_per_core']:.2f} G parameters/s "
        f"for each of {assumed['threads']} cores, rates of {assumed['measured_on']}"
    )
    return lines


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def layer_lines(layers: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each stretch of equal layers: `1 to 2: s2 attention, 40.6 % of the causal pairs; dense MLP`."""
    lines: list[str] = []
    start = 0
    for index in range(1, len(layers) + 1):
        if index < len(layers) and _kind(layers[index]) == _kind(layers[start]):
            continue
        numbers = f"{start}" if index - 1 == start else f"{start} to {index - 1}"
        lines.append(f"{numbers}: {_kind(layers[start])}")
        start = index
    return lines


def _kind(layer: dict[str, Any]) -> str:
    share = "" if layer["attention"] == "dense" else f", {layer['density']:.1%} of the causal pairs"
    return f"{layer['attention']} attention{share}; {'Mixture of Experts' if layer['mlp'] == 'moe' else 'dense MLP'}"
