"""A whole training step on one GPU: ours beside a plain torch GPT of the same size, in one run, with the costs of ours.

    python -m benchmarks.step                      # 1.2 B parameters, 4096 tokens x 4, dense attention
    python -m benchmarks.step --seq 32768 --rows 1 --attention s2

Both train on the same random tokens with one document a row. The anchor is a compiled torch module with SDPA and fused AdamW, once
with bf16 weights and states (6 bytes a parameter) and once with fp32 masters and moments and fp32 gradients, which is what ours keeps.
TFLOP/s counts matrix multiplications only (`train/tracking/flops.py`). Prints a table and writes JSON to --out.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config.compose import compose
from train.config.schema import Config


class PlainBlock(nn.Module):
    """Pre-norm block: RMSNorm, rotary attention through SDPA, SwiGLU."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.w_in, self.w_out = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(y)
        gate, up = self.w_in(self.norm_b(x)).chunk(2, -1)
        return x + self.w_out(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class PlainGPT(nn.Module):
    """The anchor: embedding, blocks, norm, untied head, cross entropy."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        model = config.model
        self.embed = nn.Embedding(model.vocab_size, model.width)
        self.blocks = nn.ModuleList(PlainBlock(model.width, model.heads, model.ffn_width) for _ in range(model.layers))
        self.norm, self.head = nn.RMSNorm(model.width), nn.Linear(model.width, model.vocab_size, bias=False)
        half = model.head_dim // 2
        angles = torch.arange(config.train.seq_len)[:, None] * model.rope_base ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def plain_step(config: Config, masters: bool) -> Callable[[Tensor, Tensor], Any]:
    """One step of the anchor; `masters`: fp32 masters, moments and gradients beside bf16 weights."""
    torch.manual_seed(0)
    model = PlainGPT(config).to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    compiled = torch.compile(model)
    weights = list(model.parameters())
    held = [w.detach().float() for w in weights] if masters else weights
    optimizer = torch.optim.AdamW(held, lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Any:
        loss = compiled(tokens, targets)
        loss.backward()
        if masters:
            for master, weight in zip(held, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, held)
        return loss

    return step


def our_step(config: Config) -> Callable[[Tensor, Tensor], Any]:
    """One step of the engine, in a world of one."""
    from train.data.dataset import Batch
    from train.engine import parallel
    from train.engine.build import build_model, build_optimizer
    from train.engine.step import train_step

    ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
    chunks = build_model(config, ranks)
    optimizer = build_optimizer(config, ranks, chunks)
    rows, seq = config.train.micro_batch, config.train.seq_len
    positions = torch.arange(seq, device="cuda").expand(rows, seq)
    mask = torch.ones(rows, seq, device="cuda")

    def step(tokens: Tensor, targets: Tensor) -> Any:
        batch = Batch(tokens, targets, mask, positions, None, [], 1.0)
        result = train_step(chunks, optimizer, lambda: iter([batch]), ranks, micro_batches=1, rows=rows, seq_len=seq, lr=3e-4)
        return torch.tensor(result.loss)

    return step


def measure(name: str, build: Callable[[], Callable[[Tensor, Tensor], Any]], config: Config, steps: int, flops: float) -> dict[str, Any]:
    """Median time of a step after warm-up, with its loss and memory peak."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = build()
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (config.train.micro_batch, config.train.seq_len + 1)
    data = [torch.randint(config.model.vocab_size, shape, device="cuda", generator=generator) for _ in range(4)]
    times, losses = [], []
    for i in range(steps + 4):
        row = data[i % len(data)]
        torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(step(row[:, :-1].contiguous(), row[:, 1:].contiguous()))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[4:])
    tokens = config.train.micro_batch * config.train.seq_len
    row = {
        "name": name,
        "ms": seconds * 1e3,
        "tokens_per_second": tokens / seconds,
        "tflops": flops * tokens / seconds / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }
    print(
        f"{name:32} {row['ms']:8.1f} ms {row['tokens_per_second']:10,.0f} tokens/s {row['tflops']:6.0f} TFLOP/s {row['peak_gib']:6.1f} GiB"
    )
    if name == "leantron":
        row["costs"] = costs(lambda: step(data[0][:, :-1].contiguous(), data[0][:, 1:].contiguous()))
    return row


def costs(step: Callable[[], Any], top: int = 25) -> list[dict[str, Any]]:
    """The kernels that take most of one step's device time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiled.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    found = [{"kernel": e.key[:100], "ms": e.self_device_time_total / 1e3, "calls": e.count} for e in kernels[:top]]
    print(f"  device time of one step {total / 1e3:.1f} ms, of which")
    for line in found:
        print(f"  {line['ms']:8.2f} ms {line['calls']:5d} x {line['kernel'][:90]}")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--attention", choices=("dense", "s2"), default="dense")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip-anchor", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from train.tracking.flops import train_flops_per_token
    from train.worker import quiet_dependencies

    quiet_dependencies()
    config = compose(
        [
            "model=gpt_1b", f"attention={arguments.attention}", "model.vocab_size=32768", "parallel=single", "tracking=none",
            f"model.layers={arguments.layers}",
            f"train.seq_len={arguments.seq}", f"train.micro_batch={arguments.rows}", f"train.global_batch={arguments.rows}",
        ]
    )  # fmt: skip
    model = replace(config.model, kv_heads=config.model.heads, head_dim=config.model.width // config.model.heads)
    config = replace(config, model=model)
    flops = train_flops_per_token(config, arguments.seq, pattern_aware=True)
    dense_flops = train_flops_per_token(config, arguments.seq, pattern_aware=False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {arguments.seq} tokens x {arguments.rows}, {arguments.attention}")
    rows = [measure("leantron", lambda: our_step(config), config, arguments.steps, flops)]
    gc.collect()
    if not arguments.skip_anchor:
        for name, masters in (("plain torch, bf16 states", False), ("plain torch, fp32 masters", True)):
            rows.append(measure(name, lambda m=masters: plain_step(config, m), config, arguments.steps, dense_flops))
            gc.collect()
            torch._dynamo.reset()
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "arguments": str(vars(arguments)), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
