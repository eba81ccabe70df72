"""The name under which a tracker knows the run for all of its life: kept in the run's directory, and in every checkpoint."""

import re
from pathlib import Path

from train.checkpoint.directory import manifest_of

ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def identity_path(run_dir: Path) -> Path:
    """The file that holds the id."""
    return run_dir / "wandb_id"


def stored_identity(run_dir: Path) -> str | None:
    """The run's id; None when it has none."""
    path = identity_path(run_dir)
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def write_identity(run_dir: Path, identity: str) -> None:
    """Keep `identity`; a kill in between leaves no half of it."""
    part = identity_path(run_dir).with_suffix(".part")
    part.write_text(identity + "\n", encoding="utf-8")
    part.replace(identity_path(run_dir))


def keep_identity(run_dir: Path, checkpoint: Path | None) -> None:
    """Before a run goes on from `checkpoint`: have its id again where the directory has lost it."""
    if checkpoint is None or identity_path(run_dir).exists():
        return
    identity = manifest_of(checkpoint)["progress"].get("tracking_id")
    if isinstance(identity, str) and ID.fullmatch(identity):
        write_identity(run_dir, identity)
