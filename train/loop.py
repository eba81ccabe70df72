"""The training loop: data, steps, evaluation, checkpoints and figures of one run, on every rank.

All decisions that ranks must share (skip a bad step, stop, save) follow from numbers that are already equal on all of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.checkpoint.directory import CHECKPOINTS, checkpoint_path, manifest_of, newest_complete
from train.checkpoint.identity import data_differences
from train.config.place import write_status
from train.config.schema import Config
from train.data.dataset import Batch, BatchSource
from train.data.entropy import bigram_bits_per_byte
from train.data.tokenizer import load_tokenizer
from train.engine import checkpoint
from train.engine.build import build_model, build_optimizer
from train.engine.layout import ParallelLayout
from train.engine.offload import exposed_seconds
from train.engine.parallel import Ranks
from train.engine.step import StepResult, evaluate, train_step
from train.optim import learning_rate
from train.preemption import NeverStop, StopRequest
from train.saving import Checkpoints
from train.tracking.build import build_trackers
from train.tracking.flops import UtilisationMeter
from train.tracking.identity import keep_identity, stored_identity
from train.tracking.protocol import NullTracker, Tracker
from train.watchdog import NoWatchdog, Watchdog
from train.worker import Hopeless


class TrainingStopped(Hopeless):
    """The run cannot go on; the message says why and what to change."""


@dataclass
class Progress:
    """Where the run stands; stored in each checkpoint."""

    step: int = 0
    """Optimiser steps taken or skipped."""
    tokens: int = 0
    """Valid target tokens seen."""
    skipped: int = 0
    """Steps skipped for a NaN or infinite loss or gradient."""
    skipped_in_a_row: int = 0
    """Of these, the ones since the last good step."""


@dataclass
class Clock:
    """Seconds of the parts of a step, since the last log line."""

    parts: dict[str, float] = field(default_factory=dict)
    watchdog: Watchdog = field(default_factory=NoWatchdog)
    step: int = 0

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Call `work` and add its wall time, device work included, to `<name>_seconds`; the watchdog knows where we are."""
        self.watchdog.at(name, self.step)
        started = time.perf_counter()
        result = work()
        self.parts[f"{name}_seconds"] = self.parts.get(f"{name}_seconds", 0.0) + time.perf_counter() - started
        return result

    def take(self) -> dict[str, float]:
        """Return the parts and start again at zero."""
        parts, self.parts = self.parts, {}
        return parts


class Trainer:
    """One run on one rank, from built model to last checkpoint."""

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks, tracker: Tracker, stop: StopRequest, watchdog: Watchdog) -> None:
        self.config, self.run_dir, self.ranks, self.tracker, self.stop = config, run_dir, ranks, tracker, stop
        self.layout = ParallelLayout.build(config, ranks.world)
        self.micro_batches = self.layout.micro_batches(config)
        tokenizer = load_tokenizer(config.data.tokenizer)
        self.source = BatchSource(config.data, tokenizer, config.train.seq_len, config.train.seed, "train")
        self.validation = (
            BatchSource(config.data, tokenizer, config.train.seq_len, config.train.seed, "validation") if config.train.eval_steps else None
        )
        self.reference = bigram_reference(config, tokenizer) if ranks.is_first else {}
        self.chunks = build_model(config, ranks)
        self.optimizer = build_optimizer(config, ranks, self.chunks)
        self.progress = Progress()
        self.checkpoints = Checkpoints(config, run_dir, ranks)
        watchdog.also = lambda: self.checkpoints.under_way
        self.clock = Clock(watchdog=watchdog)
        self.federation = self._federation(watchdog)
        self.load = self._expert_load()
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else None
        self.meter = UtilisationMeter(config, ranks.world, device)

    def _expert_load(self) -> Any:
        if not self.config.moe.experts:
            return None
        from moe.load import ExpertLoad

        return ExpertLoad([checkpoint.unwrap(chunk) for chunk in self.chunks], self.config.model.layers, self.config.moe.experts)

    def _federation(self, watchdog: Watchdog) -> Any:
        if self.config.federation.sites == 1:
            return None
        from train.federation.run import Federation

        probe = self._probe_batches()
        return Federation(self.config, self.checkpoints.directory, self.ranks, self.chunks, self.optimizer, watchdog, probe)

    def _probe_batches(self) -> list[Batch]:
        from train.federation.probe import probe_rows

        source = self.source if self.validation is None else self.validation
        rows = probe_rows(self.config)
        ids = source.sample_ids(0, rows) if rows else []
        return [on_device(source.rows([number]), self.ranks.device) for number in ids]

    def begin(self, resumed: bool) -> None:
        """Get to where the run stands: from a checkpoint when it goes on, and up to date with the other sites when there are some."""
        if resumed:
            self.resume()
        if self.federation is not None:
            other = self.federation.start(self.progress)
            if other is not None:
                self._load(checkpoint_path(self.checkpoints.directory, other))
            self.federation.join(self.progress)
            if self.progress.step >= self.config.train.steps and self.checkpoints.saved_step < self.progress.step:
                self.save(last=True)  # the others were at their last step

    def resume(self) -> None:
        """Go on from the newest complete checkpoint of the run, if there is one; incomplete ones are passed over with a word."""
        path = self.checkpoints.newest()
        if path is None:
            self._say(f"{self.checkpoints.directory}: there is no complete checkpoint, so the run begins at its first step")
            return
        self._load(path)

    def _load(self, path: Path) -> None:
        outer = None
        if self.federation is not None:
            outer = self.federation.keeper
            outer.expect(path, manifest_of(path)["progress"].get("federation"))
        stored = checkpoint.load(path, self.chunks, self.optimizer, outer)
        differences = data_differences(stored["data"], self.source.fingerprint())
        if differences:
            raise TrainingStopped(
                f"{path}: it was trained on other data ({'; '.join(differences)}); give back the data sets of that run, or start a new one"
            )
        self.progress = Progress(**stored["progress"])
        if self.federation is not None:
            self.federation.loaded(stored["federation"])
        self.checkpoints.saved_step = self.progress.step
        self._say(f"going on from {path}")
        self._warn_of_schedule(stored["steps"])

    def _warn_of_schedule(self, before: int) -> None:
        now, optim, step = self.config.train.steps, self.config.optim, self.progress.step + 1
        if before == now:
            return
        old, new = learning_rate(optim, step, before), learning_rate(optim, step, now)
        self._say(
            f"train.steps={now}: warning: the run had {before}, and the schedule {optim.schedule} changes with it: "
            f"the learning rate of step {step} is {new:.4g}, where it would have been {old:.4g}"
        )

    def _say(self, line: str) -> None:
        if self.ranks.is_first:
            print(line, flush=True)

    def run(self) -> bool:
        """Train from the current step to the last one; False when asked to stop before. Raises Hopeless when it cannot go on."""
        train = self.config.train
        started = time.perf_counter()
        logged_step, logged_tokens = self.progress.step, self.progress.tokens
        stopping = False
        while self.progress.step < train.steps and not stopping:
            result, lr = self._step()
            stopping, written = result.flags
            step = self.progress.step
            if self.federation is not None and self.federation.due(step):
                self.clock.time("outer", partial(self.federation.after_step, self.progress, stopping))
                # A site that was behind goes on at the others' step.
                logged_step, step = logged_step + self.progress.step - step, self.progress.step
            if self.federation is not None and stopping:
                self.federation.stop_waiting_for_us()
            if step % train.log_every == 0 or step == train.steps or stopping or not result.updated:
                elapsed = time.perf_counter() - started
                steps, tokens = step - logged_step, self.progress.tokens - logged_tokens
                self.checkpoints.note("step_seconds", elapsed / steps)
                self.tracker.log(self._figures(result, lr, elapsed / steps, tokens / elapsed))
                started, logged_step, logged_tokens = time.perf_counter(), step, self.progress.tokens
            self._stop_if_hopeless(result)
            last = step == train.steps
            if self.validation is not None and (last or (train.eval_every and step % train.eval_every == 0 and not stopping)):
                self._evaluate()
                started, logged_step, logged_tokens = time.perf_counter(), step, self.progress.tokens
            every = self.config.checkpoint.every
            turned = self.federation is not None and self.federation.wants_save
            if last or stopping or (every and (step % every == 0 or turned)):
                self.clock.time("checkpoint", partial(self.save, last=last or stopping))
            elif written:
                self.clock.time("checkpoint", self.checkpoints.finish)
        self.clock.watchdog.at("the end", self.progress.step)
        return self.progress.step >= train.steps

    def _step(self) -> tuple[StepResult, float]:
        progress, train = self.progress, self.config.train
        self.clock.step = progress.step + 1
        lr = learning_rate(self.config.optim, progress.step + 1, train.steps)
        site = self.config.federation.site or 0
        batches = self.clock.time("data", lambda: self._micro_batches(self.source, progress.step, site))
        result = self.clock.time(
            "compute",
            lambda: train_step(
                self.chunks,
                self.optimizer,
                lambda: iter(batches),
                self.ranks,
                micro_batches=self.micro_batches,
                rows=train.micro_batch,
                seq_len=train.seq_len,
                lr=lr,
                flags=(bool(self.stop), self.checkpoints.ended),
            ),
        )
        progress.step += 1
        progress.tokens += result.tokens
        if self.federation is not None:
            self.federation.count(result.tokens)
        progress.skipped += not result.updated
        progress.skipped_in_a_row = 0 if result.updated else progress.skipped_in_a_row + 1
        return result, lr

    def _micro_batches(self, source: BatchSource, step: int, site: int = 0) -> list[Batch]:
        """This data-parallel rank's micro-batches of `step` (0-based): its contiguous share of what `site` has of the step's samples."""
        ids = source.sample_ids(step, self.config.train.global_batch)
        rows = self.config.train.micro_batch
        first = (site * self.ranks.dp + self.ranks.dp_rank) * self.micro_batches
        return [on_device(source.rows(ids[k * rows : (k + 1) * rows]), self.ranks.device) for k in range(first, first + self.micro_batches)]

    def _figures(self, result: StepResult, lr: float, step_seconds: float, tokens_per_second: float) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": result.loss,
            "bits_per_byte": result.bits_per_byte,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": tokens_per_second,
            "step_seconds": step_seconds,
            "skipped_steps": self.progress.skipped,
            **({"failed_checkpoints": self.checkpoints.failures} if self.checkpoints.failures else {}),
            **self.meter.figures(tokens_per_second),
            **exposed_seconds(self.optimizer),
            **self.clock.take(),
            **(self.federation.figures() if self.federation is not None else {}),
        }
        if self.ranks.device.type == "cuda":
            figures["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.load is not None:
            figures |= self.load.figures(dist.group.WORLD)
        return figures

    def _stop_if_hopeless(self, result: StepResult) -> None:
        limit = self.config.train.max_bad_steps
        if not result.updated and self.progress.skipped_in_a_row > limit:
            raise TrainingStopped(
                f"train.max_bad_steps={limit}: {self.progress.skipped_in_a_row} steps in a row had a NaN or infinite loss or gradient "
                f"(last: step {self.progress.step}, loss {result.loss}, gradient norm {result.grad_norm}); "
                "lower optim.lr or look at the data"
            )

    def _evaluate(self) -> None:
        assert self.validation is not None
        train, source, started = self.config.train, self.validation, time.perf_counter()

        def batches(step: int) -> Callable[[], Iterator[Batch]]:
            self.clock.watchdog.at(f"evaluation batch {step}", self.progress.step)
            rows = self._micro_batches(source, step)  # the same at all sites, so that they can be compared
            return lambda: iter(rows)

        loss, bits = self.clock.time(
            "evaluation",
            lambda: evaluate(
                self.chunks,
                batches,
                self.ranks,
                steps=train.eval_steps,
                micro_batches=self.micro_batches,
                rows=train.micro_batch,
                seq_len=train.seq_len,
            ),
        )
        self.checkpoints.note("evaluation_seconds", time.perf_counter() - started)
        self.tracker.log({"step": self.progress.step, "val_loss": loss, "val_bits_per_byte": bits, **self.reference})

    def save(self, *, last: bool) -> None:
        """Write a checkpoint of the current step, or begin to; the `last` one is complete on return."""
        stored = {
            "progress": vars(self.progress).copy(),
            "steps": self.config.train.steps,
            "next_sample": self.progress.step * self.config.train.global_batch,
            "data": self.source.fingerprint(),
            "tracking_id": stored_identity(self.run_dir),
        }
        outer = None
        if self.federation is not None:
            stored["federation"], outer = self.federation.save(self.progress), self.federation.keeper
        self.checkpoints.save(self.progress.step, self.chunks, self.optimizer, stored, last=last, outer=outer)
        if outer is not None:
            outer.drop()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch where the model is."""
    # Document bounds stay on the host: attention back ends that read them there would wait for the device in every layer.
    # Rows of one document each need none.
    bounds = batch.cu_seqlens
    if bounds is not None and bounds.numel() == batch.tokens.shape[0] + 1:
        bounds = None
    return replace(replace(batch, cu_seqlens=None).to(device, non_blocking=True), cu_seqlens=bounds)


def bigram_reference(config: Config, tokenizer: Any) -> dict[str, float]:
    """The demo corpus's bigram entropy, which a model that uses its context must beat; {} for other data."""
    if config.data.paths or not config.data.demo:
        return {}
    from train.data.demo import ensure_demo_corpus

    return {"bigram_bits_per_byte": bigram_bits_per_byte(ensure_demo_corpus(config.data), tokenizer)}


def _say_what_moved(run_dir: Path) -> None:
    from train.federation.accounting import account_of

    try:
        moved = account_of(run_dir)
    except (ValueError, OSError) as error:  # the run is saved, and does not fail for a line about it
        print(f"federation: what the outer steps moved cannot be told ({' '.join(str(error).split())})", flush=True)
        return
    if moved is not None:
        print(f"federation: {moved.line()}", flush=True)


def pretrain(
    config: Config,
    run_dir: Path,
    attempt: int,
    resumed: bool,
    ranks: Ranks,
    tracker: Tracker | None = None,
    stop: StopRequest | None = None,
    watchdog: Watchdog | None = None,
) -> Progress:
    """Run one pretraining run to its last step, or until asked to stop, on this rank (collective). Returns where it stands.

    `tracker` replaces the configured ones, for tests; without `stop` nothing asks, without `watchdog` nothing watches.
    """
    if tracker is None:
        if resumed and ranks.is_first:
            keep_identity(run_dir, newest_complete(run_dir / CHECKPOINTS)[0])
        tracker = build_trackers(config, run_dir, attempt) if ranks.is_first else NullTracker()
    stop, watchdog = stop if stop is not None else NeverStop(), watchdog if watchdog is not None else NoWatchdog()
    status, federation = "failed", None
    try:
        trainer = Trainer(config, run_dir, ranks, tracker, stop, watchdog)
        federation = trainer.federation
        trainer.begin(resumed)
        stop.listen()
        status = "completed" if trainer.run() else "preempted"
        if status == "preempted" and ranks.is_first:
            write_status(run_dir, state=status, attempt=attempt, exit_code=0, step=trainer.progress.step)
        if federation is not None and ranks.is_first:
            _say_what_moved(run_dir)
        return trainer.progress
    finally:
        watchdog.stop()  # trackers have time limits of their own
        if federation is not None:
            federation.leave()
        tracker.finish(status)
