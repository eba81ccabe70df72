"""`leantron checkpoints <run>`: step, size, whether complete, and whether kept for good, of each of a run's checkpoints, site by site."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from train.checkpoint.directory import CHECKPOINTS, is_permanent, list_checkpoints, manifest_of
from train.config.compose import load_config
from train.config.place import site_dirs


def show_checkpoints(run_dir: Path, console: Console | None = None) -> int:
    """Print the table, oldest first; returns 0 when every site has a complete one to go on from, else 1."""
    console = console or Console(highlight=False)
    places = site_dirs(run_dir)
    usable = []
    for place in places:
        if place != run_dir:
            console.print(f"site {place.name}", soft_wrap=True)
        usable.append(_show(place, console))
    return 0 if all(usable) else 1


def _show(place: Path, console: Console) -> bool:
    rows = checkpoint_rows(place)
    if not rows:
        console.print(f"{place}: no checkpoints", soft_wrap=True)
        return False
    table = Table(box=None, pad_edge=False)
    for name in ("step", "size", "state", "kept"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for step, size, state, kept in rows:
        table.add_row(f"{step:,}", f"{size / 2**20:,.1f} MiB", state, kept)
    console.print(table)
    return any(state == "complete" for _, _, state, _ in rows)


def checkpoint_rows(run_dir: Path) -> list[tuple[int, int, str, str]]:
    """(step, bytes, `complete` or what is wrong, `for good` or how it is kept) of each checkpoint of a run or a site, oldest first."""
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
