"""The run in the terminal: one live line on a tty (step, loss, bits per byte, tokens/s, time left), else one plain line a log.

The time left counts everything between two log steps, validations and checkpoints included, over the last logs.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.tracking.protocol import Metrics

_WINDOW = 50  # logs over which the pace is measured: long enough to even out a validation, short enough to follow a change


def format_duration(seconds: float) -> str:
    """`seconds` as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Pace:
    """The time left to `total` steps, from the steps and times of the last logs."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def remaining(self, step: int) -> float | None:
        """Seconds left after `step`; None before two different steps have been seen."""
        if self._seen and step <= self._seen[-1][0]:  # rolled back: the pace before says nothing about the way ahead
            self._seen.clear()
        self._seen.append((step, self._clock()))
        first_step, first_time = self._seen[0]
        if step == first_step:
            return None
        return (self._total - step) * (self._seen[-1][1] - first_time) / (step - first_step)


def training_parts(metrics: Metrics, total: int, left: float | None, separator: str = " | ") -> str:
    """The figures of a training line, as one line of text."""
    parts = [f"step {metrics['step']}/{total}"]
    for key, form in (("loss", "loss {:.4f}"), ("bits_per_byte", "{:.3f} bits/byte"), ("lr", "lr {:.2e}"), ("grad_norm", "grad {:.3f}")):
        if isinstance(metrics.get(key), int | float):
            parts.append(form.format(metrics[key]))
    parts += _speed(metrics, left)
    if metrics.get("skipped_steps"):
        parts.append(f"skipped {metrics['skipped_steps']}")
    return separator.join(parts)


def _speed(metrics: Metrics, left: float | None) -> list[str]:
    parts = []
    if isinstance(metrics.get("tokens_per_second"), int | float):
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    if isinstance(metrics.get("mfu"), int | float):
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if left is not None:
        parts.append(f"ETA {format_duration(left)}")
    return parts


def validation_line(metrics: Metrics) -> str:
    """The figures of an evaluation line, as one line of text."""
    parts = [f"validation at step {metrics['step']}"]
    if isinstance(metrics.get("val_loss"), int | float):
        parts.append(f"loss {metrics['val_loss']:.4f}")
    if isinstance(metrics.get("val_bits_per_byte"), int | float):
        parts.append(f"{metrics['val_bits_per_byte']:.3f} bits/byte")
    if isinstance(metrics.get("bigram_bits_per_byte"), int | float):
        parts.append(f"bigram {metrics['bigram_bits_per_byte']:.3f} bits/byte")
    return " | ".join(parts)


class ConsoleTracker:
    """Live on a terminal, one plain flushed line a log otherwise. Lines that are neither training nor evaluation are not shown."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream if stream is not None else sys.stdout
        self._pace = Pace(total_steps, clock)
        self._live = _LiveLine(total_steps, self._stream) if self._stream.isatty() else None

    def log(self, metrics: Metrics) -> None:
        if "val_loss" in metrics or "val_bits_per_byte" in metrics:
            self._print(validation_line(metrics))
        elif "loss" in metrics:
            left = self._pace.remaining(int(metrics["step"]))
            if self._live is None:
                self._print(training_parts(metrics, self._total, left))
            else:
                self._live.update(metrics, left)

    def finish(self, status: str) -> None:
        if self._live is not None:
            self._live.stop()
        self._print_plain(f"run {status}")

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.above(line)
        else:
            self._print_plain(line)

    def _print_plain(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class _LiveLine:
    """One line at the foot of the terminal, redrawn at each log; other output goes above it."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total = total_steps
        self._progress = Progress(
            TextColumn("step {task.fields[at]}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}", markup=False),
            console=Console(file=stream),
            auto_refresh=False,  # drawn when there is news: no thread beside the training loop
        )
        self._task = self._progress.add_task("", total=total_steps, at=f"0/{total_steps}", figures="")
        self._progress.start()

    def update(self, metrics: Metrics, left: float | None) -> None:
        figures: list[str] = []
        for key, form in (("loss", "loss {:.3f}"), ("bits_per_byte", "{:.2f} bits/byte")):
            if isinstance(metrics.get(key), int | float):
                figures.append(form.format(metrics[key]))
        fields: dict[str, Any] = {"at": f"{metrics['step']}/{self._total}", "figures": "  ".join(figures + _speed(metrics, left))}
        self._progress.update(self._task, completed=int(metrics["step"]), refresh=True, **fields)

    def above(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        self._progress.stop()
