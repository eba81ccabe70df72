"""`write_report(run_dir)`: reads a run's files, draws its pictures, writes one HTML page beside them. Needs no GPU."""

import json
from pathlib import Path
from typing import Any

from train.config.compose import load_config
from train.config.errors import ConfigError
from train.config.place import site_dirs
from train.report.curves import curve_pictures, loss_picture
from train.report.experts import expert_pictures
from train.report.page import Section, render
from train.report.patterns import pattern_pictures
from train.report.summary import configuration_rows, figure_rows
from train.tracking.readers import RunMetrics, read_metrics


def write_reports(run_dir: Path) -> list[Path]:
    """Write the report of a run, or one for each of its sites; return the pages' paths. Raises ConfigError like `write_report`."""
    return [write_report(place) for place in site_dirs(Path(run_dir))]


def write_report(run_dir: Path) -> Path:
    """Write `<run_dir>/report/index.html` and its PNGs, replacing older ones; return the page's path.

    Raises ConfigError (one line) when the run, its configuration or its metrics are not there.
    """
    run_dir = Path(run_dir)
    metrics = _metrics(run_dir)
    config = load_config(run_dir / "config.yaml")
    facts = _facts(run_dir)
    folder = run_dir / "report"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "run", run_dir, f"the report cannot be written there ({error.strerror})", "make the directory writable"
        ) from error
    loss = loss_picture(metrics, folder, _bigram(metrics, facts))
    sections = [
        Section("Training", ([loss] if loss else []) + curve_pictures(metrics, folder)),
        Section("Attention", pattern_pictures(config, folder)),
        Section("Experts", expert_pictures(metrics, folder)),
    ]
    page = folder / "index.html"
    text = render(
        title=config.run.name or run_dir.resolve().name,
        status=_status(facts),
        figures=figure_rows(config, metrics, _bigram(metrics, facts)),
        sections=[section for section in sections if section.pictures],
        configuration=configuration_rows(config),
        sample=_text(facts.get("sample")),
    )
    part = page.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(page)
    return page


def _metrics(run_dir: Path) -> RunMetrics:
    if not run_dir.is_dir():
        raise ConfigError("run", run_dir, "there is no such directory", "name the directory of a run, runs/<name>")
    try:
        metrics = read_metrics(run_dir / "metrics.jsonl")
    except FileNotFoundError as error:
        rule = "the directory has no metrics.jsonl"
        raise ConfigError("run", run_dir, rule, "name the directory of a run that has begun to train") from error
    if not metrics.training and not metrics.validation:
        raise ConfigError("run", run_dir, "metrics.jsonl has no line of figures yet", "wait for the first step, or see the run's logs")
    return metrics


def _facts(run_dir: Path) -> dict[str, Any]:
    """What `status.json` and `demo.json` say, the latter last; a file that is not there or not JSON says nothing."""
    facts: dict[str, Any] = {}
    for name in ("status.json", "demo.json"):
        try:
            read = json.loads((run_dir / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(read, dict):
            facts |= read
    return facts


def _status(facts: dict[str, Any]) -> str:
    """How the run ended, in the launcher's words."""
    state = facts.get("state")
    if state == "stopped":
        return f"stopped by {facts.get('signal', 'a signal')}"
    if state == "failed":
        return f"failed: {facts.get('reason', 'see the logs')}"
    return str(state) if state else "no status yet"


def _bigram(metrics: RunMetrics, facts: dict[str, Any]) -> float | None:
    for value in (metrics.last("bigram_bits_per_byte"), facts.get("bigram_bits_per_byte")):
        if isinstance(value, int | float):
            return float(value)
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
