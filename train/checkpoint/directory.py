"""Where checkpoints lie and which of them are complete. Torch-free.

A run's `checkpoints/` holds `step_<8 digits>` directories. One is complete when its `leantron.json` is readable and every file
named there has the size named there.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "leantron.json"
CHECKPOINTS = "checkpoints"
"""Name of the folder in a run's directory."""
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


def is_permanent(step: int, keep_every: int) -> bool:
    """Whether the checkpoint of `step` is kept for good."""
    return bool(keep_every) and step % keep_every == 0


def prune(directory: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Delete all complete checkpoints but the `keep` newest and those whose step `keep_every` divides (0: none); returns what went.

    Incomplete ones neither count nor are deleted.
    """
    complete = []
    for step, path in list_checkpoints(directory):
        try:
            manifest_of(path)
        except ValueError:
            continue
        complete.append((step, path))
    doomed = [path for step, path in complete[: max(0, len(complete) - keep)] if not is_permanent(step, keep_every)]
    for path in doomed:
        # A half-deleted checkpoint must not look like one: its name goes first.
        stale = stale_path(path)
        shutil.rmtree(stale, ignore_errors=True)
        path.rename(stale)
        shutil.rmtree(stale)
    return doomed


def stale_path(path: Path) -> Path:
    """Where a checkpoint lies that is being deleted or replaced."""
    return path.with_name(f".{path.name}.stale")


def partial_path(path: Path) -> Path:
    """Where a checkpoint lies that is being written."""
    return path.with_name(f".{path.name}.partial")


def tidy(directory: Path) -> None:
    """Clear up after a kill, before a run goes on: delete half-written and half-deleted checkpoints.

    One that was moved aside for another of the same step, which then did not come, is put back.
    """
    for path in list(directory.glob(".step_*.stale")):
        final = directory / path.name[1 : -len(".stale")]
        try:
            manifest_of(path)
        except ValueError:
            pass
        else:
            if not final.exists():
                path.rename(final)
                continue
        shutil.rmtree(path, ignore_errors=True)
    for path in list(directory.glob(".step_*.partial")):
        shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, final: Path, step: int, progress: dict[str, Any]) -> None:
    """Make the files written at `partial` the complete checkpoint `final`, in place of one that is there.

    They are flushed to disk, the manifest goes in last, and a rename makes all of it visible at once.
    """
    files = {}
    for path in sorted(partial.iterdir()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.name] = path.stat().st_size
    with (partial / MANIFEST).open("w") as handle:
        json.dump({"format": 1, "step": step, "progress": progress, "files": files}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    if final.exists():  # the same step, written again after a rollback
        stale = stale_path(final)
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
        partial.rename(final)
        shutil.rmtree(stale, ignore_errors=True)
    else:
        partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
