"""Two GPUs against one: every layout's figures beside one GPU's, a 1.3 B model's speed, checkpoints that move, offload, two sites.

    python -m benchmarks.layouts --budget 500 --out layouts.json --figure layouts.png      # a machine with two GPUs
    python -m benchmarks.layouts --device cpu --small --out layouts.json                   # gloo ranks and tiny models: does it run at all

Rows come in the order of their worth, each with a time limit, in processes that are replaced when one fails; JSON is written after every
row. `--only` takes groups of rows:

    layouts    TP 2, TP 2 + SP, PP 2 (1F1B, interleaved), DP 2 with the distributed optimiser, EP 2; fp32, bf16; from one seed checkpoint
    speed      1.3 B parameters at 4096 and 32768 tokens: tokens/s, weak scaling (as many tokens a GPU as on one), exposed communication
    sites      two sites of one GPU each with all and with half of the experts, H = 32: bytes counted, outer steps, tokens/s beside one site
    heads      S2 under TP 2 with heads of different stripes and with dense ones; on GPUs in the Triton kernels
    moves      saved in one layout, loaded in another: the whole state, bit for bit
    offload    optimiser states on the host at DP 2: equal to one GPU without, and what a step of the 1.3 B model waits for them

Exits with 1 when a row failed or something was not equal; rows that the budget did not reach are named and no failure. NVLink multicast
stays off (`NCCL_NVLS_ENABLE=0` and the like), also for NCCL's speed: figures are without it.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import layout_sites, layout_speed
from benchmarks.layout_cases import CASES, MOVES, Cases, RankError, RankPool, RankPools, countdown
from benchmarks.layout_figure import draw, show, summary
from benchmarks.record import provenance
from train.config.compose import write_atomic

GROUPS = ("layouts", "speed", "sites", "heads", "moves", "offload")
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron-core's advice for overlapping TP's collectives on GPUs before Blackwell; the launcher does not set it."""
TP = ("parallel.tp=2", "parallel.sp=true")


@dataclass(frozen=True)
class Speed:
    """A layout of the 1.3 B model: its experiment, ranks, rows of a micro-batch and of a step, and other overrides."""

    name: str
    experiment: str
    ranks: int
    rows: tuple[int, int]
    overrides: tuple[str, ...] = ()
    base: str | None = None
    """The row whose tokens/s a rank it is compared with."""
    environment: tuple[tuple[str, str], ...] = ()


SPEEDS = (
    Speed("one, 4096", "gpt_1b", 1, (4, 4)),
    Speed("DP 2, 4096", "gpt_1b", 2, (4, 8), base="one, 4096"),
    Speed("TP 2 + SP, 4096", "gpt_1b", 2, (8, 8), TP, "one, 4096"),
    Speed("one, 32768", "gpt_1b_s2_32k", 1, (1, 1)),
    Speed("DP 2, 32768", "gpt_1b_s2_32k", 2, (1, 2), base="one, 32768"),
    Speed("TP 2 + SP, 32768", "gpt_1b_s2_32k", 2, (2, 2), TP, "one, 32768"),
)
MORE_SPEEDS = (
    Speed("TP 2 + SP, 4096, one connection", "gpt_1b", 2, (8, 8), TP, "one, 4096", tuple(ONE_CONNECTION.items())),
    Speed("DP 2, 4096, 4 micro-batches", "gpt_1b", 2, (4, 32)),
    Speed("PP 2, 4096, 8 micro-batches", "gpt_1b", 2, (4, 32), ("parallel.pp=2",)),
)
OFFLOADED = (
    Speed("DP 2, 4096, offload stream", "gpt_1b", 2, (4, 8), ("offload=stream",), "one, 4096"),
    Speed("DP 2, 4096, offload cpu_step", "gpt_1b", 2, (4, 8), ("offload=cpu_step",), "one, 4096"),
)
SITES = (("one site", 1, 1), ("two sites, rho = 1", 2, 2), ("two sites, rho = 1/2", 2, 1))
"""Name, sites, sites that hold each expert."""


@dataclass(frozen=True)
class Row:
    """What is to be measured: `work(seconds)` returns the row's figures."""

    group: str
    name: str
    seconds: float
    """Its limit."""
    work: Callable[[float], dict[str, Any]]


class Bench:
    """The rows so far, the pools they run on, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace, device: str, folder: Path) -> None:
        self.arguments, self.device, self.folder = arguments, device, folder
        self.end = time.monotonic() + arguments.budget
        self.pools = RankPools(device)
        self.cases = Cases(self.pools, folder)
        small = {"small": arguments.small, "every": layout_sites.EVERY, "steps": arguments.steps}
        self.content: dict[str, Any] = {**provenance(), **machine(device), **small, "rows": []}

    def rows(self) -> list[Row]:
        """All rows, the most telling first."""

        def compared(group: str, precision: str) -> list[Row]:
            names = [name for name, case in CASES.items() if case.group == group]
            return [Row(group, f"{name}, {precision}", 120.0, partial(self.cases.compare, name, precision)) for name in names]

        def moved(precision: str) -> list[Row]:
            return [Row("moves", f"{name}, {precision}", 90.0, partial(self.cases.move, name, precision)) for name in MOVES]

        def timed(speeds: Sequence[Speed], group: str = "speed") -> list[Row]:
            return [Row(group, speed.name, 120.0, partial(self.speed, speed)) for speed in speeds]

        sites = [Row("sites", name, 120.0, partial(self.sites, count, held)) for name, count, held in SITES]
        first = [*compared("layouts", "fp32"), *timed(SPEEDS), *sites, *compared("layouts", "bf16"), *compared("heads", "fp32")]
        next_ones = [*moved("bf16"), *compared("offload", "fp32"), *timed(OFFLOADED, "offload")]
        return [*first, *next_ones, *compared("heads", "bf16"), *compared("offload", "bf16"), *moved("fp32"), *timed(MORE_SPEEDS)]

    def speed(self, speed: Speed, seconds: float) -> dict[str, Any]:
        """Figures of the slowest rank; what is profiled of all of them."""
        micro, rows = speed.rows
        overrides = [f"train.micro_batch={micro}", f"train.global_batch={rows}", *speed.overrides]
        given = (speed.experiment, self.arguments.small, overrides, self.arguments.steps)
        left = countdown(seconds)
        pool = RankPool(speed.ranks, self.device, dict(speed.environment)) if speed.environment else self.pools(speed.ranks)
        try:
            ranks = pool.run(layout_speed.measure, *given, timeout=left())
        finally:
            if speed.environment:
                pool.close()
        slowest = max(ranks, key=lambda rank: rank["ms"])
        parts = ("communication_ms", "exposed_ms", "computing_ms", "communication_by_kind_ms")
        return {**slowest, "overrides": overrides, "base": speed.base, "by_rank": [{part: rank[part] for part in parts} for rank in ranks]}

    def sites(self, count: int, held: int, seconds: float) -> dict[str, Any]:
        """A run of the launcher; what it wrote is removed once it is read."""
        size, rounds = ("small", 2) if self.arguments.small else ("full", 3)
        runs = self.folder / "runs"
        runs.mkdir(exist_ok=True)
        try:
            return layout_sites.run(self.device, size, count, held, runs, seconds, rounds)
        finally:
            shutil.rmtree(runs / layout_sites.place_name(count, held), ignore_errors=True)

    def measure(self, row: Row) -> dict[str, Any]:
        """The row with its figures, or with `error` when it failed, or `skipped` when there is no time for it."""
        left = self.end - time.monotonic()
        found: dict[str, Any] = {"group": row.group, "name": row.name}
        if left < 5:
            return {**found, "skipped": f"not begun: --budget {self.arguments.budget:.0f} is used up"}
        started = time.monotonic()
        try:
            found |= row.work(min(row.seconds, left))
        except RankError as error:
            words = str(error).strip().splitlines()
            found |= {"error": f"{words[0]}: {words[-1]}", "details": str(error)[-4000:]}
        except Exception as error:  # the others are to be measured all the same
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {**found, "seconds": time.monotonic() - started}

    def run(self) -> bool:
        """Measure, print and write row after row; whether all that was begun is well."""
        for row in self.rows():
            if row.group in self.arguments.only:
                self.content["rows"].append(self.measure(row))
                self.content["summary"] = summary(self.content["rows"])
                write_atomic(self.arguments.out, json.dumps(self.content, indent=1))
                show(self.content["rows"][-1])
        return not any("error" in row or row.get("holds") is False for row in self.content["rows"])


def machine(device: str) -> dict[str, Any]:
    """GPUs, NCCL and how the GPUs are linked, as far as they are used."""
    if device == "cpu":
        return {"device": "CPU, gloo"}
    try:
        links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        links = "unknown"
    return {"gpus": torch.cuda.device_count(), "nccl": ".".join(map(str, torch.cuda.nccl.version())), "links": links}


def chosen_device(wanted: str, small: bool) -> str:
    """`cuda` or `cpu`; ends the program with one line when it cannot be."""
    count = torch.cuda.device_count()
    device = wanted if wanted != "auto" else "cuda"
    if device == "cuda" and count < 2:
        raise SystemExit(f"--device {wanted}: needs two CUDA devices and finds {count}; use --device cpu --small to see whether it runs")
    if device == "cpu" and not small:
        raise SystemExit("--device cpu: 1.3 B parameters are not for a CPU; add --small")
    return device


def main() -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: two GPUs")
    parser.add_argument("--small", action="store_true", help="tiny models for speed and sites")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups of rows")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a speed row")
    parser.add_argument("--out", type=Path, default=Path("layouts.json"))
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    device = chosen_device(arguments.device, arguments.small)
    with tempfile.TemporaryDirectory(prefix="layouts-", ignore_cleanup_errors=True) as folder:
        bench = Bench(arguments, device, Path(folder))
        print(f"{bench.content['device']}, torch {bench.content['torch']}, commit {bench.content['commit']}", flush=True)
        try:
            well = bench.run()
        finally:
            bench.pools.close()
    for line in bench.content.get("summary", {}).get("lines", ()):
        print(line)
    if arguments.figure is not None and not draw(bench.content["rows"], bench.content["device"], arguments.figure):
        print(f"{arguments.figure}: not drawn, no row of speed or sites has figures")
    print(f"written: {arguments.out}")
    if not well:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
