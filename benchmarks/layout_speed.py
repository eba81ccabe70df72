"""What a training step of a layout takes, and how much of its communication nothing hides: runs on every rank of a pool.

The model is initialised on the device by size alone (the draw by parameter name takes minutes for 1.3 B), tokens are random, each row
is one document. `exposed` is read from a profile of one step, on each rank: the time in which a communication kernel runs and no other
kernel does, waiting for the other rank included. On a CPU, gloo's operations stand for the kernels and torch's operators for the rest.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.layout_cases import full_fp32
from train.config.compose import compose
from train.config.schema import Config
from train.engine.layout import ParallelLayout

SMALL = (
    "model.layers=4", "model.width=128", "model.heads=4", "model.kv_heads=4", "model.head_dim=32", "model.ffn_width=96",
    "model.vocab_size=128", "train.precision=fp32",
)  # fmt: skip
"""Sizes for a CPU, at 64 tokens."""
Span = tuple[float, float]


def configuration(experiment: str, small: bool, overrides: Sequence[str]) -> Config:
    """The experiment's configuration with its derived sizes; `small`: at SMALL sizes."""
    sizes = ["model.kv_heads=16", "model.head_dim=128"]
    if small:
        sparse = ["attention.block_size=16", "attention.local_blocks=1", "attention.stride=4"] if experiment.endswith("32k") else []
        sizes = [*SMALL, "train.seq_len=64", *sparse]
    return compose([f"experiment={experiment}", "data=demo", "tracking=none", "train.timeout=120", *sizes, *overrides])


def measure(experiment: str, small: bool, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Milliseconds of a step (median of `steps` after three), tokens a second of all ranks, and where a profiled step spends them."""
    from train.tracking.flops import train_flops_per_token

    full_fp32()
    config = configuration(experiment, small, overrides)
    step, waited, world, device = stepper(config)
    losses = [step() for _ in range(3)]
    waited()
    times = []
    for _ in range(steps):
        started = now(device)
        losses.append(step())
        times.append(now(device) - started)
    seconds, tokens = statistics.median(times), config.train.global_batch * config.train.seq_len
    flops = train_flops_per_token(config, config.train.seq_len, pattern_aware=True)
    row = {
        "ms": seconds * 1e3, "slowest_ms": max(times) * 1e3, "ranks": world, "seq_len": config.train.seq_len,
        "tokens": tokens, "tokens_per_second": tokens / seconds,
        "tflops_a_rank": flops * tokens / seconds / world / 1e12, "first_loss": losses[0], "last_loss": losses[-1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip
    for name, spent_waiting in waited().items():
        row[name.replace("_seconds", "_ms")] = spent_waiting * 1e3
    events, profiled_seconds = profiled(step, device)
    return {**row, "profiled_ms": profiled_seconds * 1e3, **spent(events)}


def now(device: torch.device) -> float:
    """The clock once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def stepper(config: Config) -> tuple[Callable[[], float], Callable[[], dict[str, float]], int, torch.device]:
    """A function that takes a step and returns its loss, one that tells what steps since its last call waited; ranks; device."""
    from benchmarks.offload_row import random_batches
    from train.engine import build, parallel
    from train.engine.offload import exposed_seconds
    from train.engine.step import train_step

    ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with patch.object(build, "initialize", draw_on_device):
        chunks = build.build_model(config, ranks)
    optimizer = build.build_optimizer(config, ranks, chunks)
    train, count = config.train, ParallelLayout.build(config, ranks.world).micro_batches(config)
    batches = random_batches(config, ranks.device, train.micro_batch, count)

    def step() -> float:
        result = train_step(
            chunks, optimizer, lambda: iter(batches), ranks, micro_batches=count, rows=train.micro_batch, seq_len=train.seq_len, lr=3e-4
        )
        return float(result.loss)

    return step, lambda: exposed_seconds(optimizer, wait=True), ranks.world, ranks.device


@torch.no_grad()
def draw_on_device(model: Any, config: Config, _groups: Any) -> None:
    """Normal weights from one seed on each rank: equal where ranks hold the same, and of no meaning."""
    generator: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        if parameter.dim() > 1:
            if parameter.device not in generator:
                generator[parameter.device] = torch.Generator(parameter.device).manual_seed(config.train.seed)
            parameter.normal_(0.0, 0.006, generator=generator[parameter.device])


def profiled(step: Callable[[], float], device: torch.device) -> tuple[list[dict[str, Any]], float]:
    """The events of one step, after one that warms the profiler up, in the form of Chrome's traces (times in us), and its seconds."""
    from torch.profiler import ProfilerActivity, profile, schedule

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if device.type == "cuda" else [ProfilerActivity.CPU]
    seconds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"

        def export(recorded: Any) -> None:
            recorded.export_chrome_trace(str(path))

        with profile(activities=kinds, schedule=schedule(wait=0, warmup=1, active=1), on_trace_ready=export) as recording:
            for _ in range(2):
                started = now(device)
                step()
                seconds = now(device) - started
                recording.step()
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events, seconds


def spent(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a trace: `communication`, `exposed` (of it, while nothing computed), `computing`, and communication by kind."""
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        talking = [event for event in kernels if "nccl" in event["name"].lower()]
        working = [event for event in kernels if "nccl" not in event["name"].lower()]
    else:
        talking = [event for event in events if event["name"].startswith("gloo:")]
        threads = {event["tid"] for event in talking}
        working = [event for event in events if event["name"].startswith("aten::") and event["tid"] not in threads]
    kinds: dict[str, float] = {}
    for event in talking:
        kind = event["name"].split("(")[0].removeprefix("ncclDevKernel_").removeprefix("gloo:")
        kinds[kind] = kinds.get(kind, 0.0) + event["dur"] / 1e3
    communication, computing = union(map(_span, talking)), union(map(_span, working))
    together = length(communication) + length(computing) - length(union([*communication, *computing]))
    return {
        "communication_ms": length(communication) / 1e3, "exposed_ms": (length(communication) - together) / 1e3,
        "computing_ms": length(computing) / 1e3, "communication_by_kind_ms": kinds,
    }  # fmt: skip


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(spans: Iterable[Span]) -> list[Span]:
    """The time covered by any of the spans, as spans apart from each other, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Sum of the lengths of spans that are apart."""
    return sum(end - start for start, end in spans)
