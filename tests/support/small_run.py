"""A whole run of the training loop inside a rank of a pool: data, tracker, checkpoints, and faults injected into steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from small_engine import Piece, pieces, small_config

from train.config.schema import Config
from train.data.indexed import IndexedWriter

PILLARS = {"train.eval_steps": 0, "train.global_batch": 4, "model.vocab_size": 257, "data.validation": 0.2}


def run_config(corpus: str, changes: Mapping[str, Any] | None = None) -> Config:
    """`small_config` on the data set `corpus`, four rows a step, no evaluation."""
    return small_config({**PILLARS, "data.paths": [corpus], **(changes or {})})


def phrases(prefix: Path) -> str:
    """Write an indexed data set of 120 documents of 20 to 300 bytes, each a phrase of its own said again and again; its prefix."""
    rng = np.random.default_rng(5)
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        for _ in range(120):
            phrase = rng.integers(97, 123, size=rng.integers(3, 12))
            writer.add_document(np.append(np.resize(phrase, rng.integers(20, 300)), 256))
        writer.finish(f"{prefix}.idx")
    return str(prefix)


@dataclass
class Lines:
    """A tracker that keeps what it is given."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    status: str = ""

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))

    def finish(self, status: str) -> None:
        self.status = status


@dataclass
class Outcome:
    """What a run left on one rank."""

    lines: list[dict[str, Any]]
    status: str
    progress: dict[str, int]
    state: list[Piece]
    error: str | None = None


@contextmanager
def faults(at: Mapping[int, str], rank: int) -> Iterator[None]:
    """Spoil rank `rank`'s steps (counted from 1): `nan` or `inf` in the loss, or `gradient`: one NaN in one gradient of a weight there."""
    from train.engine import step as module

    original = module._loss
    state = {"step": 0}
    run = module.run_micro_batches

    def counted(chunks: list[Any], *args: Any, train: bool, **kwargs: Any) -> Any:
        state["step"] += train
        sums = run(chunks, *args, train=train, **kwargs)
        if train and at.get(state["step"]) == "gradient" and dist.get_rank() == rank:
            parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
            parameters[-1].main_grad.view(-1)[0] = float("nan")
            # With the distributed optimiser a rank owns a part of the buffer only: spoil that.
            for chunk in chunks:
                for buffer in chunk.buffers:
                    shard = buffer.grad_data.chunk(buffer.data_parallel_world_size)[dist.get_rank(buffer.data_parallel_group)]
                    shard[0] = float("nan")
        return sums

    def spoiled(batch: Any, sums: Any, losses: Any) -> Any:
        kind = at.get(state["step"])
        if kind in ("nan", "inf") and dist.get_rank() == rank:
            losses = losses * float(kind)
        return original(batch, sums, losses)

    module._loss, module.run_micro_batches = spoiled, counted  # type: ignore[assignment]
    try:
        yield
    finally:
        module._loss, module.run_micro_batches = original, run


def run(config: Config, run_dir: str, resumed: bool = False, at: Mapping[int, str] | None = None, rank: int = 0) -> Outcome:
    """One run of the loop on this rank; a RuntimeError becomes `error`."""
    from train import loop
    from train.engine import parallel

    ranks = parallel.build_ranks(config, parallel.init_process_group(120.0))
    tracker = Lines()
    trainer: dict[str, Any] = {}
    original = loop.Trainer.__init__

    def remember(self: Any, *args: Any) -> None:
        original(self, *args)
        trainer["it"] = self

    loop.Trainer.__init__ = remember  # type: ignore[method-assign]
    error = None
    try:
        with faults(at or {}, rank):
            loop.pretrain(config, Path(run_dir), 1, resumed, ranks, tracker)
    except loop.TrainingStopped as stopped:
        error = str(stopped)
    finally:
        loop.Trainer.__init__ = original  # type: ignore[method-assign]
    it = trainer["it"]

    class Held:
        chunks, optimizer = it.chunks, it.optimizer

    return Outcome(tracker.lines, tracker.status, dict(vars(it.progress)), pieces(Held), error)  # type: ignore[arg-type]
