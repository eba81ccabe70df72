"""The command line of the report."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from train.config.errors import ConfigError
from train.report.write import write_reports


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of the run named in `argv` and print where it is; 2, with one line on stderr, when there is nothing to report."""
    parser = argparse.ArgumentParser(prog="leantron report", description="Write <run>/report/index.html with pictures of the run.")
    parser.add_argument("run", type=Path, help="the run's directory, runs/<name>")
    arguments = parser.parse_args(argv)
    try:
        pages = write_reports(arguments.run)
    except ConfigError as error:
        print(f"leantron report: {error}", file=sys.stderr)
        return 2
    for page in pages:
        print(f"report: {page}")
    return 0
