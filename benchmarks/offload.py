"""What it costs to keep the optimiser's states on the host: a training step with each mode, and with core's own hybrid optimiser.

    python -m benchmarks.offload --out offload.json              # 0.8 B parameters, 16384 tokens a step
    python -m benchmarks.offload --layers 24 --tokens 4096 16384 65536

One model, one process, one mode after another on the same random tokens. `exposed` is what a step takes more than with everything on
the GPU; beside it stand the bound of a transfer that nothing hides and of a host that only computes, both from rates measured here
first. Device and host bytes of the optimiser are compared with its plan. Prints a table and writes JSON to --out.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from train.config.compose import compose
from train.config.schema import Config

MODES = ("none", "stream", "cpu_step", "hybrid")
HYBRID = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "use_precision_aware_optimizer": True,
}
"""Core's flags: everything on the host, its overlap and its pinning on."""
ROWS = 4


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `work`, device work included, after one call that does not count."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def link_rate(both: bool, elements: int = 64 * 2**20) -> float:
    """Bytes a second from host to device, pinned; with `both`, in each direction while the other is busy too."""
    host = [torch.empty(elements, pin_memory=True) for _ in range(2)]
    device = [torch.empty(elements, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            device[0].copy_(host[0], non_blocking=True)
        if both:
            with torch.cuda.stream(streams[1]):
                host[1].copy_(device[1], non_blocking=True)

    return 4 * elements / median_seconds(copy, 5)


def host_adam_rate(threads: int, elements: int = 64 * 2**20) -> float:
    """Parameters a second of torch's fused AdamW on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    weight = torch.nn.Parameter(torch.zeros(elements))
    weight.grad = torch.zeros(elements)
    adam = torch.optim.AdamW([weight], fused=True)
    seconds = median_seconds(adam.step, 3)
    torch.set_num_threads(before)
    return elements / seconds


def build_optimizer(config: Config, mode: str, ranks: Any, chunks: list[Any]) -> Any:
    """The engine's optimiser of a mode, or core's hybrid one."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from train.engine import build

    if mode != "hybrid":
        return build.build_optimizer(config, ranks, chunks)
    optim = config.optim
    settings = OptimizerConfig(
        optimizer="adam", lr=optim.lr, min_lr=optim.min_lr, weight_decay=optim.weight_decay, adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1], adam_eps=optim.eps, clip_grad=optim.clip, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True, **HYBRID,
    )  # fmt: skip
    return get_megatron_optimizer(settings, chunks, use_gloo_process_groups=ranks.device.type == "cuda")


def stepper(config: Config, optimizer: Any, ranks: Any, chunks: list[Any], tokens: int) -> Callable[[], float]:
    """A function that trains on one step of `tokens` random tokens and returns the loss."""
    from train.data.dataset import Batch
    from train.engine.step import train_step

    seq = config.train.seq_len
    rows = min(ROWS, tokens // seq)
    micro_batches = tokens // (rows * seq)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(micro_batches):
        row = torch.randint(config.model.vocab_size or 0, (rows, seq + 1), generator=generator).to(ranks.device)
        positions, mask = torch.arange(seq).expand(rows, seq).to(ranks.device), torch.ones(rows, seq, device=ranks.device)
        batches.append(Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), mask, positions, None, [], 1.0))

    def step() -> float:
        return train_step(
            chunks, optimizer, lambda: iter(batches), ranks, micro_batches=micro_batches, rows=rows, seq_len=seq, lr=3e-4
        ).loss

    return step


def measure(config: Config, mode: str, token_counts: list[int], steps: int) -> dict[str, Any]:
    """Build one mode, measure a step at each number of tokens, and take everything down again."""
    from train.engine import parallel
    from train.engine.build import build_model
    from train.offload.config import OffloadConfig

    config = replace(config, offload=OffloadConfig(mode=mode if mode != "hybrid" else "none"))
    process = psutil.Process()
    ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
    chunks = build_model(config, ranks)
    torch.cuda.synchronize()
    device, host = torch.cuda.memory_allocated(), process.memory_info().rss
    started = time.perf_counter()
    optimizer = build_optimizer(config, mode, ranks, chunks)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"mode": mode, "build_seconds": time.perf_counter() - started, "steps": []}
    torch.cuda.reset_peak_memory_stats()
    for tokens in token_counts:
        step = stepper(config, optimizer, ranks, chunks, tokens)
        first_loss = step()
        seconds = median_seconds(step, steps)
        row["steps"].append(
            {"tokens": tokens, "ms": seconds * 1e3, "tokens_per_second": tokens / seconds, "first_loss": first_loss, "last_loss": step()}
        )
    row["peak_device_gib"] = torch.cuda.max_memory_allocated() / 2**30
    row["optimizer_device_bytes"] = torch.cuda.memory_allocated() - device
    row["optimizer_host_bytes"] = process.memory_info().rss - host
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    row["parameters"] = sum(p.numel() for part in parts for group in part.param_groups for p in group["params"])
    for part in parts:
        if hasattr(part, "planned_bytes"):
            row["planned_bytes"] = part.planned_bytes
            part.close()
    return row


def report(rows: list[dict[str, Any]], rates: dict[str, float]) -> None:
    """Add what is exposed and its bounds to the rows, and print them."""
    base = {step["tokens"]: step["ms"] for row in rows if row["mode"] == "none" for step in row.get("steps", ())}
    for row in rows:
        if "error" in row:
            print(f"{row['mode']:10} failed: {row['error']}")
            continue
        bounds = {
            "stream": 12 * row["parameters"] / rates["link_both_ways"],
            "cpu_step": row["parameters"] / rates["host_adam"] + 4 * min(16 * 2**20, row["parameters"]) / rates["link_one_way"],
        }
        for step in row["steps"]:
            step["exposed_ms"] = step["ms"] - base[step["tokens"]] if step["tokens"] in base else None
            step["bound_ms"] = bounds[row["mode"]] * 1e3 if row["mode"] in bounds else None
            exposed = "" if step["exposed_ms"] is None else f"{step['exposed_ms']:9.1f} ms exposed"
            bound = "" if step["bound_ms"] is None else f" (bound {step['bound_ms']:.1f})"
            speed = f"{step['ms']:9.1f} ms {step['tokens_per_second']:9,.0f} tokens/s"
            print(f"{row['mode']:10} {step['tokens']:6d} tokens {speed}{exposed}{bound}")
        planned = row.get("planned_bytes")
        plan = "" if planned is None else f"; planned {planned['device'] / 2**30:.2f} and {planned['host'] / 2**30:.2f}"
        taken = f"{row['optimizer_device_bytes'] / 2**30:.2f} GiB device, {row['optimizer_host_bytes'] / 2**30:.2f} GiB host"
        print(f"{'':10} optimiser: {taken}{plan}; peak of a step {row['peak_device_gib']:.1f} GiB, built in {row['build_seconds']:.1f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="tokens of a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from train.engine import parallel
    from train.worker import quiet_dependencies

    quiet_dependencies()
    config = compose(
        [
            "model=gpt_1b", "model.vocab_size=32768", f"model.layers={arguments.layers}", "tracking=none", "train.precision=bf16",
            f"train.seq_len={arguments.seq}", f"train.micro_batch={ROWS}", f"train.global_batch={ROWS}",
        ]
    )  # fmt: skip
    model = replace(config.model, kv_heads=config.model.heads, head_dim=config.model.width // config.model.heads)
    config = replace(config, model=model)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)  # for all modes alike
    rates = {"link_one_way": link_rate(False), "link_both_ways": link_rate(True), "host_adam": host_adam_rate(threads)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {threads} threads")
    print(
        f"{rates['link_one_way'] / 1e9:.1f} GB/s one way, {rates['link_both_ways'] / 1e9:.1f} GB/s each of both ways, "
        f"host AdamW {rates['host_adam'] / 1e9:.2f} G parameters/s; core's hybrid optimiser: {HYBRID}"
    )
    rows = []
    for mode in arguments.modes:
        try:
            rows.append(measure(config, mode, arguments.tokens, arguments.steps))
        except Exception as error:  # one mode's failure is a result; the others are still measured
            rows.append({"mode": mode, "error": f"{type(error).__name__}: {error}"})
        parallel.shutdown()
        gc.collect()
        torch.cuda.empty_cache()
    report(rows, rates)
    if arguments.out is not None:
        content = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "threads": threads, "rates": rates,
            "model": asdict(config.model), "hybrid_flags": HYBRID, "rows": rows,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
