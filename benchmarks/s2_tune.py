"""Measures tile candidates of the S2 kernels on this device: what `s2/triton/config.py` holds was chosen from its table.

    python -m benchmarks.s2_tune --out tune.json            # a few minutes; one CUDA device
    python -m benchmarks.s2_tune --write                    # also puts the fastest into this machine's tile table (s2/triton/tuning.py)
    python -m benchmarks.s2_tune --backward                 # whole backward passes: tiles apart for stripes and window, dq beside dk/dv

Every candidate is checked against plain tiles without TMA before it is timed; compilation is spread over the host's cores.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from s2 import S2Pattern
from s2.triton import op, tuning
from s2.triton.config import Tile, Tiles

CANDIDATES: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "forward": [(128, 128, 8, 3, True), (128, 64, 8, 3, True), (128, 64, 4, 2, True), (64, 64, 4, 3, True), (64, 64, 4, 2, True)],
    "dq": [(128, 64, 8, 3, True), (128, 64, 8, 4, True), (128, 128, 8, 2, True), (64, 64, 4, 2, True)],
    "dkv": [(64, 128, 8, 3, True), (64, 128, 8, 4, True), (64, 128, 8, 2, True), (64, 64, 4, 2, True), (64, 64, 8, 3, True)],
}
"""(rows, keys, warps, stages, tma) per kernel."""
BACKWARD: list[tuple[tuple[int, int, int, int], tuple[int, int, int, int], tuple[int, int, int, int], bool]] = [
    (dq, stripe, window, overlap)
    for dq in ((128, 64, 8, 3), (64, 64, 4, 3))
    for stripe, window in (
        ((64, 128, 8, 3), (64, 128, 8, 3)),
        ((64, 128, 8, 3), (64, 64, 4, 2)),
        ((64, 64, 4, 2), (64, 64, 4, 2)),
        ((64, 128, 8, 4), (64, 128, 8, 2)),
        ((128, 64, 8, 2), (64, 128, 8, 3)),
        ((64, 64, 8, 3), (64, 64, 8, 3)),
    )
    for overlap in (False, True)
]
"""(rows, keys, warps, stages) of dq, the stripes' kernel and the window's, and whether dq runs beside them; docs/log.md says why these."""
SHAPES: dict[str, dict[str, int]] = {
    "b128 L8 s16": {"block_size": 128, "local_blocks": 8, "stride": 16},
    "b64 L16 s16": {"block_size": 64, "local_blocks": 16, "stride": 16},
    "dense": {"stride": 1},
}
BASE = Tiles(
    forward=Tile(rows=64, keys=64, warps=4, stages=2, tma=False),
    dq=Tile(rows=64, keys=64, warps=4, stages=2, tma=False),
    dkv=Tile(rows=64, keys=64, warps=4, stages=2, tma=False),
)


TOLERANCE = 0.01
"""Largest relative difference from plain tiles of a candidate that may be chosen."""


def variants(shapes: list[str]) -> Iterator[tuple[str, str, Tile]]:
    """(shape, kernel, tile) to measure."""
    for shape in shapes:
        for kind, rows in CANDIDATES.items():
            for r, k, w, s, tma in rows:
                yield shape, kind, Tile(rows=r, keys=k, warps=w, stages=s, tma=tma)


def make(heads: int, kv_heads: int, length: int, d: int, shape: str) -> tuple[list[torch.Tensor], S2Pattern]:
    pattern = S2Pattern(num_heads=heads, num_kv_heads=kv_heads, **SHAPES[shape])
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(1, length, h, d, device="cuda", dtype=torch.bfloat16, generator=generator) for h in sizes], pattern


def run(kind: str, tile: Tile, tensors: list[torch.Tensor], pattern: S2Pattern, saved: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A function that launches the kernel once and returns its outputs."""
    q, k, v, g = tensors
    lse = saved[1]
    residues = op._residue_table(pattern.residues(), q.device)
    stride = 1 if pattern.is_dense else pattern.stride
    scale = q.shape[3] ** -0.5
    op.tiles = lambda *a: Tiles(forward=tile, dq=tile, dkv=tile)
    if kind == "forward":
        return lambda: op.attention(q, k, v, residues, None, None, scale, pattern.block_size, pattern.local_blocks, stride, True)
    call = op.Call(q, k, v, None, None, pattern.block_size, pattern.local_blocks, stride, True)
    lse, delta = (torch.zeros(lse.numel() + 128, device=lse.device) for _ in range(2))
    launch = op.launch_dq if kind == "dq" else op.launch_dkv
    return lambda: launch(call, tile, (q, k, v, g), (lse, delta), residues, scale)


def backward(choice: Any, tensors: list[torch.Tensor], pattern: S2Pattern, saved: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A function that runs a whole backward pass with a row of `BACKWARD`."""
    q, k, v, g = tensors
    dq, stripe, dkv = (Tile(rows=r, keys=n, warps=w, stages=s) for r, n, w, s in choice[:3])
    op.tiles = lambda *a: Tiles(forward=dq, dq=dq, dkv=dkv, stripe=stripe, overlap=choice[3])
    numbers = (q.shape[3] ** -0.5, pattern.block_size, pattern.local_blocks, 1 if pattern.is_dense else pattern.stride, True)
    residues = op._residue_table(pattern.residues(), q.device)
    return lambda: op.attention_backward(q, k, v, *saved, g, None, residues, None, None, *numbers)


def sweep_backward(
    args: argparse.Namespace, shape: str, tensors: list[torch.Tensor], pattern: S2Pattern, saved: Any
) -> list[dict[str, Any]]:
    """Times of all rows of `BACKWARD`, each checked against plain tiles."""
    from triton.testing import do_bench

    plain = (BASE.dq.rows, BASE.dq.keys, BASE.dq.warps, BASE.dq.stages)
    want = [x.float() for x in backward((plain, plain, plain, False), tensors, pattern, saved)()]
    rows = []
    for choice in BACKWARD:
        try:
            step = backward(choice, tensors, pattern, saved)
            error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(step(), want, strict=True))
            ms = do_bench(step, warmup=20, rep=120, return_mode="median")
        except Exception as problem:  # a row may exceed the device in many ways; the others still count
            print(shape, choice, "failed:", repr(problem)[:160], flush=True)
            continue
        rate = 10 * int(pattern.pairs(args.length).sum()) * args.width / ms / 1e9
        names = ("dq", "stripe", "window", "overlap")
        rows.append({"shape": shape, "kind": "backward", "ms": ms, "tflops": rate, "error": error, **dict(zip(names, choice, strict=True))})
        print(f"{shape:12} backward {ms:8.3f} ms {rate:6.0f} TFLOP/s  err {error:.1e}  dq, stripe, window, overlap {choice}", flush=True)
    return rows


def table_entries(rows: list[dict[str, Any]], width: int) -> list[dict[str, Any]]:
    """Entries of the tile table: the fastest right candidate of each kernel, over the shapes of a kind of block together."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        if row["kind"] not in CANDIDATES or row["error"] > TOLERANCE:
            continue
        key = row["kind"], 64 if SHAPES[row["shape"]].get("block_size", 128) < 128 else 128
        # Dense attention shares the entries of large blocks; the sparse shape decides them, as torch serves dense training.
        if key not in best or (row["shape"] != "dense" and (best[key]["shape"] == "dense" or row["ms"] < best[key]["ms"])):
            best[key] = row
    fields = ("rows", "keys", "warps", "stages", "tma")
    # The keys' kernels are measured with one tile for window and stripes: the package's own tile for stripes must not stay beside it.
    return [
        {"kernel": kernel, "bytes": 2, "width": width, "block": block, "length": None, **{name: row[name] for name in fields}}
        for (kind, block), row in best.items()
        for kernel in ((kind, "stripe") if kind == "dkv" else (kind,))
    ]


def compile_share(share: list[tuple[str, str, Any]], shape_of: tuple[int, int, int]) -> None:
    """Compiles variants, or rows of `BACKWARD`, by one launch each at a small length; kernels do not depend on it."""
    for shape, kind, choice in share:
        tensors, pattern = make(*shape_of[:2], 4096, shape_of[2], shape)
        saved = (torch.zeros_like(tensors[0]), torch.zeros(1, shape_of[0], 4096, device="cuda"))
        try:
            (backward(choice, tensors, pattern, saved) if kind == "backward" else run(kind, choice, tensors, pattern, saved))()
            torch.cuda.synchronize()
        except Exception as error:
            print(shape, kind, choice, repr(error)[:300], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--write", action="store_true", help="put the fastest tiles into this machine's table")
    parser.add_argument("--backward", action="store_true", help="measure whole backward passes instead of single kernels")
    args = parser.parse_args()
    from triton.testing import do_bench

    todo: list[tuple[str, str, Any]] = list(variants(args.shapes))
    if args.backward:
        todo = [(shape, "backward", choice) for shape in args.shapes for choice in BACKWARD]
    plain = [(shape, kind, getattr(BASE, kind)) for shape in args.shapes for kind in CANDIDATES]
    began = time.time()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    shape_of = (args.heads, args.kv_heads, args.width)
    processes = [context.Process(target=compile_share, args=((todo + plain)[n::workers], shape_of)) for n in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled in {time.time() - began:.0f} s", flush=True)

    rows: list[dict[str, Any]] = []
    first = {}
    for shape in args.shapes:
        tensors, pattern = make(args.heads, args.kv_heads, args.length, args.width, shape)
        saved = run("forward", BASE.forward, tensors, pattern, (tensors[0], tensors[0]))()
        if args.backward:
            rows += sweep_backward(args, shape, tensors, pattern, saved)
            continue
        for kind in CANDIDATES:
            result = run(kind, getattr(BASE, kind), tensors, pattern, saved)()
            first[shape, kind] = result if isinstance(result, tuple) else (result,)
        pairs = int(pattern.pairs(args.length).sum())
        for _, kind, tile in (v for v in todo if v[0] == shape):
            try:
                step = run(kind, tile, tensors, pattern, saved)
                result = step()
                result = result if isinstance(result, tuple) else (result,)
                pairwise = zip(result, first[shape, kind], strict=True)
                error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairwise)
                ms = do_bench(step, warmup=20, rep=80, return_mode="median")
            except Exception as problem:
                print(shape, kind, tile, "failed:", repr(problem)[:200], flush=True)
                continue
            flops = pairs * args.width * {"forward": 4, "dq": 6, "dkv": 8}[kind]
            rows.append({"shape": shape, "kind": kind, "ms": ms, "tflops": flops / ms / 1e9, "error": error, **vars(tile)})
            print(f"{shape:12} {kind:8} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s  err {error:.1e}  {tile}", flush=True)
    if args.write:
        path = tuning.own_file(torch.cuda.get_device_capability())
        tuning.write(path, table_entries(rows, args.width), {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
        print(f"written: {path}")
    with open(args.out, "w") as file:
        json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "args": vars(args), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
