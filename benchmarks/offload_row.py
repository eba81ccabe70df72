"""One row of `benchmarks/offload.py` in a process of its own: `python -m benchmarks.offload_row <request> <result>`, both JSON.

A process for each row: memory of one mode cannot burden the next, and one that is killed costs its row only. The result is written after
each number of tokens, so that a time limit loses what was not measured yet, no more.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from train.config.compose import compose, write_atomic
from train.config.schema import Config
from train.offload.bandwidth import host_adam_rate, measure, median_seconds
from train.offload.config import OffloadConfig
from train.offload.host_adam import host_adam
from train.worker import die_with_parent, quiet_dependencies

OURS: dict[str, OffloadConfig] = {
    "none": OffloadConfig(),
    "stream": OffloadConfig(mode="stream"),
    "stream_late": OffloadConfig(mode="stream", prefetch=False),
    "cpu_step": OffloadConfig(mode="cpu_step"),
    "cpu_step_deepspeed": OffloadConfig(mode="cpu_step", cpu_adam="deepspeed"),
}
HYBRID = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "use_precision_aware_optimizer": True,
}
"""Core's flags: everything on the host, its overlap and its pinning on. It needs the distributed optimiser, and parameters on a GPU."""
MODEL: dict[str, Any] = {
    "layers": 24, "width": 2048, "ffn_width": 5632, "heads": 16, "vocabulary": 32768, "seq": 4096, "precision": "bf16", "recompute": "none",
}  # fmt: skip
"""The model unless the command line says otherwise: 1.4 B parameters."""
ROWS = 4
GIB = 2**30


def configuration(request: dict[str, Any], layers: int | None = None) -> Config:
    """The configuration of a request's model with all sizes filled in, one process."""
    width, heads = request["width"], request["heads"]
    return compose(
        [
            "model=gpt_1b", f"model.vocab_size={request['vocabulary']}", f"model.layers={layers or request['layers']}", "tracking=none",
            f"model.width={width}", f"model.ffn_width={request['ffn_width']}", f"model.heads={heads}", f"model.kv_heads={heads}",
            f"model.head_dim={width // heads}", f"train.precision={request['precision']}", f"train.recompute={request['recompute']}",
            f"train.seq_len={request['seq']}", "train.micro_batch=1", "train.global_batch=1",
        ]
    )  # fmt: skip


def build_optimizer(config: Config, mode: str, ranks: Any, chunks: list[Any]) -> Any:
    """The engine's optimiser of a mode, or core's hybrid one."""
    from train.engine import build

    if mode in OURS:
        return build.build_optimizer(replace(config, offload=OURS[mode]), ranks, chunks)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if ranks.device.type != "cuda":
        raise RuntimeError("core's hybrid optimiser moves parameters from a GPU only (on the CPU its step ends in a KeyError)")
    optim = config.optim
    settings = OptimizerConfig(
        optimizer="adam", lr=optim.lr, min_lr=optim.min_lr, weight_decay=optim.weight_decay, adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1], adam_eps=optim.eps, clip_grad=optim.clip, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True, **HYBRID,
    )  # fmt: skip
    return get_megatron_optimizer(settings, chunks, use_gloo_process_groups=ranks.device.type == "cuda")


def random_batches(config: Config, device: torch.device, rows: int, micro_batches: int) -> list[Any]:
    """Micro-batches of random tokens, the same for every mode."""
    from train.data.dataset import Batch

    seq, generator = config.train.seq_len, torch.Generator().manual_seed(1)
    batches = []
    for _ in range(micro_batches):
        row = torch.randint(config.model.vocab_size or 0, (rows, seq + 1), generator=generator).to(device)
        positions, mask = torch.arange(seq).expand(rows, seq).to(device), torch.ones(rows, seq, device=device)
        batches.append(Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous(), mask, positions, None, [], 1.0))
    return batches


def stepper(config: Config, optimizer: Any, ranks: Any, chunks: list[Any], tokens: int) -> Callable[[], float]:
    """A function that trains on one step of `tokens` tokens and returns the loss."""
    from train.engine.step import train_step

    seq = config.train.seq_len
    rows = min(ROWS, tokens // seq)
    micro_batches = tokens // (rows * seq)
    batches = random_batches(config, ranks.device, rows, micro_batches)
    for part in optimizer.chained_optimizers:
        part.micro_batches = micro_batches  # after which one states may arrive

    def step() -> float:
        return train_step(
            chunks, optimizer, lambda: iter(batches), ranks, micro_batches=micro_batches, rows=rows, seq_len=seq, lr=3e-4
        ).loss

    return step


def torchao_stepper(config: Config, ranks: Any, chunks: list[Any], tokens: int, made: list[Any]) -> Callable[[], float]:
    """The same with torchao's optimiser on the bare model: bf16 weights without masters, no clipping, gradients sent while they come."""
    from torchao.optim import CPUOffloadOptimizer

    (model,), optim = chunks, config.optim
    if not made:
        settings = {"lr": 3e-4, "betas": tuple(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}
        made.append(CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **settings))
    rows = min(ROWS, tokens // config.train.seq_len)
    batches = random_batches(config, ranks.device, rows, tokens // (rows * config.train.seq_len))

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(batch.tokens, batch.positions, None, batch.targets).float().sum() / tokens
            loss.backward()
            total += float(loss.detach())
        made[0].step()
        made[0].zero_grad()
        return total

    return step


def measure_mode(request: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
    """Build one mode and measure a step at each number of tokens."""
    from benchmarks.quick_model import build_model
    from train.engine import parallel
    from train.engine.offload import exposed_seconds

    mode = request["mode"]
    row: dict[str, Any] = {"mode": mode, "steps": []}
    if mode == "cpu_step_deepspeed":
        started = time.perf_counter()
        row["host_adam"] = host_adam_rate(update=host_adam("deepspeed"))
        row["load_seconds"] = time.perf_counter() - started
    config, process = configuration(request), psutil.Process()
    ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
    chunks = build_model(config, ranks, trainable=mode != "torchao")
    gc.collect()
    device, host = _device_bytes(), process.memory_info().rss
    started = time.perf_counter()
    optimizer = build_optimizer(config, mode, ranks, chunks) if mode != "torchao" else None
    row["build_seconds"] = time.perf_counter() - started
    row["parameters"] = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    made: list[Any] = []
    for tokens in request["tokens"]:
        if optimizer is None:
            step = torchao_stepper(config, ranks, chunks, tokens, made)
        else:
            step = stepper(config, optimizer, ranks, chunks, tokens)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        first_loss = step()
        waits = exposed_seconds(optimizer, wait=True) if optimizer is not None else {}
        seconds = median_seconds(step, request["steps"])
        waits = exposed_seconds(optimizer, wait=True) if optimizer is not None else waits
        row["steps"].append(
            {
                "tokens": tokens, "ms": seconds * 1e3, "tokens_per_second": tokens / seconds, "first_loss": first_loss, "last_loss": step(),
                "waited_ms": waits["offload_exposed_seconds"] * 1e3 if waits else None,
                "peak_device_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
                "host_rss_gib": process.memory_info().rss / GIB,
            }
        )  # fmt: skip
        row["optimizer_device_bytes"] = _device_bytes() - device
        row["optimizer_host_bytes"] = process.memory_info().rss - host
        row["planned_bytes"] = _planned(optimizer)
        write(row)


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _planned(optimizer: Any) -> dict[str, int] | None:
    if optimizer is None:
        return None
    plans = [part.optimizer.planned_bytes for part in optimizer.chained_optimizers if hasattr(part.optimizer, "planned_bytes")]
    return {place: sum(plan[place] for plan in plans) for place in ("device", "host")} if plans else None


def try_size(request: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
    """Three steps of a model of `layers`, or a record of why not."""
    from benchmarks.quick_model import build_model
    from train.engine import build, parallel

    config = configuration(request, request["layers"])
    config = replace(config, offload=replace(OURS[request["mode"]], fraction=request["fraction"] or 1.0))
    record: dict[str, Any] = {"mode": request["mode"], "layers": request["layers"], "fraction": request["fraction"], "runs": False}
    started = time.perf_counter()
    ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
    try:
        chunks = build_model(config, ranks)
        optimizer = build.build_optimizer(config, ranks, chunks)
        record["parameters"] = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        record["build_seconds"] = time.perf_counter() - started
        step = stepper(config, optimizer, ranks, chunks, config.train.seq_len)
        record["losses"], record["step_seconds"] = [], []
        for _ in range(3):
            began = time.perf_counter()
            record["losses"].append(step())
            _device_bytes()
            record["step_seconds"].append(time.perf_counter() - began)
        record["runs"] = True
    except (torch.OutOfMemoryError, MemoryError) as error:
        record["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if torch.cuda.is_available():
        record["peak_device_gib"] = torch.cuda.max_memory_allocated() / GIB
    record["host_rss_gib"] = psutil.Process().memory_info().rss / GIB
    write(record)


def main() -> None:
    """Do what the request asks for; an error is a result too."""
    die_with_parent()
    request, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    quiet_dependencies()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)  # for all modes alike

    def write(content: dict[str, Any]) -> None:
        write_atomic(path, json.dumps(content))

    if request["what"] == "rates":
        write({"threads": threads, **measure(threads)})
        return
    work = {"mode": measure_mode, "size": try_size}[request["what"]]
    try:
        work(request, write)
    except Exception as error:  # the parent goes on with the other rows
        kept = json.loads(path.read_text()) if path.is_file() else {"mode": request["mode"]}
        write({**kept, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise


if __name__ == "__main__":
    main()
