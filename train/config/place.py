"""The run's directory: its name, whether it is free, how exactly one process takes it, and what its `status.json` says.

    runs/<name>/config.yaml · plan.json · status.json · metrics.jsonl · checkpoints/ · wandb/ · logs/rank_*.log · report/

A directory belongs to a run as soon as its `config.yaml` exists; that file is linked into place, which only one process can do.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from train.config.compose import dump_config, write_atomic
from train.config.errors import ConfigError
from train.config.schema import Config

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"
LOCK_FILE = ".lock"
RUNS_DIR = "runs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,127}")


def named(config: Config) -> Config:
    """Return `config` with `run.name` and `run.dir` filled in; a name is made up from the date and the time when none is given."""
    if config.resume is not None:
        return config
    run = config.run
    if run.name is not None:
        _check_name(run.name)
        return replace(config, run=replace(run, dir=run.dir or f"{RUNS_DIR}/{run.name}"))
    if run.dir is not None:
        name = Path(run.dir).name
        return replace(config, run=replace(run, name=name if _NAME.fullmatch(name) else "run"))
    base = time.strftime("run-%Y%m%d-%H%M%S")
    name, count = base, 1
    while Path(RUNS_DIR, name).exists():
        count += 1
        name = f"{base}-{count}"
    return replace(config, run=replace(run, name=name, dir=f"{RUNS_DIR}/{name}"))


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "a name starts with a letter or digit and holds only letters, digits and . _ - + = , (up to 128)"
        raise ConfigError("run.name", name, rule, "choose another name; run.dir takes a whole path")


def check_place(config: Config) -> None:
    """Raise ConfigError unless the run's directory can be made, or, with `resume`, is there. Writes nothing."""
    if config.resume is not None:
        if not Path(config.resume, CONFIG_FILE).is_file():
            raise ConfigError("resume", config.resume, f"there is no run: no {CONFIG_FILE} in it", "give the directory of a run")
        return
    run_dir = Path(config.run.dir or "")
    key, value = ("run.dir", config.run.dir) if config.run.name is None else ("run.name", config.run.name)
    if (run_dir / CONFIG_FILE).exists():
        raise _taken(key, value, run_dir)
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError("run.dir", run_dir, "the folder is not empty and holds no run", "choose another run.name or run.dir")
    existing = run_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError("run.dir", run_dir, f"{existing} is not a folder", "choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError("run.dir", run_dir, f"{existing} is not writable", "choose another run.dir, or make it writable")


def _taken(key: str, value: object, run_dir: Path) -> ConfigError:
    return ConfigError(key, value, f"{run_dir} is used by another run", f"choose another run.name, or go on with it: resume={run_dir}")


def claim(config: Config, plan: dict[str, Any]) -> tuple[Path, int]:
    """Make the run's directory with `config.yaml`, `plan.json` and `status.json`; return it and the number of this attempt (from 1).

    With `resume` the directory is there: its `config.yaml` is replaced, the earlier one kept as `config_<attempt>.yaml`.
    Of several processes that claim one directory exactly one succeeds; the others raise ConfigError.
    """
    run_dir = Path(config.resume or config.run.dir or "")
    try:
        if config.resume is not None:
            hold(run_dir)
            attempt = int(read_status(run_dir).get("attempt", 1)) + 1
            write_atomic(run_dir / f"config_{attempt - 1}.yaml", (run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
            dump_config(config, run_dir / CONFIG_FILE)
        else:
            attempt = 1
            run_dir.mkdir(parents=True, exist_ok=True)
            _claim_new(config, run_dir)
            hold(run_dir)
        write_atomic(run_dir / PLAN_FILE, json.dumps(plan, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            "run.dir", run_dir, f"cannot be written ({error.strerror})", "choose another run.dir, or make it writable"
        ) from error
    write_status(run_dir, state="running", attempt=attempt)
    return run_dir, attempt


_held: dict[Path, IO[str]] = {}


def hold(run_dir: Path) -> None:
    """Take the run for the life of this process, so that nobody else goes on with it meanwhile; ConfigError when somebody has it.

    The system lets go of the lock when the process ends, however it ends. A process may take a run again.
    """
    place = run_dir.resolve()
    if place in _held:
        return
    stream = (place / LOCK_FILE).open("a", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ConfigError("resume", run_dir, "the run is still going on in another process", "wait for it, or stop it first") from None
    _held[place] = stream


def _claim_new(config: Config, run_dir: Path) -> None:
    draft = run_dir / f".config.{os.getpid()}.yaml"
    try:
        dump_config(config, draft)
        os.link(draft, run_dir / CONFIG_FILE)
    except FileExistsError as error:
        raise _taken("run.name", config.run.name, run_dir) from error
    finally:
        draft.unlink(missing_ok=True)


def write_status(run_dir: Path, *, state: str, attempt: int, **details: Any) -> None:
    """Write `status.json` whole. `state`: `running`, `completed`, `preempted` (saved when asked to stop), `stopped` or `failed`.

    `details` say more. The time of the attempt's start is kept from the file that is replaced.
    """
    before = read_status(run_dir)
    now = time.time()
    started = before.get("started", now) if before.get("attempt") == attempt else now
    status = {"state": state, "attempt": attempt, "started": started, "updated": now, **details}
    write_atomic(run_dir / STATUS_FILE, json.dumps(status, indent=2) + "\n")


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return what `status.json` says; {} when there is none."""
    with contextlib.suppress(FileNotFoundError):
        status = json.loads((run_dir / STATUS_FILE).read_text(encoding="utf-8"))
        if isinstance(status, dict):
            return status
    return {}
