"""S2 attention beside dense attention and FlexAttention on this device, in one run: time, TFLOP/s on exact pairs, memory.

    python -m benchmarks.s2 --out s2_bench            # writes s2_bench.json and s2_bench.png; one CUDA device, a few minutes
    python -m benchmarks.s2 --lengths 8192 32768      # less

Correctness comes first: every shape is compared with the float32 reference on a short sequence, and a shape that fails prints no speed.
DKernel (linxihui/dkernel), whose pattern is the same head for head, is measured when it can be imported, and checked alike.
TFLOP/s count the (query, key) pairs that the pattern keeps, exactly: 4 x pairs x width forward, 10 x backward. "ratio" is that rate over
cuDNN's dense rate at the same length in the same run; "x FA2" is FlashAttention-2's dense time over ours.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from s2 import S2Pattern, s2_attention

SHAPES: dict[str, dict[str, Any]] = {
    "L16 s16 b64": {"num_heads": 32, "num_kv_heads": 32, "local_blocks": 16, "stride": 16, "block_size": 64},
    "L8 s16 b128": {"num_heads": 32, "num_kv_heads": 32, "local_blocks": 8, "stride": 16, "block_size": 128},
    "L64 s16 b64": {"num_heads": 32, "num_kv_heads": 32, "local_blocks": 64, "stride": 16, "block_size": 64},
    "L16 s8 b64 32/8": {"num_heads": 32, "num_kv_heads": 8, "local_blocks": 16, "stride": 8, "block_size": 64},
    "L16 s64 b64 64h": {"num_heads": 64, "num_kv_heads": 64, "local_blocks": 16, "stride": 64, "block_size": 64},
    "dense": {"num_heads": 32, "num_kv_heads": 32, "stride": 1},
}
WIDTH = 128
TOLERANCE = 0.01


def measure(step: Callable[[], Any], budget_ms: float = 150.0) -> float:
    """Median milliseconds of a step on the device: a warm-up, an estimate, then 3 to 50 runs in a row, as many as the budget holds."""

    def some(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            begin.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    some(1)
    return statistics.median(some(max(3, min(50, int(budget_ms / some(1)[0])))))


def tensors(pattern: S2Pattern, length: int, batch: int) -> list[torch.Tensor]:
    """q, k, v and the upstream gradient, bf16."""
    heads = (pattern.num_heads, pattern.num_kv_heads, pattern.num_kv_heads, pattern.num_heads)
    return [torch.randn(batch, length, h, WIDTH, device="cuda", dtype=torch.bfloat16) for h in heads]


def is_right(pattern: S2Pattern, label: str, call: Callable[..., Any], length: int = 2100) -> bool:
    """Output and gradients of a short sequence with strong logits against the float32 reference."""
    q, k, v, g = tensors(pattern, length, 1)
    q = 2 * q
    results = []
    for x, attend in (((q, k, v), call), ((q.float(), k.float(), v.float()), functools.partial(ours, pattern, "reference"))):
        leaves = [y.detach().requires_grad_() for y in x]
        out = attend(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, g.to(out.dtype))))
    errors = [float(((a.float() - b).norm() / b.norm()).detach()) for a, b in zip(*results, strict=True)]
    print(f"check {label}: " + " ".join(f"{error:.1e}" for error in errors), flush=True)
    return max(errors) < TOLERANCE


def ours(pattern: S2Pattern, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """This library's attention by one of its back ends."""
    out = s2_attention(q, k, v, pattern, backend=backend)
    assert isinstance(out, torch.Tensor)
    return out


def dkernel(pattern: S2Pattern, length: int) -> Callable[..., Any]:
    """DKernel's attention with a pattern that is not dense; ImportError where it is not installed."""
    from dkernel import LocalStrideSparseAttention

    sizes = (pattern.num_heads, length, pattern.block_size, pattern.local_blocks, pattern.stride)
    module = LocalStrideSparseAttention(*sizes, num_kv_heads=pattern.num_kv_heads, seq_dim=1).to("cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = module(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return attend


@functools.cache
def dkernel_serves(pattern: S2Pattern) -> bool:
    """Whether DKernel can be measured with a pattern: it is installed, and its result is right; says why not."""
    if pattern.is_dense:
        return False
    try:
        right = is_right(pattern, "dkernel", dkernel(pattern, 2048), 2048)
    except Exception as problem:  # a peer may fail in any way; the others still count
        print(f"dkernel: not measured ({type(problem).__name__}: {str(problem)[:100]})", flush=True)
        return False
    if not right:
        print("dkernel: the result is wrong, no speed is printed", flush=True)
    return right


def peer(kind: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense causal attention by one of torch's back ends."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(kind):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def run(call: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, backward: bool) -> dict[str, float]:
    """Forward and backward milliseconds and peak extra memory in MiB (outputs and gradients counted)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    with torch.no_grad():
        row = {"fwd_ms": measure(lambda: call(q, k, v))}
    row["fwd_mib"] = (torch.cuda.max_memory_allocated() - start) / 2**20
    if backward:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = call(*leaves)
        row["bwd_ms"] = measure(lambda: torch.autograd.grad(out, leaves, g, retain_graph=True))
        row["bwd_mib"] = (torch.cuda.max_memory_allocated() - start) / 2**20
    return row


def rows_of(name: str, length: int, backward: bool, peers: list[str], dense: dict[Any, dict[str, float]]) -> list[dict[str, Any]]:
    """The measurements of one shape at one length: ours and, where asked for, its peers."""
    pattern = S2Pattern(**SHAPES[name])
    batch = 4 if length <= 8192 else 1
    q, k, v, g = tensors(pattern, length, batch)
    calls: dict[str, Callable[..., Any]] = {"ours": functools.partial(s2_attention, pattern=pattern, backend="triton")}
    if "flex" in peers and length <= 32768:
        calls["flex"] = functools.partial(s2_attention, pattern=pattern, backend="flex")
    if "dkernel" in peers and dkernel_serves(pattern):
        calls["dkernel"] = dkernel(pattern, length)
    if pattern.group > 1:
        repeated = S2Pattern(**(SHAPES[name] | {"per": "q_head", "num_kv_heads": pattern.num_heads}))
        calls["ours, repeated KV"] = functools.partial(s2_attention, pattern=repeated, backend="triton")
    key = (length, pattern.num_heads, pattern.num_kv_heads)
    if key not in dense and length <= 131072:
        for kind in ("flash", "cudnn"):
            if kind in peers:
                backend = SDPBackend.FLASH_ATTENTION if kind == "flash" else SDPBackend.CUDNN_ATTENTION
                dense.setdefault(key, {}).update(
                    {f"{kind}_{a}": b for a, b in run(functools.partial(peer, backend), q, k, v, g, backward).items()}
                )
    found = []
    for label, call in calls.items():
        group = pattern.group if label.endswith("KV") else 1
        row: dict[str, Any] = {"shape": name, "length": length, "batch": batch, "backend": label, "density": pattern.density(length)}
        try:
            row |= run(call, q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), g, backward)
        except Exception as problem:
            if label in ("ours", "ours, repeated KV") and not isinstance(problem, torch.OutOfMemoryError):
                raise
            row["error"] = f"{type(problem).__name__}: {str(problem)[:100]}"  # a peer may fail in any way; the others still count
            found.append(row)
            continue
        pairs, all_pairs = batch * int(pattern.pairs(length).sum()), batch * pattern.num_heads * length * (length + 1) // 2
        base = dense.get(key, {})
        for part, factor in (("fwd", 4), ("bwd", 10)):
            if f"{part}_ms" in row:
                row[f"{part}_tflops"] = factor * pairs * WIDTH / row[f"{part}_ms"] / 1e9
                if f"cudnn_{part}_ms" in base:
                    row[f"{part}_ratio"] = row[f"{part}_tflops"] / (factor * all_pairs * WIDTH / base[f"cudnn_{part}_ms"] / 1e9)
                if f"flash_{part}_ms" in base:
                    row[f"{part}_x_fa2"] = base[f"flash_{part}_ms"] / row[f"{part}_ms"]
        found.append(row)
    return found


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    cells = [f"{row['shape']:16} {row['length']:8} x{row['batch']} {row['backend']:18} {row['density']:.3f}"]
    for part in ("fwd", "bwd"):
        if f"{part}_ms" in row:
            more = "".join(f" {row[f'{part}_{k}']:5.2f}{u}" for k, u in (("ratio", " cuDNN"), ("x_fa2", "x FA2")) if f"{part}_{k}" in row)
            cells.append(f"{part} {row[f'{part}_ms']:8.3f} ms {row[f'{part}_tflops']:4.0f} TF{more} {row[f'{part}_mib']:6.0f} MiB")
    print(" | ".join(cells) + (f" | {row['error']}" if "error" in row else ""), flush=True)


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Forward and backward rates of every row as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 0.3 * len(rows) + 2), sharey=True)
    for axis, part in zip(axes, ("fwd", "bwd"), strict=True):
        labels = [f"{row['shape']} {row['length'] // 1024}K {row['backend']}" for row in rows]
        axis.barh(labels, [row.get(f"{part}_tflops", 0.0) for row in rows])
        axis.set_xlabel(f"{part} TFLOP/s on exact pairs")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="s2_bench", help="prefix of the JSON and PNG files")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--long", type=int, nargs="*", default=[524288, 1048576], help="lengths of the forward alone, ours only")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--peers", nargs="*", default=["flash", "cudnn", "flex", "dkernel"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.s2 needs a CUDA device", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    good = [
        name
        for name in args.shapes
        if is_right(S2Pattern(**SHAPES[name]), name, functools.partial(ours, S2Pattern(**SHAPES[name]), "triton"))
    ]
    for name in set(args.shapes) - set(good):
        print(f"{name}: the result is wrong, no speed is printed")
    rows: list[dict[str, Any]] = []
    dense: dict[Any, dict[str, float]] = {}
    for lengths, backward in ((args.lengths, True), (args.long, False)):
        for length in lengths:
            for name in good:
                if not backward and name == "dense":
                    continue
                for row in rows_of(name, length, backward, args.peers if backward else [], dense):
                    show(row)
                    rows.append(row)
                peers = {"/".join(map(str, key)): value for key, value in dense.items()}
                with open(f"{args.out}.json", "w") as file:
                    json.dump(
                        {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "dense": peers}, file, indent=1
                    )
    for key, base in dense.items():
        print(key, {name: round(value, 2) for name, value in base.items()})
    draw(rows, f"{args.out}.png")
    return 0 if len(good) == len(args.shapes) else 1


if __name__ == "__main__":
    sys.exit(main())
