"""What a report reads of a run's directory and how its page gets there."""

import socket
from pathlib import Path
from typing import Any

from train.config.errors import ConfigError
from train.config.place import current_status
from train.tracking.readers import RunMetrics, read_metrics


def make_folder(run_dir: Path) -> Path:
    """`<run_dir>/report`, made when it is not there. Raises ConfigError."""
    folder = run_dir / "report"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "run", run_dir, f"the report cannot be written there ({error.strerror})", "make the directory writable"
        ) from error
    return folder


def write_page(folder: Path, text: str) -> Path:
    """Write `index.html` in one step; returns its path."""
    page = folder / "index.html"
    part = page.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(page)
    return page


def metrics_of(run_dir: Path) -> RunMetrics:
    """The lines of `metrics.jsonl`. Raises ConfigError when there are none."""
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


def facts_of(run_dir: Path) -> dict[str, Any]:
    """What `status.json` says, as it stands now; a file that is not there or not JSON says nothing."""
    try:
        return current_status(run_dir)
    except (OSError, ConfigError):
        return {}


def sample_of(run_dir: Path) -> str | None:
    """The text of `sample.txt`, where someone has put what the model writes (`make demo` does)."""
    try:
        text = (run_dir / "sample.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text if text.strip() else None


def status_words(facts: dict[str, Any]) -> str:
    """How the run ended, in the launcher's words."""
    state, host = facts.get("state"), facts.get("host")
    if state == "died":
        return "died: it ended without a word, killed or with its machine"
    if state == "running" and host not in (None, socket.gethostname()):
        return f"running on {host} when it last said something"
    if state == "stopped":
        return f"stopped by {facts.get('signal', 'a signal')}"
    if state == "failed":
        return f"failed: {facts.get('reason', 'see the logs')}"
    return str(state) if state else "no status yet"


def bigram_of(metrics: RunMetrics, facts: dict[str, Any]) -> float | None:
    """The bigram entropy of the data, in bits per byte, where the run or its status says it."""
    for value in (metrics.last("bigram_bits_per_byte"), facts.get("bigram_bits_per_byte")):
        if isinstance(value, int | float):
            return float(value)
    return None
