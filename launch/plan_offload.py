"""Show where the optimiser's states could lie and what would then fit: the offload part of `leantron plan`."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.plan import mib
from train.config.errors import ConfigError
from train.config.largest import Largest, largest_models
from train.config.schema import Config
from train.engine.layout import ParallelLayout, processes_of_host
from train.offload.machine import gpu_bytes, host_bytes


def show_offload(config: Config, plan: dict[str, Any], world: int, console: Console | None = None) -> None:
    """Print every mode beside the others and, on a machine with a GPU, the largest model of each, for a plan of `make_plan`."""
    console = console or Console(highlight=False)
    offload = plan["offload"]
    assumed = offload["assumptions"]
    link, adam = assumed["host_link_both_ways_gb_s"], assumed["host_adam_gparams_s_per_core"]
    rates = f"{link:.1f} GB/s each way, {adam:.2f} G parameters/s for each of {assumed['threads']} cores, of {assumed['measured_on']}"
    console.print("\noptimiser states of a process (model)", soft_wrap=True)
    console.print(_modes(offload))
    console.print(f"seconds at {rates}; overlap: {assumed['overlap']}", soft_wrap=True)
    try:
        device = gpu_bytes()
    except OSError as error:
        raise ConfigError(
            "offload", "plan", str(error), "run it where nvidia-smi works, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        ) from error
    if device is None:
        console.print("largest model: not shown, there is no GPU here whose memory would bound it", soft_wrap=True)
        return
    host = host_bytes() / processes_of_host(config)
    found = largest_models(config, ParallelLayout.build(config, world), device, host)
    sizes = f"a GPU of {device / 2**30:.0f} GiB and {host / 2**30:.0f} GiB of the host a process"
    console.print(f"\nlargest model (model): layers of this width on {sizes}", soft_wrap=True)
    console.print(_largest(found))


def _modes(offload: dict[str, Any]) -> Table:
    table = _table("", "mode", "on the host", "device", "host", "seconds a step, at most")
    for each in offload["modes"]:
        mark = ">" if each["mode"] == offload["mode"] else ""
        share = f"{each['fraction']:.0%}"
        table.add_row(mark, each["mode"], share, mib(each["device_bytes"]), mib(each["host_bytes"]), f"{each['seconds']:.3f}")
    return table


def _largest(found: list[Largest]) -> Table:
    table = _table("", "mode", "on the host", "device", "host", "layers", "parameters")
    for each in found:
        values = asdict(each)
        if not each.layers:
            table.add_row("", each.mode, "", "", "", "0", "not even the embedding and a layer fit")
            continue
        sizes = (f"{values[name]:.1f} GiB" for name in ("device_gib", "host_gib"))
        table.add_row("", each.mode, f"{each.fraction:.0%}", *sizes, f"{each.layers:,}", f"{each.parameters / 1e9:,.2f} G")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left")
    return table
