"""The tables of the report: the run's last figures, and its configuration."""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from train.config.check import attention_pattern
from train.config.errors import show
from train.config.plan import count_parameters
from train.config.schema import Config
from train.tracking.console import format_duration
from train.tracking.flops import attention_pairs, train_flops_per_token
from train.tracking.readers import RunMetrics


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str
    value: str
    note: str = ""


def figure_rows(config: Config, metrics: RunMetrics, bigram: float | None) -> list[Row]:
    """What the run reached and what it cost, from its last lines; a figure that it did not log is left out."""
    last = metrics.training[-1] if metrics.training else {}
    rows = [Row(name="steps", value=f"{last.get('step', metrics.last('step')):,} of {config.train.steps:,}")]
    if isinstance(last.get("tokens"), int):
        rows.append(Row(name="tokens", value=f"{last['tokens']:,}"))
    for key, name, unit in (
        ("loss", "training loss", "nats per token"),
        ("bits_per_byte", "training loss", "bits per byte"),
        ("val_loss", "validation loss", "nats per token"),
        ("val_bits_per_byte", "validation loss", "bits per byte"),
    ):
        value = metrics.last(key)
        if isinstance(value, int | float):
            rows.append(Row(name=name, value=f"{value:.4f}", note=unit))
    if bigram is not None:
        rows.append(Row(name="bigram entropy of the data", value=f"{bigram:.4f}", note="bits per byte; what counting byte pairs reaches"))
    return rows + _cost_rows(metrics, last) + _model_rows(config)


def _cost_rows(metrics: RunMetrics, last: dict[str, Any]) -> list[Row]:
    rows = []
    for key, name, form in (
        ("tokens_per_second", "tokens per second", "{:,.0f}"),
        ("step_seconds", "seconds per step", "{:.3f}"),
        ("mfu", "MFU", "{:.1%}"),
        ("mfu_dense", "MFU, attention counted dense", "{:.1%}"),
    ):
        values = [value for value in metrics.series(key)[1] if math.isfinite(value)]
        if values:
            rows.append(Row(name=name, value=form.format(statistics.median(values)), note="median over the logged steps"))
    memory = [value for value in metrics.series("memory_gib")[1] if math.isfinite(value)]
    if memory:
        rows.append(Row(name="memory", value=f"{max(memory):.2f}", note="GiB, the most of one process"))
    times = [line["time"] for line in metrics.training if isinstance(line.get("time"), int | float)]
    if len(times) > 1:
        rows.append(Row(name="time", value=format_duration(times[-1] - times[0]), note="h:mm:ss from the first logged step to the last"))
    for key, name in (("skipped_steps", "skipped steps"), ("tracker_failures", "lines that a tracker failed to take")):
        if last.get(key):
            rows.append(Row(name=name, value=f"{last[key]:,}"))
    if metrics.unreadable:
        rows.append(Row(name="unreadable lines of metrics.jsonl", value=str(metrics.unreadable), note="left out, as a kill tears one"))
    return rows


def _model_rows(config: Config) -> list[Row]:
    counted = count_parameters(config)
    pattern, seq_len = attention_pattern(config), config.train.seq_len
    rows = [Row(name="parameters", value=f"{counted['total']:,}")]
    if counted["active"] != counted["total"]:
        rows.append(Row(name="active parameters", value=f"{counted['active']:,}", note="those that one token passes through"))
    if config.attention.kind == "s2":
        views = [pattern.for_layer(layer) for layer in range(config.model.layers)]
        sparse = [view.density(seq_len) for view in views if not view.is_dense]
        if sparse:
            rows.append(Row(name="density of the S2 layers", value=f"{statistics.mean(sparse):.1%}", note="of the causal token pairs"))
    aware, dense = (train_flops_per_token(config, seq_len, each) for each in (True, False))
    note = f"multiply-adds count twice; attention's part {_attention_share(config, aware):.0%}"
    if aware < dense:
        note += f"; {dense / 1e6:,.1f} with all layers dense"
    rows.append(Row(name="MFLOP per token", value=f"{aware / 1e6:,.1f}", note=note))
    return rows


def _attention_share(config: Config, flops: float) -> float:
    pairs = float(attention_pairs(config, config.train.seq_len, pattern_aware=True).sum())
    return 12 * config.model.heads * (config.model.head_dim or 0) * pairs / config.train.seq_len / flops


def configuration_rows(config: Config) -> list[Row]:
    """Every key of the run's configuration, in the command line's words."""
    rows = []
    for section, values in asdict(config).items():
        if isinstance(values, dict):
            rows += [Row(name=f"{section}.{key}", value=show(value)) for key, value in values.items()]
        else:
            rows.append(Row(name=section, value=show(values)))
    return rows
