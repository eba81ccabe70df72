"""Show a run's plan before it starts: layout, parameters, tokens, attention and MLP of the layers, a model of the memory.

`leantron plan` shows more for a run over several sites (`launch/plan_sites.py`), and everything as JSON.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from train.config.errors import ConfigError
from train.config.schema import Config

USAGE = """\
usage: leantron plan [--json] [<group>=<option> ...] [<key>=<value> ...]

Check a run and show its plan; nothing is written. Over what `leantron pretrain --dry-run` shows: every place of the optimiser's states
beside the others, and the largest model that fits with each on this machine's GPU; for several sites the bytes of an outer step, the
memory of each site, and what other numbers of sites, holders and local steps would cost. With resume=<run>, the parameters come from
the index of the run's newest checkpoint.

  --json      the whole plan as JSON, the content of <run>/plan.json
  -h, --help  this text
"""


def plan_command(argv: Sequence[str]) -> int:
    """`leantron plan <overrides>`; returns the exit code. Raises ConfigError for a run that cannot be."""
    from launch.plan_offload import show_offload
    from launch.plan_sites import show_sites
    from train.config.plan import make_plan
    from train.config.publish import prepare
    from train.config.resume import compose_run
    from train.engine.layout import processes_of_host, processes_of_site

    if "-h" in argv or "--help" in argv:
        print(USAGE, end="")
        return 0
    for option in argv:
        if option.startswith("-") and option != "--json":
            raise ConfigError(option, "", "there is no such option", "`leantron plan --help` lists them")
    overrides = [text for text in argv if not text.startswith("-")]
    composed = compose_run(overrides)
    hosts, world = composed.parallel.hosts, processes_of_site(composed) * composed.parallel.hosts
    config = prepare(overrides, world, processes_of_host(composed), hosts)
    plan = make_plan(config, world)
    if config.resume is not None:
        _use_index(config, plan, Path(config.resume))
    if "--json" in argv:
        print(json.dumps(plan, indent=2))
        return 0
    show_plan(config, plan)
    show_offload(config, plan, world)
    if plan["federation"] is not None:
        show_sites(plan["federation"])
    return 0


def _use_index(config: Config, plan: dict[str, Any], run_dir: Path) -> None:
    """Put what the newest checkpoint's index says of the parameters in place of the closed forms; nothing where there is none."""
    from train.federation.accounting import sizes_from_run
    from train.federation.planning import federation_plan

    found = sizes_from_run(run_dir)
    if found is not None:
        sizes, path = found
        plan["federation"] = federation_plan(config, sizes, f"the index of {path}")


def show_plan(config: Config, plan: dict[str, Any], console: Console | None = None) -> None:
    """Print the plan that `train.config.plan.make_plan` made."""
    console = console or Console(highlight=False)
    layout, parameters, memory = plan["layout"], plan["parameters"], plan["memory_model"]
    total, active, per_step = parameters["total"], parameters["active"], plan["tokens_per_step"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("run", str(config.resume or config.run.dir))
    processes = f"{layout['processes']}: {layout['description']}, {layout['micro_batches']} micro-batches a step"
    sites = plan["federation"]
    table.add_row("processes", processes if sites is None else f"{sites['sites']} sites x {processes}")
    table.add_row("parameters", f"{total:,}" + (f", {active:,} active for a token" if active != total else ""))
    table.add_row("tokens", f"{per_step:,} a step x {config.train.steps:,} steps = {plan['tokens']:,}")
    for index, line in enumerate(layer_lines(plan["layers"])):
        table.add_row("" if index else "layers", line)
    parts = ", ".join(f"{name} {_size(value)}" for name, value in memory.items() if name != "total")
    table.add_row("memory (model)", f"{_size(memory['total'])} for the fullest process: {parts}")
    for index, line in enumerate(offload_lines(plan["offload"])):
        table.add_row("" if index else "states (model)", line)
    if sites is not None:
        for index, line in enumerate(site_lines(sites)):
            table.add_row("" if index else "sites", line)
    console.print(table)


def site_lines(federation: dict[str, Any]) -> list[str]:
    """Return who holds what, what the fullest site holds, and what the sites move in a step, one line each."""
    lines = list(federation["residents"]) or ["every site holds the whole model"]
    held, total = max(federation["site_parameters"]), federation["sizes"]["total"]
    lines.append(f"a site holds {held:,} of {total:,} parameters and takes an outer step every {federation['sync_every']} steps")
    this, diloco, ddp = federation["bytes_per_step"]
    for kind in ("payload", "ring"):
        here, every, data = (max(line[kind]) for line in (this, diloco, ddp))
        lines.append(f"a site moves {mib(here)} a step by {kind}; DiLoCo {mib(every)}, DDP {mib(data)}")
    return lines


def mib(count: float) -> str:
    """Bytes in MiB, or in GiB from one on."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.3g} MiB"


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
