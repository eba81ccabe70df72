"""Where checkpoints lie and which of them are complete. Torch-free.

A run's `checkpoints/` holds `step_<8 digits>` directories. One is complete when its `leantron.json` is readable and every file
named there has the size named there.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "leantron.json"
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return directory / f"step_{step:08d}"


def manifest_of(path: Path) -> dict[str, Any]:
    """The checked manifest of a checkpoint. Raises ValueError naming the file and what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"checkpoint {path}: {MANIFEST} is missing, so it was never completed; use an earlier checkpoint") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {path}: {MANIFEST} is unreadable ({error}); use an earlier checkpoint") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or "progress" not in manifest:
        raise ValueError(f"checkpoint {path}: {MANIFEST} lacks its fields; use an earlier checkpoint")
    for name, size in manifest["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes instead of {size}"
            raise ValueError(f"checkpoint {path}: {name} is {state}; use an earlier checkpoint")
    return manifest


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """All `step_*` directories, oldest first, complete or not."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(found)


def newest_complete(directory: Path) -> tuple[Path | None, list[str]]:
    """Newest complete checkpoint and one line for each newer one that was passed over."""
    skipped = []
    for _, path in reversed(list_checkpoints(directory)):
        try:
            manifest_of(path)
        except ValueError as error:
            skipped.append(str(error))
            continue
        return path, skipped
    return None, skipped


def prune(directory: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete checkpoints; incomplete ones neither count nor are deleted. Returns what went."""
    complete = []
    for _, path in list_checkpoints(directory):
        try:
            manifest_of(path)
        except ValueError:
            continue
        complete.append(path)
    doomed = complete[: max(0, len(complete) - keep)]
    for path in doomed:
        # A half-deleted checkpoint must not look complete: its manifest goes first.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    return doomed
