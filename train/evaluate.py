"""The validation loss of a trained run: `leantron evaluate <run>`.

One process, whatever layout the run was trained in, on the global batches that the run itself validates on. Of a run over several
sites the merged model is evaluated, and beside it each site's sliced model: the merged weights without the experts that the site does
not hold, so that the gap between the two is what skipping those experts costs.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.checkpoint.directory import manifest_of
from train.config.check import check
from train.config.compose import compose, load_config, write_atomic
from train.config.convert import known_keys
from train.config.errors import ConfigError
from train.config.place import CONFIG_FILE
from train.config.resume import get, put
from train.config.schema import Config
from train.federation.residency import residency_plan
from train.trained import alone, find, is_spread, load_chunks, start

RESULT_FILE = "evaluation.json"
"""Name of the file in the run's directory that keeps the last evaluation."""
MAY_CHANGE = ("data.", "train.eval_steps", "train.micro_batch", "train.global_batch", "attention.backend")


@dataclass(frozen=True, kw_only=True)
class SiteResult:
    """What a site's sliced model reaches."""

    site: int
    experts: list[int]
    """Experts that the site holds in each Mixture-of-Experts block, their number."""
    val_loss: float
    val_bits_per_byte: float
    gap_bits_per_byte: float
    """Bits per byte over the merged model's."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run's model reaches. Losses in nats a token."""

    run: str
    checkpoint: str
    step: int
    eval_steps: int
    """Global batches."""
    val_loss: float
    val_bits_per_byte: float
    bigram_bits_per_byte: float | None
    """Entropy of the demo corpus when only the last byte is known; None for other data."""
    sites: list[SiteResult] | None
    """The sliced models of a run whose sites do not hold all experts; None for any other."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError for a run or a setting that cannot be used."""
    parser = argparse.ArgumentParser(prog="leantron evaluate", description="Validation loss of a run's model, in one process.")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("overrides", nargs="*", help=f"other data or batches: keys {', '.join(MAY_CHANGE)}")
    parser.add_argument("--steps", type=int, help="global batches to evaluate on (default: the run's train.eval_steps)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest complete one)")
    parser.add_argument("--json", action="store_true", help=f"print what goes to <run>/{RESULT_FILE}, and nothing else")
    arguments = parser.parse_intermixed_args(list(argv))
    overrides = [*arguments.overrides, *([f"train.eval_steps={arguments.steps}"] if arguments.steps is not None else [])]
    result = evaluate_run(arguments.run, overrides, arguments.step)
    from train.engine import parallel

    parallel.shutdown()
    text = json.dumps(asdict(result), indent=2)
    if arguments.json:
        print(text)
    else:
        show(result)
    try:
        write_atomic(arguments.run / RESULT_FILE, text + "\n")
    except OSError as error:
        raise ConfigError("run", arguments.run, f"the result cannot be kept there ({error.strerror})", "make it writable") from error
    return 0


def evaluate_run(run: Path, overrides: Sequence[str] = (), step: int | None = None) -> Result:
    """Evaluate the newest complete checkpoint of a run, or the one of `step`. Raises ConfigError.

    This process stays in the world of one that it starts, or that it is in: `parallel.shutdown` leaves it.
    """
    config, path = find(run, step)
    config = check(alone(with_overrides(config, overrides)), 1)
    if not config.train.eval_steps:
        raise ConfigError("train.eval_steps", 0, "an evaluation has at least one global batch", "give --steps")
    whole = load_config(run / CONFIG_FILE)
    ranks = start(config)
    batches = _batches(config, ranks.device)
    loss, bits = _evaluate(config, path, ranks, batches)
    sites = _evaluate_sites(whole, config, path, ranks, batches, bits)
    return Result(
        run=str(run),
        checkpoint=str(path),
        step=int(manifest_of(path)["step"]),
        eval_steps=config.train.eval_steps,
        val_loss=loss,
        val_bits_per_byte=bits,
        bigram_bits_per_byte=_reference(config),
        sites=sites,
    )


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """A run's configuration with what an evaluation may change. Raises ConfigError for anything else."""
    asked = compose(overrides)
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in known_keys():
        if key not in named and key.partition(".")[0] not in named:
            continue
        if not key.startswith(MAY_CHANGE):
            raise ConfigError(
                key, get(asked, key), "an evaluation takes the run's own", f"leave it out; it may change {', '.join(MAY_CHANGE)}"
            )
        config = put(config, key, get(asked, key))
    return config


def sliced_config(whole: Config, config: Config, site: int) -> Config:
    """The configuration of a site's model for evaluation: its experts by the run's plan, the others skipped (or masked, as in training)."""
    mode = "mask" if whole.moe.mode == "mask" else "skip"
    gate = whole.moe.gate if whole.moe.mode == "skip" else "full"
    return replace(config, federation=replace(whole.federation, site=site), moe=replace(whole.moe, mode=mode, gate=gate))


def _evaluate_sites(
    whole: Config, config: Config, path: Path, ranks: Any, batches: Callable[[int], Callable[[], Iterator[Any]]], merged: float
) -> list[SiteResult] | None:
    plan = residency_plan(whole) if is_spread(whole) else None
    if plan is None or plan.replication == plan.sites:
        return None
    results = []
    for site in range(plan.sites):
        loss, bits = _evaluate(sliced_config(whole, config, site), path, ranks, batches)
        counts = [len(plan.resident(site, layer)) for layer in plan.layers]
        results.append(SiteResult(site=site, experts=counts, val_loss=loss, val_bits_per_byte=bits, gap_bits_per_byte=bits - merged))
    return results


def _batches(config: Config, device: Any) -> Callable[[int], Callable[[], Iterator[Any]]]:
    """The micro-batches of each validation step: what `train.engine.step.evaluate` takes."""
    from train.data.dataset import BatchSource
    from train.data.tokenizer import load_tokenizer
    from train.loop import on_device

    train = config.train
    source = BatchSource(config.data, load_tokenizer(config.data.tokenizer), train.seq_len, train.seed, "validation")

    def of_step(step: int) -> Callable[[], Iterator[Any]]:
        ids = source.sample_ids(step, train.global_batch)
        rows = [on_device(source.rows(ids[at : at + train.micro_batch]), device) for at in range(0, len(ids), train.micro_batch)]
        return lambda: iter(rows)

    return of_step


def _evaluate(config: Config, path: Path, ranks: Any, batches: Callable[[int], Callable[[], Iterator[Any]]]) -> tuple[float, float]:
    """(Nats a token, bits per byte) of one model."""
    from train.engine.step import evaluate

    train = config.train
    return evaluate(
        load_chunks(config, path, ranks),
        batches,
        ranks,
        steps=train.eval_steps,
        micro_batches=train.global_batch // train.micro_batch,
        rows=train.micro_batch,
        seq_len=train.seq_len,
    )


def _reference(config: Config) -> float | None:
    from train.data.tokenizer import load_tokenizer
    from train.loop import bigram_reference

    return bigram_reference(config, load_tokenizer(config.data.tokenizer)).get("bigram_bits_per_byte")


def show(result: Result) -> None:
    """Print the table, or the one line of a run of one model."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    bigram = f", bigram entropy of the data {result.bigram_bits_per_byte:.4f}" if result.bigram_bits_per_byte is not None else ""
    of = f"{result.run}: step {result.step}, {result.eval_steps} global batches"
    if result.sites is None:
        console.print(f"{of}: validation loss {result.val_loss:.4f}, {result.val_bits_per_byte:.4f} bits per byte{bigram}")
        return
    console.print(f"{of}{bigram}")
    table = Table(box=None, pad_edge=False)
    for name in ("model", "experts a block", "loss", "bits per byte", "gap"):
        table.add_column(name, justify="left" if name == "model" else "right")
    table.add_row("merged", "all", f"{result.val_loss:.4f}", f"{result.val_bits_per_byte:.4f}", "")
    for each in result.sites:
        counts = f"{min(each.experts)}" if len(set(each.experts)) == 1 else f"{min(each.experts)} to {max(each.experts)}"
        row = (
            f"site {each.site}, sliced",
            counts,
            f"{each.val_loss:.4f}",
            f"{each.val_bits_per_byte:.4f}",
            f"{each.gap_bits_per_byte:+.4f}",
        )
        table.add_row(*row)
    console.print(table)
    console.print("gap: bits per byte over the merged model, the cost of skipping the experts that a site does not hold")
