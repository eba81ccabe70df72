"""Measures tile candidates of the S2 kernels on this device: what `s2/triton/config.py` holds was chosen from its table.

    python -m benchmarks.s2_tune --out tune.json            # a few minutes; one CUDA device

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
from s2.triton import op
from s2.triton.config import Tile, Tiles

CANDIDATES: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "forward": [(128, 128, 8, 3, True), (128, 64, 8, 3, True), (128, 64, 4, 2, True), (64, 64, 4, 3, True), (64, 64, 4, 2, True)],
    "dq": [(128, 64, 8, 3, True), (128, 64, 8, 4, True), (128, 128, 8, 2, True), (64, 64, 4, 2, True)],
    "dkv": [(64, 128, 8, 3, True), (64, 128, 8, 4, True), (64, 128, 8, 2, True), (64, 64, 4, 2, True)],
}
"""(rows, keys, warps, stages, tma) per kernel."""
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


def compile_share(share: list[tuple[str, str, Tile]], shape_of: tuple[int, int, int]) -> None:
    """Compiles variants by one launch each at a small length; kernels do not depend on it."""
    for shape, kind, tile in share:
        tensors, pattern = make(*shape_of[:2], 4096, shape_of[2], shape)
        saved = (torch.zeros_like(tensors[0]), torch.zeros(1, shape_of[0], 4096, device="cuda"))
        try:
            run(kind, tile, tensors, pattern, saved)()
            torch.cuda.synchronize()
        except Exception as error:
            print(shape, kind, tile, repr(error)[:300], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.json")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    args = parser.parse_args()
    from triton.testing import do_bench

    todo = list(variants(args.shapes))
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

    rows, first = [], {}
    for shape in args.shapes:
        tensors, pattern = make(args.heads, args.kv_heads, args.length, args.width, shape)
        saved = run("forward", BASE.forward, tensors, pattern, (tensors[0], tensors[0]))()
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
    with open(args.out, "w") as file:
        json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "args": vars(args), "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
