"""Reading `metrics.jsonl` back: training and validation lines apart, in order of their step, the last line of a step counting.

A run that was rolled back and resumed logs some steps twice; nothing is deleted from the file, and the last line is the one
that the final weights went through. A line that a kill tore is left out and counted.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.tracking.jsonl import restore


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """The lines of one file."""

    training: list[dict[str, Any]] = field(default_factory=list)
    """Lines with `loss`, ascending in `step`, one a step."""
    validation: list[dict[str, Any]] = field(default_factory=list)
    """Lines with `val_loss` or `val_bits_per_byte`, likewise."""
    other: list[dict[str, Any]] = field(default_factory=list)
    """All other lines in the file's order."""
    unreadable: int = 0
    """Lines that are not a JSON object, as a kill may leave one."""

    def series(self, key: str, validation: bool = False) -> tuple[list[float], list[float]]:
        """Steps and values of `key`, over the lines that have it as a number."""
        lines = [line for line in (self.validation if validation else self.training) if isinstance(line.get(key), int | float)]
        return [float(line["step"]) for line in lines], [float(line[key]) for line in lines]

    def last(self, key: str) -> Any:
        """The value of `key` in the last line that has it, evaluation lines after training lines; None when no line has."""
        for lines in (self.validation, self.training, self.other):
            for line in reversed(lines):
                if key in line:
                    return line[key]
        return None


def read_metrics(path: Path) -> RunMetrics:
    """The lines of `path`. Raises FileNotFoundError when there is no such file."""
    training: dict[int, dict[str, Any]] = {}
    validation: dict[int, dict[str, Any]] = {}
    other: list[dict[str, Any]] = []
    unreadable = 0
    with open(path, "rb") as file:
        for raw in file:
            if not raw.strip():
                continue
            try:
                line = json.loads(raw)
            except ValueError:
                unreadable += 1
                continue
            if not isinstance(line, dict):
                unreadable += 1
                continue
            line = restore(line)
            step = line.get("step")
            if not isinstance(step, int):
                other.append(line)
            elif "val_loss" in line or "val_bits_per_byte" in line:
                validation[step] = line
            elif "loss" in line:
                training[step] = line
            else:
                other.append(line)
    return RunMetrics(
        training=[training[step] for step in sorted(training)],
        validation=[validation[step] for step in sorted(validation)],
        other=other,
        unreadable=unreadable,
    )
