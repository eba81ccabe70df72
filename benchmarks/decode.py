"""Decoding on this device: how fast a step reads the key/value cache, beside the copy rate, and what a whole model takes for a token.

    python -m benchmarks.decode --out decode_bench          # attention alone: table, JSON and figure; one CUDA device, some minutes
    python -m benchmarks.decode --tiles                     # measures tile candidates too; --write puts the best into the tile table
    python -m benchmarks.decode --model                     # a whole 1.2 B-parameter model too

Correctness comes first: every shape decodes a short batch of mixed lengths against the float64 reference, and a shape that fails prints no
speed. GB/s count the keys and values that the pattern attends to (`S2Cache.nbytes`), each once. The copy rate is that of a device-to-device
copy of 1 GiB, read and written bytes. Steps run from a CUDA graph over as many caches as exceed the L2 cache, append and decode together.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from s2 import S2Cache, S2Pattern, s2_decode
from s2.triton import decode as kernels
from s2.triton import tuning
from s2.triton.config import DecodeTile

SHAPES: dict[str, dict[str, Any]] = {
    "L16 s8 b64 32/8": {"num_heads": 32, "num_kv_heads": 8, "local_blocks": 16, "stride": 8, "block_size": 64},
    "L16 s16 b64 32/32": {"num_heads": 32, "num_kv_heads": 32, "local_blocks": 16, "stride": 16, "block_size": 64},
    "dense 32/8": {"num_heads": 32, "num_kv_heads": 8, "stride": 1},
    "dense 32/32": {"num_heads": 32, "num_kv_heads": 32, "stride": 1},
}
WIDTH = 128
TOLERANCE = 0.01
FLUSH = 256 << 20
"""Bytes of caches that a measurement goes through: several times the L2 cache, so that none of them is still in it."""
CANDIDATES = [
    DecodeTile(keys=keys, warps=warps, stages=stages, programs=programs, least=least)
    for keys, warps, stages in ((64, 4, 3), (64, 4, 4), (32, 4, 4), (32, 2, 4), (64, 2, 3), (128, 4, 2), (128, 8, 3))
    for programs, least in ((4, 1), (8, 1), (8, 2), (16, 1))
]


def median_ms(step: Callable[[], Any], runs: int = 20) -> float:
    """Median milliseconds on the device, after a warm-up."""
    times = []
    for n in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if n >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3


def filled(pattern: S2Pattern, batch: int, length: int, room: int) -> S2Cache:
    """A cache of random keys and values whose sequences are `length` tokens long, written in place: no prompt of that length is needed."""
    cache = S2Cache(pattern, batch, pattern.num_kv_heads, WIDTH, WIDTH, torch.bfloat16, "cuda", capacity=length + room)
    cache.keys.normal_()
    cache.values.normal_()
    cache.device_lengths.fill_(length)
    return cache


def is_right(name: str) -> bool:
    """Mixed lengths against the float64 reference over the same cache."""
    pattern, lengths = S2Pattern(**SHAPES[name]), [3000, 1, 1025, 64]
    cache = S2Cache(pattern, 4, pattern.num_kv_heads, WIDTH, WIDTH, torch.bfloat16, "cuda")
    k, v = (torch.randn(4, 3000, pattern.num_kv_heads, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cache.append(k, v, lengths)
    q = 2 * torch.randn(4, 1, pattern.num_heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    got, want = s2_decode(q, cache, backend="triton").double(), s2_decode(q.double(), cache, backend="reference")
    error = float((got - want).norm() / want.norm())
    print(f"check {name}: {error:.1e}", flush=True)
    return error < TOLERANCE


def measure(name: str, batch: int, length: int, tile: DecodeTile | None = None) -> dict[str, Any]:
    """One row: a step of append and decode over caches of `length` tokens, by replays of a graph; `tile`: instead of the table's."""
    pattern = S2Pattern(**SHAPES[name])
    chosen = kernels.choose_decode
    if tile is not None:
        kernels.choose_decode = lambda *_: tile
    try:
        # Replays append: 40 of them fit into the room.
        caches = [filled(pattern, batch, length, 64)]
        read = caches[0].nbytes
        caches += [filled(pattern, batch, length, 64) for _ in range(min(31, FLUSH // read))]
        q = torch.randn(batch, 1, pattern.num_heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, 1, pattern.num_kv_heads, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def steps(append: bool) -> None:
            for cache in caches:
                if append:
                    cache.append(k, v)
                s2_decode(q, cache, backend="triton")

        for cache in caches:
            cache._seen = [length] * batch
        row: dict[str, Any] = {"shape": name, "batch": batch, "length": length, "read_bytes": read}
        for what, append in (("decode", False), ("step", True)):
            steps(append)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                steps(append)
            row[f"{what}_us"] = 1e3 * median_ms(graph.replay) / len(caches)
    finally:
        kernels.choose_decode = chosen
    row["gb_per_s"] = read / row["decode_us"] / 1e3
    row["us_per_1k"] = row["decode_us"] / (batch * length / 1024)
    return row


def sweep(name: str, batch: int, length: int) -> dict[str, Any] | None:
    """The fastest of the candidates that run, printed with the others."""
    found = []
    for tile in CANDIDATES:
        try:
            row = measure(name, batch, length, tile)
        except Exception as error:  # a candidate may exceed the device in many ways; the others still count
            print(f"  {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        found.append((row["decode_us"], tile))
        print(f"  {row['decode_us']:8.1f} us {row['gb_per_s']:6.0f} GB/s  {tile}", flush=True)
        torch.cuda.empty_cache()
    if not found:
        return None
    best = min(found, key=lambda pair: pair[0])[1]
    block = 64 if SHAPES[name].get("block_size", 128) < 128 else 128
    return {"kernel": "decode", "bytes": 2, "width": WIDTH, "block": block, "length": None, **vars(best)}


def whole_model(lengths: list[int], batches: list[int], overrides: list[str]) -> list[dict[str, Any]]:
    """Milliseconds a token of a whole model with random weights, S2 and dense, as the host sees them: a prompt, then 32 tokens."""
    from train.config.compose import compose
    from train.decoding import Decoder
    from train.engine import parallel
    from train.engine.build import build_model
    from train.trained import alone, start

    rows = []
    size = ["model.layers=24", "model.width=2048", "model.ffn_width=5504", "model.heads=16", "model.kv_heads=8", "model.head_dim=128"]
    size += ["model.vocab_size=32768", "train.precision=bf16", "tracking=none"]
    for attention in (["attention=s2", "attention.stride=8"], ["attention.kind=dense"]):
        for length in lengths:
            config = compose([*size, *attention, f"train.seq_len={length + 64}", *overrides])
            model = build_model(alone(config), start(config), trainable=False)[0].eval()
            for batch in batches:
                prompts = [torch.randint(0, 32768, (length,)).tolist() for _ in range(batch)]
                row: dict[str, Any] = {"attention": config.attention.kind, "batch": batch, "length": length}
                try:
                    with Decoder(model, config, prompts) as decoder:
                        decoder.start()
                        decoder.step([0] * batch)
                        began = time.perf_counter()
                        for _ in range(32):
                            decoder.step([0] * batch)
                        row["ms_per_token"] = (time.perf_counter() - began) / 32 * 1e3
                        row["prompt_ms"] = 1e3 * decoder.speed.prompt_seconds
                except torch.OutOfMemoryError:
                    row["error"] = "out of memory"
                rows.append(row)
                print(row, flush=True)
                torch.cuda.empty_cache()
    parallel.shutdown()
    return rows


def draw(rows: list[dict[str, Any]], rate: float, path: str) -> None:
    """Rates of all rows as bars, the copy rate as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.5))
    axis.barh([f"{row['shape']} x{row['batch']} {row['length'] // 1024}K" for row in rows], [row["gb_per_s"] for row in rows])
    axis.axvline(rate / 1e9, color="black", linewidth=1)
    axis.set_xlabel("GB/s of keys and values read (line: device-to-device copy, read + write)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="decode_bench", help="prefix of the JSON and PNG files")
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tiles", action="store_true", help="measure tile candidates at batch 1 and the middle length")
    parser.add_argument("--write", action="store_true", help="with --tiles: put the fastest into this machine's tile table")
    parser.add_argument("--model", action="store_true", help="measure a whole model too")
    parser.add_argument("overrides", nargs="*", help="with --model: keys of the configuration")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.decode needs a CUDA device", file=sys.stderr)
        return 1
    rate = copy_rate()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_per_s": rate / 1e9}
    print(about, flush=True)
    good = [name for name in args.shapes if is_right(name)]
    for name in set(args.shapes) - set(good):
        print(f"{name}: the result is wrong, no speed is printed")
    if args.tiles:
        best = {}
        for name in good:
            print(f"tiles of {name}, batch 1, {sorted(args.lengths)[len(args.lengths) // 2]} tokens:")
            entry = sweep(name, 1, sorted(args.lengths)[len(args.lengths) // 2])
            if entry:
                best.setdefault(entry["block"], entry)
        if args.write:
            path = tuning.own_file(torch.cuda.get_device_capability())
            tuning.write(path, best.values(), about)
            print(f"written: {path}")
    rows = []
    for name in good:
        for batch in args.batches:
            for length in args.lengths:
                row = measure(name, batch, length)
                row["share_of_copy"] = row["gb_per_s"] * 1e9 / rate
                rows.append(row)
                print(
                    f"{name:18} x{batch:<3} {length:7}  decode {row['decode_us']:8.1f} us  with append {row['step_us']:8.1f} us  "
                    f"{row['gb_per_s']:6.0f} GB/s {row['share_of_copy']:4.0%} of copy  {row['us_per_1k']:7.3f} us per 1K tokens",
                    flush=True,
                )
                torch.cuda.empty_cache()
    model = whole_model(args.lengths, args.batches, args.overrides) if args.model else []
    with open(f"{args.out}.json", "w") as file:
        json.dump({**about, "rows": rows, "model": model}, file, indent=1)
    draw(rows, rate, f"{args.out}.png")
    return 0 if len(good) == len(args.shapes) else 1


if __name__ == "__main__":
    sys.exit(main())
