"""`leantron checkpoints <run>`: step, size, whether complete, and whether kept for good, of each of a run's checkpoints."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from train.checkpoint.directory import CHECKPOINTS, is_permanent, list_checkpoints, manifest_of
from train.config.compose import load_config


def show_checkpoints(run_dir: Path, console: Console | None = None) -> int:
    """Print the table, oldest first; returns 0 when there is a complete one to go on from, else 1."""
    console = console or Console(highlight=False)
    rows = checkpoint_rows(run_dir)
    if not rows:
        console.print(f"{run_dir}: no checkpoints", soft_wrap=True)
        return 1
    table = Table(box=None, pad_edge=False)
    for name in ("step", "size", "state", "kept"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for step, size, state, kept in rows:
        table.add_row(f"{step:,}", f"{size / 2**20:,.1f} MiB", state, kept)
    console.print(table)
    return 0 if any(state == "complete" for _, _, state, _ in rows) else 1


def checkpoint_rows(run_dir: Path) -> list[tuple[int, int, str, str]]:
    """(step, bytes, `complete` or what is wrong, `for good` or how it is kept) of each checkpoint, oldest first."""
    config = load_config(run_dir / "config.yaml").checkpoint
    found = []
    for step, path in list_checkpoints(run_dir / CHECKPOINTS):
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        try:
            manifest_of(path)
        except ValueError as error:
            found.append((step, size, str(error).removeprefix(f"checkpoint {path}: ").partition(";")[0], "not counted"))
        else:
            found.append((step, size, "complete", "for good" if is_permanent(step, config.keep_every) else f"newest {config.keep}"))
    return found
