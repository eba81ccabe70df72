"""The curves of a run over its steps: loss, learning rate, gradient norm, speed."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from train.report.style import BLACK, BLUE, GREY, PURPLE, VERMILLION, figure, save, tidy
from train.tracking.readers import RunMetrics

SMOOTHED_FROM = 60
"""Points from which a running mean says more than the points."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG of the report and what it shows."""

    path: Path
    caption: str


def running_mean(values: np.ndarray, span: int) -> np.ndarray:
    """(n,) centred mean over `span` finite neighbours, narrower at the ends; NaN where there is none."""
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    # As far back as ahead, so that the steep beginning is not shifted; at the end at least a quarter back, as one point is no mean.
    ahead = np.minimum(np.minimum(at, len(values) - 1 - at), span // 2)
    back = np.minimum(at, np.maximum(ahead, np.where(at > len(values) // 2, span // 4, 0)))
    low, high = at - back, at + ahead + 1
    here = count[high] - count[low]
    return np.divide(total[high] - total[low], here, out=np.full(len(values), math.nan), where=here > 0)


def draw_line(axes: Axes, steps: list[float], values: list[float], colour: str, label: str | None = None, noisy: bool = True) -> None:
    """A line; a noisy one from `SMOOTHED_FROM` points on pale, with its running mean in full colour."""
    y = np.asarray(values)
    y = np.where(np.isfinite(y), y, math.nan)
    if noisy and len(y) >= SMOOTHED_FROM:
        axes.plot(steps, y, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(steps, running_mean(y, max(9, len(y) // 40)), color=colour, linewidth=1.8, label=label)
    else:
        axes.plot(steps, y, color=colour, linewidth=1.8, marker="o" if len(y) < 3 else "", markersize=4, label=label)


def step_axis(axes: Axes, metrics: RunMetrics, label: str | None = None) -> None:
    """Whole steps, and a dotted line where a new attempt took over, the first one named `label` in the legend."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    before = None
    for line in metrics.training:
        attempt = line.get("attempt")
        if before is not None and attempt != before:
            axes.axvline(line["step"], color=GREY, linewidth=1.2, linestyle=":", label=label)
            label = None
        before = attempt


def loss_picture(metrics: RunMetrics, folder: Path, bigram: float | None) -> Picture | None:
    """Training and validation loss; in bits per byte, with the bigram entropy, when the lines have them, else in nats per token."""
    in_bits = bool(metrics.series("bits_per_byte")[0])
    steps, values = metrics.series("bits_per_byte" if in_bits else "loss")
    val_steps, val_values = metrics.series("val_bits_per_byte" if in_bits else "val_loss", validation=True)
    if not steps and not val_steps:
        return None
    drawn = figure(9.0, 4.2)
    axes = drawn.add_subplot()
    unit = "bits per byte" if in_bits else "nats per token"
    if steps:
        draw_line(axes, steps, values, BLUE, "training" if len(steps) < SMOOTHED_FROM else "training (pale: each log; full: running mean)")
    if val_steps:
        axes.plot(val_steps, val_values, color=VERMILLION, marker="D", markersize=5, linewidth=1.4, label="validation")
    if in_bits and bigram is not None:
        axes.axhline(bigram, color=BLACK, linestyle="--", linewidth=1.2, label=f"bigram entropy of the data, {bigram:.3f}")
    bad = [step for step, value in zip(*metrics.series("loss"), strict=True) if not math.isfinite(value)]
    if bad:
        axes.plot(bad, [0.02] * len(bad), "x", color=PURPLE, markersize=6, transform=axes.get_xaxis_transform(), label="loss not finite")
    tidy(axes, f"Loss, {unit}", y=unit)
    step_axis(axes, metrics, "resumed")
    axes.legend(fontsize=9, frameon=False, loc="upper right")
    last = f" Last validation: {val_values[-1]:.3f} {unit}." if val_steps else ""
    return Picture(path=save(drawn, folder / "loss.png"), caption=f"Loss of training and validation over the steps.{last}")


def _simple(metrics: RunMetrics, folder: Path, key: str, title: str, unit: str, caption: str) -> Picture | None:
    steps, values = metrics.series(key)
    if not any(math.isfinite(value) for value in values):
        return None
    drawn = figure()
    axes = drawn.add_subplot()
    draw_line(axes, steps, values, BLUE, noisy=key != "lr")
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if key == "grad_norm" and positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if key == "tokens_per_second":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    tidy(axes, title, y=unit)
    step_axis(axes, metrics)
    return Picture(path=save(drawn, folder / f"{key}.png"), caption=caption)


def curve_pictures(metrics: RunMetrics, folder: Path) -> list[Picture]:
    """Learning rate, gradient norm, speed and, where it is known, MFU: those that the run logged."""
    wanted = (
        ("lr", "Learning rate", "", "The learning rate of each optimiser step."),
        ("grad_norm", "Gradient norm, before clipping", "", "The global norm of the gradients before clipping."),
        ("tokens_per_second", "Speed", "tokens per second", "Tokens of all devices per second of a step."),
        ("mfu", "MFU", "share of the peak", "Share of the devices' peak that the model's operations take."),
    )
    pictures = [_simple(metrics, folder, *each) for each in wanted]
    return [picture for picture in pictures if picture is not None]
