"""What partitioned experts cost in loss, at equal tokens: DDP, DiLoCo, and sites that hold 1, 2 or all 4 of every 4 experts' copies.

    python -m benchmarks.quality --results quality.json --figure quality.png     # 20 M parameters, 20 M tokens an arm, one GPU
    python -m benchmarks.quality --jobs 10 --results quality.json                # all arms at once: none of them fills a GPU
    python -m benchmarks.quality --toy --arms ddp r2                             # minutes on a CPU: does it run at all

M = 4 sites, H = 32 local steps, E = 8 experts, top-2, on the Python standard library's bytes. One process an arm: in each round the sites
train one after the other and then meet as threads, so that there is nothing to launch and nothing but the algorithm differs between
arms. Every arm has the same initial weights, the same rows in every step (each site its share of them), the same learning rates and
as many tokens.

| arm | what |
|---|---|
| ddp | one model, gradients over all rows in every step |
| diloco | every site has all experts; outer step every H steps |
| r1, r2, r4 | each expert at 1, 2, 4 sites; assignments to absent ones skipped, gate full. r4 has nothing to skip: it must equal diloco |
| r1_rows, r2_rows | r1, r2 with the routers' rows averaged over all sites instead of the holders of their expert |
| kept | r2, gates renormalised over the experts that are there |
| mask | r2, absent experts cannot be chosen |
| frozen | r2, all experts at every site, foreign ones not trained there |

`merged` is the validation loss of the model with every expert, `sliced` the mean over the sites of each one's own, in its mode: their
difference is what skipping costs at use; during the run over a quarter of the validation rows, at its end over all of them. Results
append to a JSON file with commit, seed and settings; the table names arms that a setting lacks. Beside the losses: entropy of the load,
skip rate, agreement of the routers before and after each outer step, drift.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.quality_model import Counts, Site, Size, mean_loss, merge, whole_model
from benchmarks.record import provenance
from moe.exchange import Hub
from moe.monitor import compare, load_entropy
from moe.residency import ResidencyPlan
from moe.skip import Gate, Mode
from train.data.config import DataConfig
from train.data.dataset import BatchSource
from train.data.tokenizer import load_tokenizer

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    sites: int
    replication: int
    mode: Mode
    gate: Gate = "full"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    aux: float = 0.01
    router_rows: Literal["holders", "all"] = "holders"


ARMS = {
    "ddp": Arm(1, 1, "full"),
    "diloco": Arm(4, 4, "full"),
    "r1": Arm(4, 1, "skip"),
    "r2": Arm(4, 2, "skip"),
    "r4": Arm(4, 4, "skip"),
    "r1_rows": Arm(4, 1, "skip", router_rows="all"),
    "r2_rows": Arm(4, 2, "skip", router_rows="all"),
    "kept": Arm(4, 2, "skip", "kept"),
    "mask": Arm(4, 2, "mask"),
    "frozen": Arm(4, 2, "frozen"),
}
SHARED = ("tokens", "rows", "lr", "outer_lr", "outer_momentum", "sync_every", "seed")
"""Options that all arms take over."""
FULL = Size(layers=6, width=256, heads=8, inner=512)
TOY = Size(layers=2, width=32, heads=2, inner=32, seq_len=64)


class Data:
    """Rows of the run: those of a step, of the validation and of the probe."""

    def __init__(self, size: Size, rows: int, seed: int, device: torch.device, validation: int) -> None:
        config = DataConfig(demo=True)
        tokenizer = load_tokenizer("byte")
        self._source = BatchSource(config, tokenizer, size.seq_len, seed, "train")
        held_out = BatchSource(config, tokenizer, size.seq_len, seed, "validation")
        self._rows, self._device = rows, device
        self.validation = [self._take(held_out, step) for step in range(validation)]
        self.probe = self.validation[0][0][:4]

    def _take(self, source: BatchSource, step: int) -> Rows:
        batch = source.rows(source.sample_ids(step, self._rows))
        return batch.tokens.to(self._device), batch.targets.to(self._device), batch.loss_mask.to(self._device)

    def step(self, number: int) -> Rows:
        """All sites' rows of step `number`."""
        return self._take(self._source, number)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a twentieth, then a cosine down to a tenth; `step` from 0."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def run_arm(arm: Arm, size: Size, settings: dict[str, Any], data: Data, device: torch.device) -> dict[str, Any]:
    """Train one arm; its last losses and a line for each round."""
    plan = ResidencyPlan.build(size.experts, arm.sites, arm.replication, "contiguous", 0, size.layers)
    whole, hub = whole_model(size, settings["seed"]), Hub(arm.sites, timeout=600.0)
    sites = [Site(whole, size, plan, hub.exchange(number), arm, device) for number in range(arm.sites)]
    share, steps, every = settings["rows"] // arm.sites, settings["steps"], settings["sync_every"]
    history, started = [], time.perf_counter()
    with ThreadPoolExecutor(arm.sites) as pool:
        for first in range(0, steps, every):
            batches = [data.step(number) for number in range(first, min(first + every, steps))]
            for site in sites:
                rows = slice(site.number * share, (site.number + 1) * share)
                for index, (tokens, targets, mask) in enumerate(batches):
                    site.train(tokens[rows], targets[rows], mask[rows], learning_rate(first + index, steps, settings["lr"]))
            line = {"step": first + len(batches), **counted(sites), **(outer(sites, hub, data.probe, pool) if arm.sites > 1 else {})}
            merged = merge(whole, sites, plan, size, device)
            everything = [range(size.experts)] * size.layers
            shown = data.validation if line["step"] == steps else data.validation[: max(1, len(data.validation) // 4)]
            with torch.no_grad():
                line["merged"] = mean_loss(merged, shown, everything, "full", "full")
            line["sliced"] = sum(site.loss(shown) for site in sites) / len(sites)
            history.append(line)
            print(
                f"    step {line['step']:5d} train {line['train']:.4f} merged {line['merged']:.4f} sliced {line['sliced']:.4f}", flush=True
            )
    return {**{key: history[-1][key] for key in ("merged", "sliced")}, "seconds": time.perf_counter() - started, "history": history}


def counted(sites: Sequence[Site]) -> dict[str, float]:
    """What the routers of all sites did in the round, and the mean training loss."""
    counts = [site.counts for site in sites]
    loads = [torch.stack(of_layer).sum(0) for of_layer in zip(*(each.load for each in counts), strict=True)]
    entropies = [load_entropy(load) for load in loads]
    losses = [loss for each in counts for loss in each.losses]
    found = {
        "train": sum(losses) / len(losses),
        "entropy": sum(entropies) / len(entropies),
        "skip_rate": sum(each.skipped for each in counts) / sum(each.assignments for each in counts),
    }
    for site in sites:
        site.counts = Counts()
    return found


def outer(sites: Sequence[Site], hub: Hub, probe: Tensor, pool: ThreadPoolExecutor) -> dict[str, float]:
    """The outer step, and how alike the routers were before and after it: means over the layers."""
    before = [site.snapshot(probe) for site in sites]
    list(pool.map(lambda site: site.meet(), sites))
    after = [site.snapshot(probe) for site in sites]
    group = range(len(sites))
    found, *_ = pool.map(lambda number: compare(hub.exchange(number), group, before[number], after[number]), group)
    parts = {"agreement_before": found.agreement_before, "agreement_after": found.agreement_after, "drift": found.drift}
    return {name: sum(values.values()) / len(values) for name, values in parts.items()}


def table(records: Sequence[dict[str, Any]]) -> str:
    """The last record of each arm and seed, by settings, and the arms that are missing there."""
    lines = []
    for settings in dict.fromkeys(json.dumps(record["settings"], sort_keys=True) for record in records):
        here = {record["arm"]: record for record in records if json.dumps(record["settings"], sort_keys=True) == settings}
        shown = next(iter(here.values()))["settings"]
        lines.append(
            f"{shown['tokens'] / 1e6:.2f} M tokens, {shown['parameters'] / 1e6:.2f} M parameters, seed {shown['seed']}, {shown['device']}"
        )
        lines.append(
            f"  {'arm':8}{'merged':>9}{'sliced':>9}{'gap':>9}{'to ddp':>9}{'skipped':>9}{'agree':>8}{'after':>8}{'drift':>8}  commit"
        )
        base = here["ddp"]["merged"] if "ddp" in here else math.nan
        for name in ARMS:
            if name in here:
                lines.append(_row(name, here[name], base))
        missing = [name for name in ARMS if name not in here]
        if missing:
            lines.append(f"  missing: {', '.join(missing)}")
    return "\n".join(lines)


def _row(name: str, record: dict[str, Any], base: float) -> str:
    last = record["history"][-1]
    routers = "".join(f"{last.get(key, math.nan):8.3f}" for key in ("agreement_before", "agreement_after", "drift"))
    gap = record["sliced"] - record["merged"]
    return (
        f"  {name:8}{record['merged']:9.4f}{record['sliced']:9.4f}{gap:+9.4f}{record['merged'] - base:+9.4f}{last['skip_rate']:9.1%}"
        f"{routers}  {record['commit']}"
    )


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Merged (full) and sliced (dotted) losses, and the routers' figures, over the steps, for the settings recorded last."""
    from train.report.style import BLACK, BLUE, GREY, ORANGE, PURPLE, VERMILLION, figure, save, tidy

    last = json.dumps(records[-1]["settings"], sort_keys=True)
    here = {record["arm"]: record for record in records if json.dumps(record["settings"], sort_keys=True) == last}
    colours = dict(zip(ARMS, (BLACK, BLUE, VERMILLION, ORANGE, GREY, PURPLE, "#009E73", "#56B4E9", "#8C564B", "#E5C100"), strict=True))
    drawn = figure(12.0, 7.0)
    panels = drawn.subplots(2, 2)
    before_after = (("agreement_before", "-"), ("agreement_after", ":"))
    for axes, title, unit, keys in (
        (panels[0, 0], "Validation loss: merged, sliced (dotted)", "nats per token", (("merged", "-"), ("sliced", ":"))),
        (panels[0, 1], "Agreement of the routers before an outer step, after (dotted)", "share", before_after),
        (panels[1, 0], "Entropy of the experts' load, assignments skipped (dotted)", "share", (("entropy", "-"), ("skip_rate", ":"))),
        (panels[1, 1], "Drift of the routers before an outer step", "distance over norm", (("drift", "-"),)),
    ):
        for name, record in here.items():
            for key, style in keys:
                points = [(line["step"], line[key]) for line in record["history"] if key in line]
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=colours[name], linewidth=1.4, label=name if style == "-" else None)
        tidy(axes, title, y=unit)
    panels[0, 0].legend(fontsize=8.5, frameon=False)
    save(drawn, path)


def side_by_side(arms: Sequence[str], jobs: int, given: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train each arm in a process of its own, `jobs` at a time, with the same command line; records as they come."""
    with tempfile.TemporaryDirectory() as folder:

        def one(name: str) -> list[dict[str, Any]]:
            path = Path(folder, f"{name}.json")
            command = [sys.executable, "-m", "benchmarks.quality", *given, "--arms", name, "--jobs", "1", "--results", str(path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
                assert child.stdout is not None
                line = ""
                for line in child.stdout:
                    if line.startswith("    step"):
                        print(f"{name:8}{line.rstrip()}", flush=True)
            if child.returncode:
                print(f"{name:8} failed with exit code {child.returncode}: {line.rstrip()}", flush=True)
            return json.loads(path.read_text()) if path.is_file() else []

        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(one, name) for name in arms]):
                yield from done.result()


def append(path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Add one record to the list in `path`; returns all."""
    records = json.loads(path.read_text()) if path.is_file() else []
    records.append(record)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(records, indent=1) + "\n")
    part.replace(path)
    return records


def main() -> None:
    """Train the arms that are asked for, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--toy", action="store_true", help="a model of 50 thousand parameters and 0.1 M tokens, to see that it runs")
    parser.add_argument("--tokens", type=float, help="tokens an arm; 20e6, of a toy 131072")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step over all sites")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--sync-every", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--jobs", type=int, default=1, help="arms that train at the same time, each in a process of its own")
    parser.add_argument("--results", type=Path, help="JSON file that the results are appended to")
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    if arguments.jobs > 1:
        given = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in SHARED if getattr(arguments, name) is not None]
        for record in side_by_side(arguments.arms, arguments.jobs, [*given, *(["--toy"] if arguments.toy else [])]):
            records = append(arguments.results, record) if arguments.results is not None else [*records, record]
        finish(records, arguments.figure)
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, rows = (TOY, min(arguments.rows, 16)) if arguments.toy else (FULL, arguments.rows)
    if rows % 4:
        raise SystemExit(f"--rows={rows}: four sites share them; use a multiple of 4")
    steps = round((arguments.tokens or (131072 if arguments.toy else 20e6)) / (rows * size.seq_len))
    origin = provenance()
    settings = {
        **asdict(size), "rows": rows, "steps": steps, "tokens": steps * rows * size.seq_len, "lr": arguments.lr, "seed": arguments.seed,
        "sync_every": arguments.sync_every, "outer_lr": arguments.outer_lr, "outer_momentum": arguments.outer_momentum,
        "parameters": sum(p.numel() for p in whole_model(size, 0).parameters()), "device": origin["device"], "torch": origin["torch"],
    }  # fmt: skip
    data = Data(size, rows, arguments.seed, device, validation=4 if arguments.toy else 8)
    for name in arguments.arms:
        print(f"{name}: {steps} steps of {rows} rows", flush=True)
        arm = replace(ARMS[name], outer_lr=arguments.outer_lr, outer_momentum=arguments.outer_momentum)
        record = {"arm": name, "commit": origin["commit"], "settings": settings, **run_arm(arm, size, settings, data, device)}
        records = append(arguments.results, record) if arguments.results is not None else [*records, record]
    finish(records, arguments.figure)


def finish(records: Sequence[dict[str, Any]], figure: Path | None) -> None:
    """Print the table, and draw the figure where it is asked for."""
    print(table(records))
    if figure is not None and records:
        draw(records, figure)


if __name__ == "__main__":
    main()
