"""The run's directory: its name, whether it is free, how exactly one process takes it, and what its `status.json` says.

    runs/<name>/config.yaml · plan.json · status.json · metrics.jsonl · checkpoints/ · wandb/ · logs/rank_*.log · report/

A directory belongs to a run as soon as its `config.yaml` exists; that file is linked into place, which only one process can do. In a
run of several sites each site has a directory of the same kind, `runs/<name>/sites/<k>/`; the run's own then holds what they share and
a `status.json` that is put together from theirs.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from train.config.compose import dump_config, load_config, write_atomic
from train.config.errors import ConfigError
from train.config.schema import Config
from train.config.sites import check_agreement, run_config, site_config, with_shared

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
STATUS_FILE = "status.json"
LOCK_FILE = ".lock"
TURN_FILE = ".turn"
TURN_SECONDS = 10.0
"""How long a site waits for its turn to change what the sites share."""
RUNS_DIR = "runs"
SITES_DIR = "sites"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,127}")
_SHOWN = ("state", "attempt", "exit_code", "step", "signal", "failed_rank", "reason")


def site_dir(run_dir: Path, site: int) -> Path:
    """Where site `site` of a run of several sites writes."""
    return run_dir / SITES_DIR / str(site)


def site_dirs(run_dir: Path) -> list[Path]:
    """The directories in which the sites of a run write, by number, as far as they are on this file system; `[run_dir]` of one site."""
    found = [path for path in (run_dir / SITES_DIR).glob("*") if path.name.isdigit() and (path / CONFIG_FILE).is_file()]
    return sorted(found, key=lambda path: int(path.name)) or [run_dir]


def run_of(place: Path) -> Path:
    """The run's directory: of a site's directory the one it is in, of another the directory itself."""
    inside = place.parent.name == SITES_DIR and place.name.isdigit() and (place.parent.parent / CONFIG_FILE).is_file()
    return place.parent.parent if inside else place


def named(config: Config) -> Config:
    """Return `config` with `run.name` and `run.dir` filled in; a name is made up when none is given."""
    if config.resume is not None:
        return config
    run = config.run
    if run.name is not None:
        _check_name(run.name)
        return replace(config, run=replace(run, dir=run.dir or f"{RUNS_DIR}/{run.name}"))
    if run.dir is not None:
        name = Path(run.dir).name
        return replace(config, run=replace(run, name=name if _NAME.fullmatch(name) else "run"))
    if config.federation.site is not None:
        rule = "sites that are started one by one belong to one run by its name"
        raise ConfigError("run.name", None, rule, "give every site the same run.name")
    name = made_up_name("run")
    return replace(config, run=replace(run, name=name, dir=f"{RUNS_DIR}/{name}"))


def made_up_name(kind: str) -> str:
    """A name from date, time and chance, `run-20261206-092110-3fa2`: what starts in one second, here or on other hosts, differs."""
    while True:
        name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if not Path(RUNS_DIR, name).exists():
            return name


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
        if config.federation.site is None:
            raise _taken(key, value, run_dir)
        _check_site(config, run_dir)
        return
    here = [entry for entry in run_dir.iterdir() if not _made_by_another_site(config, entry)] if run_dir.is_dir() else []
    if here:
        raise ConfigError("run.dir", run_dir, "the folder is not empty and holds no run", "choose another run.name or run.dir")
    existing = run_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError("run.dir", run_dir, f"{existing} is not a folder", "choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError("run.dir", run_dir, f"{existing} is not writable", "choose another run.dir, or make it writable")


def _made_by_another_site(config: Config, entry: Path) -> bool:
    """Whether an entry of the run's directory may be there before its `config.yaml` is, as another site is just claiming it."""
    return config.federation.site is not None and (entry.name.startswith(".") or entry.name == PLAN_FILE)


def _taken(key: str, value: object, run_dir: Path) -> ConfigError:
    return ConfigError(key, value, f"{run_dir} is used by another run", f"choose another run.name, or go on with it: resume={run_dir}")


def _check_site(config: Config, run_dir: Path) -> None:
    """Raise ConfigError unless the run in `run_dir` is the one that this new site belongs to, and has room for it."""
    check_agreement(config, load_config(run_dir / CONFIG_FILE), f"{run_dir} was made with")
    site = config.federation.site
    assert site is not None
    if (site_dir(run_dir, site) / CONFIG_FILE).exists():
        if _is_held(site_dir(run_dir, site)):
            rule = f"this site of {run_dir} is going on in another process"
            raise ConfigError("federation.site", site, rule, "give every site a number of its own")
        rule = f"{run_dir} has had this site before"
        remedy = f"go on with it: resume={run_dir} federation.site={site}; or choose another run.name"
        raise ConfigError("federation.site", site, rule, remedy)


def claim(config: Config, plan: dict[str, Any]) -> tuple[Path, int]:
    """Make the run's directory with `config.yaml`, `plan.json` and `status.json`; return it and the number of this attempt (from 1).

    With `resume` the directory is there: its `config.yaml` is replaced, the earlier one kept as `config_<attempt>.yaml`.
    Of several processes that claim one directory exactly one succeeds; the others raise ConfigError. With `federation.site` the
    directory is that site's, and the run's own is made by whichever site comes first.
    """
    run_dir = Path(config.resume or config.run.dir or "")
    try:
        if config.federation.site is None:
            attempt = _take(config, run_dir, plan)
        else:
            run_dir, attempt = _take_site(config, run_dir, plan)
    except OSError as error:
        raise ConfigError(
            "run.dir", run_dir, f"cannot be written ({error.strerror})", "choose another run.dir, or make it writable"
        ) from error
    write_status(run_dir, state="running", attempt=attempt)
    return run_dir, attempt


def _take(config: Config, place: Path, plan: dict[str, Any]) -> int:
    """Take `place` for a new run or one that goes on; returns the number of the attempt."""
    if config.resume is not None and (place / CONFIG_FILE).is_file():
        hold(place)
        attempt = int(read_status(place).get("attempt", 1)) + 1
        write_atomic(place / f"config_{attempt - 1}.yaml", (place / CONFIG_FILE).read_text(encoding="utf-8"))
        dump_config(config, place / CONFIG_FILE)
    else:
        attempt = 1
        place.mkdir(parents=True, exist_ok=True)
        _claim_new(config, place)
        hold(place)
    write_atomic(place / PLAN_FILE, json.dumps(plan, indent=2) + "\n")
    return attempt


def _take_site(config: Config, run_dir: Path, plan: dict[str, Any]) -> tuple[Path, int]:
    """Take one site's directory, and make the run's own or agree with it."""
    site = config.federation.site
    assert site is not None
    place = site_dir(run_dir, site)
    run_dir.mkdir(parents=True, exist_ok=True)
    hold(run_dir, shared=True)
    with _turn(run_dir):
        if config.resume is None:
            if not (run_dir / CONFIG_FILE).exists():
                write_atomic(run_dir / PLAN_FILE, json.dumps(plan, indent=2) + "\n")
                with contextlib.suppress(ConfigError):  # a run of one site was quicker: the next line says so
                    _claim_new(run_config(config), run_dir)
            _check_site(config, run_dir)
            return place, _take(config, place, plan)
        place.mkdir(parents=True, exist_ok=True)
        hold(place)
        for other in site_dirs(run_dir):
            if other != place and _is_held(other):
                check_agreement(config, load_config(other / CONFIG_FILE), f"site {other.name} is going on with")
        dump_config(with_shared(load_config(run_dir / CONFIG_FILE), config), run_dir / CONFIG_FILE)
        return place, _take(config, place, plan)


def claim_sites(config: Config, run_dir: Path, endpoint: str, plan: dict[str, Any]) -> list[tuple[Path, int]]:
    """In a claimed run of several sites: make or renew each site's directory; return them with the numbers of their attempts."""
    found = []
    for site in range(config.federation.sites):
        place = site_dir(run_dir, site)
        place.mkdir(parents=True, exist_ok=True)
        own = site_config(config, site, endpoint)
        attempt = _take(own, place, plan)
        write_status(place, state="running", attempt=attempt)
        found.append((place, attempt))
    return found


_held: dict[Path, IO[str]] = {}
_TRIES = 3
"""How often a lock is tried: who only looks whether a run is held has it for a moment."""


def hold(place: Path, shared: bool = False) -> None:
    """Take the run for the life of this process, so that nobody else goes on with it meanwhile; ConfigError when somebody has it.

    `shared`: together with others that take it so, as sites do that are started one by one. The system lets go of the lock when the
    process, and those that it gave `descriptors` to, have ended, however they end. A process may take a run again.
    """
    resolved = place.resolve()
    if resolved in _held:
        return
    stream = (resolved / LOCK_FILE).open("a+", encoding="utf-8")
    for left in range(_TRIES, 0, -1):
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if left > 1:
                time.sleep(0.05)
                continue
            stream.close()
            what = f"site {place.name}" if run_of(place) != place else "the run"
            rule = f"{what} is still going on in another process"
            raise ConfigError("resume", run_of(place), rule, "wait for it, or stop it first") from None
    _held[resolved] = stream


def descriptors(place: Path) -> tuple[int, ...]:
    """File descriptors of what this process holds of a run or a site: a child that has them holds it, too, until it ends."""
    return tuple(_held[each].fileno() for each in dict.fromkeys((place.resolve(), run_of(place).resolve())) if each in _held)


def _is_held(place: Path) -> bool:
    """Whether a process has the run or the site; True also on a file system without locks, where nobody can say."""
    try:
        with (place / LOCK_FILE).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def _turn(run_dir: Path) -> Iterator[None]:
    """Wait for the turn to change what the sites share, for `TURN_SECONDS` at most: a file server that is gone must not stop a run."""
    with (run_dir / TURN_FILE).open("a+", encoding="utf-8") as stream:
        end = time.monotonic() + TURN_SECONDS
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.05)
        yield


def _claim_new(config: Config, run_dir: Path) -> None:
    descriptor, draft = tempfile.mkstemp(dir=run_dir, prefix=".config.")
    os.close(descriptor)
    try:
        dump_config(config, draft)
        os.link(draft, run_dir / CONFIG_FILE)
    except FileExistsError as error:
        raise _taken("run.name", config.run.name, run_dir) from error
    finally:
        os.unlink(draft)


def write_status(run_dir: Path, *, state: str, attempt: int, **details: Any) -> None:
    """Write `status.json` whole. `state`: `running`, `completed`, `preempted` (saved when asked to stop), `stopped` or `failed`.

    `details` say more. The time of the attempt's start is kept from the file that is replaced. A site's status goes into its run's too.
    """
    before = read_status(run_dir)
    now = time.time()
    started = before.get("started", now) if before.get("attempt") == attempt else now
    status = {"state": state, "attempt": attempt, "host": socket.gethostname(), "started": started, "updated": now, **details}
    write_atomic(run_dir / STATUS_FILE, json.dumps(status, indent=2) + "\n")
    whole = run_of(run_dir)
    if whole != run_dir:
        with _turn(whole):
            _write_run_status(whole)


def _write_run_status(run_dir: Path) -> None:
    """Put the run's status together from those of its sites, as far as they are on this file system."""
    before, now = read_status(run_dir), time.time()
    status = {"attempt": before.get("attempt", 1), "started": before.get("started", now), "updated": now, **_of_sites(run_dir)}
    write_atomic(run_dir / STATUS_FILE, json.dumps(status, indent=2) + "\n")


def _of_sites(run_dir: Path) -> dict[str, Any]:
    """State, exit code and `sites` of a run, from the statuses of its sites as they are now."""
    sites = {path.name: {key: value for key, value in current_status(path).items() if key in _SHOWN} for path in site_dirs(run_dir)}
    states = [status.get("state", "running") for status in sites.values()]
    state = next((name for name in ("running", "failed", "died", "stopped", "preempted") if name in states), "completed")
    if state in ("running", "died"):
        return {"state": state, "sites": sites}
    code = next((site.get("exit_code") for site in sites.values() if site.get("state") == state), 0)
    return {"state": state, "exit_code": code, "sites": sites}


def current_status(run_dir: Path) -> dict[str, Any]:
    """`read_status` for who wants to know how a run stands: `running` is `died` when the process that said so has ended without a word.

    The lock tells. Of a run of another host, whose locks need not be seen here, `running` with that `host` is all that is known.
    """
    status = read_status(run_dir)
    if status.get("state") != "running":
        return status
    if site_dirs(run_dir) != [run_dir]:
        return {**status, **_of_sites(run_dir)}
    if status.get("host") == socket.gethostname() and not _is_held(run_dir):
        return {**status, "state": "died"}
    return status


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return what `status.json` says; {} when there is none. Raises ConfigError for a file that nobody here wrote so."""
    file = run_dir / STATUS_FILE
    try:
        status = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError("status", file, f"the file is not JSON ({error})", "delete it: the next start writes another") from error
    return status if isinstance(status, dict) else {}
