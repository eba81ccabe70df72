"""The table of tiles: measured choices by device capability and shape, in JSON files. Read before a launch; nothing is tuned inside a step.

Two files are asked, in this order: the machine's own, `sm<major><minor>.json` in `S2_TILES` (default: `leantron/s2` under the user's cache
folder), which `python -m benchmarks.s2_tune --write` makes; and the one in this package, measured on Hopper, which serves every device
that has none of its own, made smaller to fit its shared memory (`config.py`).

    {"format": 1, "tiles": [{"kernel": "forward", "bytes": 2, "width": 128, "block": 64, "length": null, "rows": 64, "keys": 64, ...}]}

An entry serves a kernel, an element size in bytes, head widths up to `width`, patterns whose block is `block` (64: any under 128; 128:
any of 128 or more, and dense attention) and sequences up to `length` tokens (null: any). The narrowest that serves a call is taken.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import S2Error

KERNELS = ("forward", "dq", "dkv", "stripe", "decode")
"""dkv: the keys' gradients, of window and stripes; stripe: of the stripes, where they have tiles of their own."""
SHIPPED = Path(__file__).with_name("tiles.json")
FORMAT = 1
KEYS = {"kernel", "bytes", "width", "block", "length"}
NUMBERS = {
    "rows": (16, 32, 64, 128, 256), "keys": (16, 32, 64, 128, 256), "warps": (1, 2, 4, 8, 16), "stages": tuple(range(1, 9)),
    "programs": range(1, 65), "least": range(1, 65), "tma": (True, False),
}  # fmt: skip
"""What the fields of a tile may be."""


def own_file(capability: tuple[int, int]) -> Path:
    """The machine's own file for a device capability."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("S2_TILES") or cache / "leantron" / "s2") / f"sm{capability[0]}{capability[1]}.json"


@lru_cache(maxsize=16)
def _read(path: Path) -> tuple[dict[str, Any], ...]:
    """The checked entries of a file, the narrowest first; none when it is not there."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return ()
    remedy = "delete the file, or measure again with `python -m benchmarks.s2_tune --write`"
    try:
        data = json.loads(text)
        entries = [dict(entry) for entry in data["tiles"]]
        version = data["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise S2Error("tiles", path, f"is not a table of tiles ({error!r})", remedy) from None
    if version != FORMAT:
        raise S2Error("tiles", path, f"has format {version}, this is {FORMAT}", remedy)
    for entry in entries:
        wrong = _wrong(entry)
        if wrong:
            raise S2Error("tiles", path, f"has an entry whose {wrong}", remedy)
    return tuple(sorted(entries, key=lambda entry: (entry["width"], float("inf") if entry["length"] is None else entry["length"])))


def _wrong(entry: dict[str, Any]) -> str | None:
    """What is wrong with an entry, or None."""
    if entry.get("kernel") not in KERNELS or entry.get("bytes") not in (2, 4) or entry.get("block") not in (64, 128):
        return "kernel, bytes or block is unknown"
    length = entry.get("length")
    if type(entry.get("width")) is not int or not (length is None or type(length) is int) or "length" not in entry:
        return "width or length is no number"
    wanted = {"keys", "warps", "stages", "programs", "least"} if entry["kernel"] == "decode" else {"rows", "keys", "warps", "stages", "tma"}
    if set(entry) - KEYS != wanted:
        return f"fields are not {sorted(KEYS | wanted)}"
    bad = [key for key in sorted(wanted) if entry[key] not in NUMBERS[key] or (key == "tma") is not isinstance(entry[key], bool)]
    return f"{bad[0]} is {entry[bad[0]]!r}" if bad else None


def find(kernel: str, size: int, width: int, block: int, length: int, capability: tuple[int, int]) -> dict[str, Any]:
    """The fields of the tile for a call: element size in bytes, head width, the pattern's block and the tokens of a row.

    Without an entry of their own the stripes' keys have the tile of `dkv`.
    """
    kind = 64 if block < 128 else 128
    for path in (own_file(capability), SHIPPED):
        for entry in _read(path):
            same = (entry["kernel"], entry["bytes"], entry["block"]) == (kernel, size, kind)
            if same and width <= entry["width"] and (entry["length"] is None or length <= entry["length"]):
                return {key: value for key, value in entry.items() if key not in KEYS}
    if kernel == "stripe":
        return find("dkv", size, width, block, length, capability)
    raise S2Error("tiles", SHIPPED, f"has no {kernel} tile for {size} bytes and width {width}", "install the package again")


def write(path: Path, entries: Iterable[dict[str, Any]], measured: dict[str, Any]) -> None:
    """Adds entries to a file, in place of those for the same calls, whole or not at all; `measured` says on what."""
    entries = list(entries)
    for entry in entries:
        wrong = _wrong(entry)
        if wrong:
            raise S2Error("tiles", entry, f"its {wrong}", "see s2/triton/tuning.py")
    _read.cache_clear()
    new = {tuple(entry[key] for key in sorted(KEYS)) for entry in entries}
    kept = [entry for entry in _read(path) if tuple(entry[key] for key in sorted(KEYS)) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(entry) for entry in kept + entries)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(f'{{"format": {FORMAT}, "measured": {json.dumps(measured)}, "tiles": [\n{lines}\n]}}\n')
    os.replace(file.name, path)
    _read.cache_clear()
