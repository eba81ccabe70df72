"""`metrics.jsonl`: one JSON object a line, appended and handed to the system at once, so that a killed run keeps every whole line.

Floats are written by `repr`, which reads back to the same bits. JSON has no NaN or infinity: they are written as the strings
"NaN", "Infinity" and "-Infinity", and the readers turn them back into floats.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.tracking.protocol import Metrics

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any) -> Any:
    """`value` in JSON's types: numpy and torch numbers and arrays become Python's, non-finite floats their names.

    Raises TypeError for a value that has no such form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays alike
        return plain(value.tolist())
    raise TypeError(f"a metric must be a number, a string, or a list or mapping of them, not {type(value).__name__}: {value!r}")


def restore(value: Any) -> Any:
    """The inverse of :func:`plain` for what JSON gives back: the names of the non-finite floats become floats."""
    if isinstance(value, str):
        return NONFINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restore(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore(item) for item in value]
    return value


class JsonlTracker:
    """Appends to `path`, which may end in the torn line of a killed attempt: the next line starts on a line of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for the run's length; unbuffered: a kill loses no written line
        self._torn = _ends_torn(path)

    def log(self, metrics: Metrics) -> None:
        line = json.dumps(plain(metrics), allow_nan=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        self._torn = True  # until all of the line is written: a full disk may take half of it
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._torn = False

    def finish(self, status: str) -> None:
        self._file.close()


def _ends_torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
