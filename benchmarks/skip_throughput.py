"""What skipping absent experts saves of a training step: measured, beside what the experts' share of the step allows.

    python -m benchmarks.skip_throughput --out skip.json --figure skip.png      # one GPU, 2.4 B parameters, 8 x 4096 tokens
    python -m benchmarks.skip_throughput --small                                # seconds on a CPU: does it run at all

8 blocks of width 2048, 16 heads, S2 (16 local blocks, stride 16, blocks of 64), 8 experts of inner width 5632, top-2. After --steps
training steps with every expert (a new router spreads tokens evenly, a trained one does not) its weights go into models of a site
that holds 1/2 and 1/4 of the experts; each takes the same steps, and the median of those after the warm-up counts. `mask` holds
half of the experts and gives every token two of them all the same: the control, which must not be quicker than holding all.

The share of the experts in a step at rho = 1 is timed around the modules (events in the stream, forward and backward): the layer
without its router, so dispatch, permutation and multiplication, and the optimiser's part of the expert parameters by their number. A
step of a share f of which scales with what is kept takes 1 - f (1 - rho) of the time. `layer` is the layer, forward and
backward with routing and permutation, beside the grouped multiplication alone on as many tokens an expert.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import provenance
from train.config.compose import compose
from train.config.schema import Config

FULL = {"layers": 8, "width": 2048, "heads": 16, "inner": 5632, "seq": 4096, "rows": 8, "block": 64, "local": 16, "stride": 16}
SMALL = {"layers": 2, "width": 256, "heads": 4, "inner": 128, "seq": 512, "rows": 2, "block": 64, "local": 2, "stride": 4}
EXPERTS, TOP_K = 8, 2
WARM_UP = 3
CASES = (("rho = 1", 1, "full"), ("rho = 1/2", 2, "skip"), ("rho = 1/4", 4, "skip"), ("mask, rho = 1/2", 2, "mask"))
"""Name, sites of which this is one (each expert at one of them), mode."""


def configuration(size: dict[str, int], sites: int, mode: str, precision: str) -> Config:
    """One site of `sites` that hold the experts between them."""
    federation = [f"federation.sites={sites}", "federation.replication=1", "federation.site=0"] if sites > 1 else []
    config = compose(
        [
            "model=gpt_1b", "attention=s2", "moe=mixtral", "data=demo", "parallel=single", "tracking=none", f"train.precision={precision}",
            f"model.layers={size['layers']}", f"model.width={size['width']}", f"model.heads={size['heads']}",
            f"attention.block_size={size['block']}", f"attention.local_blocks={size['local']}", f"attention.stride={size['stride']}",
            f"moe.experts={EXPERTS}", f"moe.top_k={TOP_K}", f"moe.ffn_width={size['inner']}", f"moe.mode={mode}", "model.vocab_size=257",
            f"train.seq_len={size['seq']}", f"train.micro_batch={size['rows']}", f"train.global_batch={size['rows']}", *federation,
        ]
    )  # fmt: skip
    model = replace(config.model, kv_heads=config.model.heads, head_dim=size["width"] // size["heads"], ffn_width=size["inner"])
    return replace(config, model=model)


class Training:
    """The engine in a world of one, on the rows of the demo corpus."""

    def __init__(self, config: Config, ranks: Any, weights: dict[str, torch.Tensor] | None) -> None:
        """`weights`: by name, of a model with every expert; None: new ones."""
        from benchmarks.quick_model import build_model
        from moe.load import ExpertLoad
        from train.data.dataset import BatchSource
        from train.data.tokenizer import load_tokenizer
        from train.engine.build import build_optimizer
        from train.engine.checkpoint import unwrap

        self.config, self.ranks = config, ranks
        self.chunks = build_model(config, ranks)
        self.model = unwrap(self.chunks[0])
        if weights is not None:
            self._take(weights)
        self.optimizer = build_optimizer(config, ranks, self.chunks)
        self.load = ExpertLoad([self.model], config.model.layers, EXPERTS)
        train = config.train
        self._source = BatchSource(config.data, load_tokenizer("byte"), train.seq_len, train.seed, "train")
        self._step = 0

    @torch.no_grad()
    def _take(self, weights: dict[str, torch.Tensor]) -> None:
        experts = {name: module.global_experts for name, module in self.model.named_modules() if hasattr(module, "global_experts")}
        for name, parameter in self.model.named_parameters():
            held = experts.get(name.rpartition(".")[0])
            parameter.copy_(weights[name] if held is None else weights[name][list(held)])

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of all weights on the host."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}

    def step(self, lr: float = 3e-4) -> float:
        """One optimiser step; its seconds."""
        from train.engine.step import train_step

        train, device = self.config.train, self.ranks.device
        batch = self._source.rows(self._source.sample_ids(self._step, train.global_batch))
        batch = replace(replace(batch, cu_seqlens=None).to(device), cu_seqlens=None)
        self._step += 1
        synchronize(device)
        started = time.perf_counter()
        train_step(
            self.chunks, self.optimizer, lambda: iter([batch]), self.ranks,
            micro_batches=1, rows=train.micro_batch, seq_len=train.seq_len, lr=lr,
        )  # fmt: skip
        synchronize(device)
        return time.perf_counter() - started

    def parameters(self) -> tuple[int, int]:
        """Numbers held: all, and those of experts."""
        named = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        return sum(named.values()), sum(count for name, count in named.items() if ".mlp.experts." in name)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Times stretches on the device by name: events in its stream, or the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: dict[Any, Any] = {}
        self._closed: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, key: Any) -> None:
        """Begin the stretch `key`."""
        self._open[key] = self._now()

    def stop(self, key: Any, name: str) -> None:
        """End the stretch `key`, which counts for `name`."""
        self._closed.append((name, self._open.pop(key), self._now()))

    def milliseconds(self) -> dict[str, float]:
        """Totals by name."""
        totals: dict[str, float] = {}
        for name, start, end in self._closed:
            spent = start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            totals[name] = totals.get(name, 0.0) + spent
        return totals


@contextmanager
def watched(training: Training, watch: Stopwatch) -> Iterator[None]:
    """Time the layers with experts, their routers and experts, forward and backward, and the optimiser."""
    from moe.megatron import SiteMoELayer, SiteRouter
    from moe.megatron_experts import GroupedSwiGLUExperts

    handles = []
    for module in training.model.modules():
        name = {SiteMoELayer: "layer", SiteRouter: "router", GroupedSwiGLUExperts: "experts"}.get(type(module))
        if name is None:
            continue
        handles += [
            module.register_forward_pre_hook(lambda m, *_: watch.start((m, "forward"))),
            module.register_forward_hook(lambda m, *_, name=name: watch.stop((m, "forward"), name)),
            module.register_full_backward_pre_hook(lambda m, *_: watch.start((m, "backward"))),
            module.register_full_backward_hook(lambda m, *_, name=name: watch.stop((m, "backward"), name)),
        ]
    stepped = training.optimizer.step_with_ready_grads

    def timed() -> Any:
        watch.start("optimizer")
        result = stepped()
        watch.stop("optimizer", "optimizer")
        return result

    training.optimizer.step_with_ready_grads = timed
    try:
        yield
    finally:
        training.optimizer.step_with_ready_grads = stepped
        for handle in handles:
            handle.remove()


def shares(training: Training, steps: int) -> dict[str, float]:
    """Milliseconds of a step's parts, means over `steps`, and the share of the step that scales with the experts kept."""
    watch = Stopwatch(training.ranks.device)
    with watched(training, watch):
        seconds = [training.step() for _ in range(steps)]
    synchronize(training.ranks.device)
    spent = {name: total / steps for name, total in watch.milliseconds().items()}
    everything, of_experts = training.parameters()
    step = statistics.mean(seconds) * 1e3
    scaling = spent["layer"] - spent["router"] + spent["optimizer"] * of_experts / everything
    return {"step": step, **spent, "scaling": scaling, "share": scaling / step}


def grouped_alone(config: Config, device: torch.device, repeats: int) -> float:
    """Milliseconds of the grouped multiplication of one layer, forward and backward, on an even load."""
    from moe.experts import grouped_experts

    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    tokens = config.train.micro_batch * config.train.seq_len * TOP_K
    width, inner = config.model.width, config.moe.ffn_width or 0
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    w_in = torch.randn(EXPERTS, 2 * inner, width, device=device, dtype=dtype, requires_grad=True)
    w_out = torch.randn(EXPERTS, width, inner, device=device, dtype=dtype, requires_grad=True)
    counts = torch.full((EXPERTS,), tokens // EXPERTS, device=device)
    grad = torch.randn(tokens, width, device=device, dtype=dtype)

    def work() -> None:
        grouped_experts(x, counts, w_in, w_out).backward(grad)

    return median_milliseconds(work, device, repeats)


def median_milliseconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median time of `work` after two calls that do not count."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3


def measure(size: dict[str, int], precision: str, learn: int, steps: int) -> dict[str, Any]:
    """All cases; prints a line each."""
    from train.engine import parallel

    first = configuration(size, 1, "full", precision)
    ranks = parallel.build_ranks(first, parallel.init_process_group(first.train.timeout))
    training = Training(first, ranks, None)
    for _ in range(learn):
        training.step()
    weights = training.weights()
    parts = shares(training, steps)
    del training
    rows: list[dict[str, Any]] = []
    for name, sites, mode in CASES:
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        training = Training(configuration(size, sites, mode, precision), ranks, weights)
        times = [training.step() for _ in range(WARM_UP + steps)]
        figures = training.load.figures()
        median = statistics.median(times[WARM_UP:]) * 1e3
        rho = 1.0 if mode == "mask" else 1 / sites
        base = rows[0]["ms"] if rows else median
        row = {
            "name": name,
            "ms": median,
            "speed_up": base / median,
            "model": 1 / (1 - parts["share"] * (1 - rho)),
            "model_by_skip_rate": 1 / (1 - parts["share"] * figures["skip_rate"]),
            "skip_rate": figures["skip_rate"],
            "none_resident": figures["none_resident"],
            "entropy": figures["expert_entropy"],
            "parameters": training.parameters()[0],
        }
        rows.append(row)
        modelled = f"model {row['model']:5.2f}x, by skip rate {row['model_by_skip_rate']:5.2f}x"
        routed = f"skipped {row['skip_rate']:6.1%}  no expert {row['none_resident']:6.1%}  entropy {row['entropy']:.3f}"
        print(f"{name:16} {row['ms']:9.1f} ms  {row['speed_up']:5.2f}x  {modelled}  {routed}", flush=True)
        del training
    alone = grouped_alone(first, ranks.device, steps)
    layer = parts["layer"] / size["layers"]
    print(
        f"experts' share of the step {parts['share']:.1%}: layers {parts['layer']:.1f} ms without routers {parts['router']:.1f} ms, "
        f"optimiser {parts['optimizer']:.1f} ms\n"
        f"one layer with routing {layer:.2f} ms, its grouped multiplication alone {alone:.2f} ms: {alone / layer:.1%} of its rate"
    )
    return {"rows": rows, "parts_ms": parts, "layer_ms": layer, "grouped_alone_ms": alone, "layer_rate": alone / layer}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Measured step times as bars, the model as a mark on each."""
    from train.report.style import BLACK, BLUE, figure, save, tidy

    drawn = figure(7.0, 3.2)
    axes = drawn.add_subplot()
    places = range(len(rows))
    axes.barh(places, [row["ms"] for row in rows], height=0.55, color=BLUE, label="measured")
    axes.plot([rows[0]["ms"] / row["model"] for row in rows], places, "|", color=BLACK, markersize=18, label="model")
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    tidy(axes, "Step time of a site that skips absent experts", x="milliseconds")
    axes.legend(fontsize=9, frameon=False)
    save(drawn, path)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, also on a CPU, where it is in fp32")
    parser.add_argument("--learn", type=int, help="training steps before measuring; 200, small 4")
    parser.add_argument("--steps", type=int, help="measured steps; 20, small 3")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        raise SystemExit("skip_throughput: the full size needs a CUDA device; use --small")
    from train.worker import quiet_dependencies

    quiet_dependencies()
    small = arguments.small
    learn = arguments.learn if arguments.learn is not None else 4 if small else 200
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    result = measure(SMALL if small else FULL, precision, learn, arguments.steps or (3 if small else 20))
    if arguments.figure is not None:
        draw(result["rows"], arguments.figure)
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps({**provenance(), "size": SMALL if small else FULL, "learned_steps": learn, **result}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
