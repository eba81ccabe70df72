"""How long a checkpoint holds training up, written in the background and not, for a 1.3 B-parameter model on one GPU.

    python -m benchmarks.save_stall --out save_stall.json
    python -m benchmarks.save_stall --layers 2 --width 128 --seq 64 --rows 1 --cpu     # does it run at all

Printed: the step without a save; the step while a checkpoint is written in the background; the stall, that is what the steps
from the start of a save to its end take beyond as many ordinary steps, the copy to host memory included; the same for a save that
training waits for; each also as a share of a step when one step in 100 saves. The first save in the background also gets the
page-locked memory that later ones use again, so it is reported apart.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from train.config.compose import compose
from train.config.schema import Config

EVERY = 100
"""Steps between saves that the shares are given for."""


def configuration(arguments: argparse.Namespace) -> Config:
    """The model of `benchmarks.step`, or a small one."""
    config = compose(
        [
            "model=gpt_1b", "attention=dense", "model.vocab_size=32768", "parallel=single", "tracking=none",
            f"model.layers={arguments.layers}", f"model.width={arguments.width}", f"model.heads={max(1, arguments.width // 128)}",
            f"train.seq_len={arguments.seq}", f"train.micro_batch={arguments.rows}", f"train.global_batch={arguments.rows}",
        ]
    )  # fmt: skip
    model = replace(config.model, kv_heads=config.model.heads, head_dim=config.model.width // config.model.heads)
    return replace(config, model=replace(model, ffn_width=min(model.ffn_width or 0, 4 * arguments.width)))


class Training:
    """The engine in a world of one, stepping on made-up tokens."""

    def __init__(self, config: Config) -> None:
        from train.engine import parallel
        from train.engine.build import build_model, build_optimizer

        self.config = config
        self.ranks = parallel.build_ranks(config, parallel.init_process_group(config.train.timeout))
        self.chunks = build_model(config, self.ranks)
        self.optimizer = build_optimizer(config, self.ranks, self.chunks)
        self.parameters = sum(weight.numel() for chunk in self.chunks for weight in chunk.parameters())

    def step(self) -> float:
        """One step; its seconds."""
        from train.data.dataset import Batch
        from train.engine.step import train_step

        rows, seq, device = self.config.train.micro_batch, self.config.train.seq_len, self.ranks.device
        tokens = torch.randint(self.config.model.vocab_size or 0, (rows, seq + 1), device=device)
        positions = torch.arange(seq, device=device).expand(rows, seq)
        mask = torch.ones(rows, seq, device=device)
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions, None, [], 1.0)
        started = time.perf_counter()
        train_step(
            self.chunks, self.optimizer, lambda: iter([batch]), self.ranks, micro_batches=1, rows=rows, seq_len=seq, lr=3e-4
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def background(training: Training, saver: Any, number: int, ordinary: float) -> dict[str, float]:
    """One save in the background, with steps until it is complete."""
    began = time.perf_counter()
    saver.start(number, training.chunks, training.optimizer, {}, lambda: None)
    held = time.perf_counter() - began
    times = []
    while saver.state == "writing":
        times.append(training.step())
    saver.finish()
    whole = time.perf_counter() - began
    steps = statistics.median(times) if times else ordinary
    stall = held + sum(seconds - ordinary for seconds in times)
    return {"held_ms": held * 1e3, "step_ms": steps * 1e3, "stall_ms": stall * 1e3, "write_seconds": whole, "steps": len(times)}


def foreground(work: Callable[[], Any]) -> dict[str, float]:
    """A save that training waits for."""
    began = time.perf_counter()
    work()
    return {"stall_ms": (time.perf_counter() - began) * 1e3}


def share(row: dict[str, float], ordinary: float) -> float:
    """The stall spread over `EVERY` steps, as a share of a step."""
    return row["stall_ms"] / 1e3 / EVERY / ordinary


def add(rows: dict[str, dict[str, float]], name: str, row: dict[str, float], ordinary: float) -> None:
    """Note a save and print it at once: the next may take minutes."""
    row["share_of_a_step"] = share(row, ordinary)
    rows[name] = row
    extra = ""
    if "held_ms" in row:
        steps = f"{row['steps']:.0f} steps of {row['step_ms']:.1f} ms"
        extra = f" (held {row['held_ms']:.0f} ms, then {steps}; written in {row['write_seconds']:.1f} s)"
    line = f"{name:18} stall {row['stall_ms']:9.1f} ms = {row['share_of_a_step']:7.2%} of a step at one save in {EVERY} steps{extra}"
    print(line, flush=True)


def measure(config: Config, folder: Path, steps: int, saves: int) -> dict[str, Any]:
    """All figures; prints them."""
    from train.engine import checkpoint

    training = Training(config)
    for _ in range(3):
        training.step()
    ordinary = statistics.median(training.step() for _ in range(steps))
    print(f"{training.parameters:,} parameters; a step without a save {ordinary * 1e3:.1f} ms", flush=True)
    saver = checkpoint.BackgroundSaver(folder)
    rows: dict[str, dict[str, float]] = {}
    for number in range(saves + 1):
        row = background(training, saver, number, ordinary)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder)
        if number == 0:
            print(f"a checkpoint is {size / 2**30:.2f} GiB", flush=True)
        add(rows, "background, first" if number == 0 else f"background {number}", row, ordinary)
    add(rows, "foreground", foreground(lambda: checkpoint.save(folder, 99, training.chunks, training.optimizer, {})), ordinary)
    return {"parameters": training.parameters, "step_ms": ordinary * 1e3, "checkpoint_gib": size / 2**30, "every": EVERY, "rows": rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8, help="ordinary steps that are measured")
    parser.add_argument("--saves", type=int, default=1, help="saves in the background after the first")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written and deleted again; default: the temporary folder")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, to see that it runs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.cpu:
        parser.error("there is no CUDA device; --cpu runs a small model to see that it works")
    from train.worker import quiet_dependencies

    quiet_dependencies()
    folder = Path(tempfile.mkdtemp(prefix="save-stall-", dir=arguments.dir))
    try:
        result = measure(configuration(arguments), folder / "checkpoints", arguments.steps, arguments.saves)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"device": device, "torch": torch.__version__, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
