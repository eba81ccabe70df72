"""What it costs to keep the optimiser's states on the host: a training step with each mode, core's hybrid optimiser and torchao's.

    python -m benchmarks.offload --budget 540 --out offload.json        # 1.4 B parameters; 4096, 16384 and 65536 tokens a step
    python -m benchmarks.offload --largest none stream cpu_step --modes --budget 540 --out largest.json

Each mode trains the same model on the same random tokens, one process after another (`benchmarks/offload_row.py`). `over none` is what a
step takes more than with everything on the GPU, `waited` what the optimiser itself measured (`offload_exposed_seconds`); beside them
stands the bound of a transfer that nothing hides or of a host that only computes, at rates measured here first. `--largest` looks for
the most layers that train for three steps, from the plan's model on. JSON is written after every row: a time limit loses one row.
Without a GPU it runs at sizes given for it and shows that it works, no more.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.offload_row import GIB, HYBRID, MODEL, OURS, configuration
from benchmarks.record import provenance
from train.config.compose import write_atomic
from train.config.largest import largest_models
from train.engine.layout import ParallelLayout
from train.offload.machine import gpu_bytes, host_bytes

MODES = (*OURS, "hybrid", "torchao")
BUCKET = 16 * 2**20
ATTEMPTS = 3


class Bench:
    """The rows so far, and the time that is left for more."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.end = time.monotonic() + arguments.budget
        self.out: Path = arguments.out
        self.content: dict[str, Any] = {
            **provenance(),
            "model": self.model(),
            "hybrid_flags": HYBRID,
            "rates": {},
            "rows": [],
            "largest": [],
        }

    def model(self) -> dict[str, Any]:
        """What all requests share."""
        return {name: getattr(self.arguments, name) for name in MODEL}

    def write(self) -> None:
        """Everything so far."""
        write_atomic(self.out, json.dumps(self.content, indent=1))

    def ask(self, request: dict[str, Any], most: float = float("inf")) -> dict[str, Any]:
        """What a process for `request` says in `most` seconds or what the budget has left; with `error` when it did not end well."""
        seconds = min(most, self.end - time.monotonic())
        if seconds < 1:
            return {"error": f"not begun: --budget {self.arguments.budget:.0f} is used up"}
        path = self.out.with_name(f"{self.out.name}.row")
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.offload_row", json.dumps({**self.model(), **request}), str(path)]
        why = None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            if done.returncode:
                why = f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"
        except subprocess.TimeoutExpired:
            why = f"stopped after {seconds:.0f} s"
        said = json.loads(path.read_text()) if path.is_file() else {}
        path.unlink(missing_ok=True)
        assert isinstance(said, dict)
        return {**said, **({"error": said.get("error", why)} if why else {})}


def measure_modes(bench: Bench) -> None:
    """A row for each mode."""
    rates = bench.content["rates"]
    for mode in bench.arguments.modes:
        row = {"mode": mode, **bench.ask({"what": "mode", "mode": mode, "tokens": bench.arguments.tokens, "steps": bench.arguments.steps})}
        bench.content["rows"].append(row)
        add_bounds(bench.content["rows"], rates)
        bench.write()
        show_row(row)


def add_bounds(rows: list[dict[str, Any]], rates: dict[str, float]) -> None:
    """Add to each step what it takes over `none`, and the bound of its mode in ms."""
    base = {step["tokens"]: step["ms"] for row in rows if row["mode"] == "none" for step in row.get("steps", ())}
    for row in rows:
        bound = bound_seconds(row, rates)
        for step in row.get("steps", ()):
            step["over_none_ms"] = step["ms"] - base[step["tokens"]] if step["tokens"] in base else None
            step["bound_ms"] = None if bound is None else bound * 1e3


def bound_seconds(row: dict[str, Any], rates: dict[str, float]) -> float | None:
    """`stream`: 12 bytes a parameter each way while both are busy. `cpu_step`: the host's Adam, then the last bucket's way up."""
    count = row.get("parameters", 0)
    if row["mode"].startswith("stream") and "both_ways" in rates:
        return 12 * count / rates["both_ways"]
    adam = row.get("host_adam", rates.get("host_adam") if row["mode"] == "cpu_step" else None)
    if row["mode"].startswith("cpu_step") and adam is not None and "h2d" in rates:
        return count / adam + 4 * min(BUCKET, count) / rates["h2d"]
    return None


def show_row(row: dict[str, Any]) -> None:
    """Print a row as it is known when it is measured."""
    for step in row.get("steps", ()):
        figures = {"over none": step["over_none_ms"], "waited": step["waited_ms"], "bound": step["bound_ms"]}
        told = "".join(f", {name} {value:.1f} ms" for name, value in figures.items() if value is not None)
        peak = "" if step["peak_device_gib"] is None else f", peak {step['peak_device_gib']:.1f} GiB"
        speed = f"{step['ms']:9.1f} ms {step['tokens_per_second']:9,.0f} tokens/s"
        print(f"{row['mode']:18} {step['tokens']:6d} tokens {speed}{told}{peak}, host {step['host_rss_gib']:.1f} GiB", flush=True)
    if row.get("steps"):
        planned = row.get("planned_bytes")
        plan = "" if planned is None else f"; planned {planned['device'] / GIB:.2f} and {planned['host'] / GIB:.2f}"
        taken = f"{row['optimizer_device_bytes'] / GIB:.2f} GiB device, {row['optimizer_host_bytes'] / GIB:.2f} GiB host"
        print(f"{'':18} optimiser: {taken}{plan}; built in {row['build_seconds']:.1f} s", flush=True)
    if "error" in row:
        print(f"{row['mode']:18} failed: {row['error']}", flush=True)


def find_largest(bench: Bench) -> None:
    """For each mode, from the plan's model on: up while it runs, down while it does not, a few times."""
    device = gpu_bytes()
    if device is None:
        print("largest model: there is no GPU here whose memory would bound it", flush=True)
        return
    config = configuration({**bench.model(), "recompute": "full"})
    planned = {each.mode: each for each in largest_models(config, ParallelLayout.build(config, 1), device, host_bytes())}
    for mode in bench.arguments.largest:
        layers, tried = planned[mode].layers, dict[int, bool]()
        for _ in range(ATTEMPTS):
            if layers < 1 or layers in tried:
                break
            request = {"what": "size", "mode": mode, "layers": layers, "fraction": planned[mode].fraction, "recompute": "full"}
            said = {"mode": mode, "layers": layers, "planned_layers": planned[mode].layers, "runs": False, **bench.ask(request)}
            bench.content["largest"].append(said)
            bench.write()
            tried[layers] = bool(said["runs"])
            end = f"step {said['step_seconds'][-1]:.2f} s" if said["runs"] else said.get("reason", said.get("error"))
            size = f"{said.get('parameters', 0) / 1e9:.2f} G parameters"
            print(f"{mode:10} {layers} layers (plan {planned[mode].layers}), {size}: {'runs' if said['runs'] else 'no'}, {end}", flush=True)
            layers += max(1, layers // 16) * (1 if said["runs"] else -1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--largest", nargs="*", choices=("none", "stream", "cpu_step"), default=[], help="modes to find the largest model of"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens of a step")
    parser.add_argument("--steps", type=int, default=5)
    for name in ("seq", "layers", "width", "ffn_width", "heads", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=MODEL[name])
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=MODEL["precision"])
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default=MODEL["recompute"])
    parser.add_argument("--out", type=Path, default=Path("offload.json"))
    bench = Bench(parser.parse_args())
    bench.content["rates"] = rates = bench.ask({"what": "rates"}, 180.0)
    bench.write()
    link = [f"{name} {rates[name] / 1e9:.1f} GB/s" for name in ("h2d", "d2h", "both_ways") if name in rates]
    adam = f"host AdamW {rates['host_adam'] / 1e9:.2f} G parameters/s, {rates['threads']} threads" if "host_adam" in rates else rates
    print(f"{bench.content['device']}, torch {bench.content['torch']}; {', '.join([*link, str(adam)])}", flush=True)
    print(f"core's hybrid optimiser: {HYBRID}", flush=True)
    measure_modes(bench)
    if bench.arguments.largest:
        find_largest(bench)
    print(f"written: {bench.out}", flush=True)


if __name__ == "__main__":
    main()
