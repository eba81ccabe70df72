"""The report of a run: `report/index.html` with pictures of its curves, attention patterns and expert load.

    leantron report runs/<name>          (or: python -m train.report runs/<name>)

Names are imported on first use: matplotlib is not needed to start a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.report.cli import main as main
    from train.report.write import write_report as write_report
    from train.report.write import write_reports as write_reports

_HOMES = {"main": "cli", "write_report": "write", "write_reports": "write"}
__all__ = ["main", "write_report", "write_reports"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
