"""Which tests run on which device."""

from collections.abc import Sequence
from typing import Any

import pytest


def on_devices(rows: Sequence[tuple[Any, ...]], on_cpu: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters (device, *row): every row on GPUs, some of them on the CPU too."""
    here = [pytest.param("cpu", *row, marks=pytest.mark.slow) for row in on_cpu]
    return [pytest.param("cuda", *row, marks=pytest.mark.gpu) for row in rows] + here
