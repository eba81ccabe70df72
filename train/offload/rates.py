"""The rates behind the plan's seconds: those of one host with an H200, each replaced by what was measured on this machine.

`leantron doctor --bandwidth` measures and keeps them in the user's cache, one file for each machine of a shared home directory; the plan
reads them there, and says which ones it has. Nothing here imports torch.
"""

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from train.config.errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """What moves and updates states, in units a second."""

    both_ways: float
    """Bytes in each direction between host and GPU while both are busy."""
    one_way: float
    """Bytes in one direction alone, the slower of the two."""
    host_adam: float
    """Parameters that one core of the host updates with torch's fused AdamW, all cores of the process busy."""
    source: str
    """Where they are from."""

    def assumptions(self) -> dict[str, Any]:
        """The rates for plan.json."""
        return {
            "host_link_both_ways_gb_s": self.both_ways / 1e9,
            "host_link_one_way_gb_s": self.one_way / 1e9,
            "host_adam_gparams_s_per_core": self.host_adam / 1e9,
            "measured_on": self.source,
            "overlap": "none with forward and backward: seconds are upper bounds at these rates",
        }


ASSUMED = Rates(both_ways=47.8e9, one_way=55.4e9, host_adam=4.1e9 / 16, source="one host with an H200 (PCIe 5), 16 cores")
NAMES = tuple(each.name for each in fields(Rates) if each.name != "source")


def rates_path(env: Mapping[str, str] = os.environ) -> Path:
    """Where this machine's rates are kept."""
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "leantron", f"rates-{platform.node()}.json")


def current(path: Path | None = None) -> Rates:
    """The assumed rates with those measured here in their place. Raises ConfigError for a file that cannot be read."""
    path = rates_path() if path is None else path
    if not path.is_file():
        return ASSUMED
    try:
        content = json.loads(path.read_text())
        measured = {name: float(content["rates"][name]) for name in NAMES if name in content["rates"]}
        date = str(content["date"])
        if not all(0 < value < float("inf") for value in measured.values()):
            raise ValueError("a rate is not a positive number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"the rates measured on this machine cannot be read ({type(error).__name__}: {error})"
        raise ConfigError("rates", path, rule, "delete the file, or measure again with `leantron doctor --bandwidth`") from error
    if set(measured) == set(NAMES):
        source = f"this machine, measured on {date}"
    else:
        source = f"this machine ({', '.join(measured) or 'none'}, measured on {date}), else {ASSUMED.source}"
    return replace(ASSUMED, **measured, source=source)


def keep(measured: Mapping[str, float], path: Path | None = None) -> Path:
    """Keep rates measured here, by the names of `Rates`; those that were not measured stay the assumed ones. Returns the file."""
    path = rates_path() if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"date": time.strftime("%Y-%m-%d"), "rates": {name: measured[name] for name in NAMES if name in measured}}
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    return path
