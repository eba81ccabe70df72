"""How a rank comes by its configuration: from the launcher's file, or, under a `torchrun` started by hand, from rank 0.

    python -m train.pretrain --config runs/x/config.yaml                      # what the launcher starts on each rank
    torchrun --nproc-per-node 2 -m train.pretrain experiment=demo             # by hand: rank 0 composes, checks, makes the directory
    python -m train.pretrain train.steps=10                                   # one process, no torchrun

By hand, rank 0 publishes the configuration, or the error, through the rendezvous store before any process group exists; the others
wait for it (bounded) and, on an error, raise the same one. So exactly one run directory appears, whenever the ranks start. Each site of a
run has a torchrun of its own; rank 0 of site 0 serves the address where they meet.
"""

import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config.check import check
from train.config.compose import load_config
from train.config.convert import build, plain
from train.config.errors import ConfigError, show
from train.config.place import CONFIG_FILE, check_place, claim, hold, named, read_status, run_of, write_status
from train.config.plan import make_plan
from train.config.resume import compose_run
from train.config.schema import Config
from train.meeting import check_endpoint, serve_by_hand

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

WAIT_SECONDS = 120.0
"""How long a rank waits for rank 0's configuration."""
ACKNOWLEDGE_SECONDS = 20.0
"""How long rank 0 waits, after an error, until the others have read it: torchrun ends them all when the first one leaves."""
SWEEP_FLAGS = ("-m", "--multirun")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A rank's configuration and the run that it belongs to."""

    config: Config
    """Checked, derived sizes filled in."""
    run_dir: Path
    """The run's directory."""
    attempt: int
    """Number of this start of the run, from 1."""
    resumed: bool
    """Whether the run goes on from its newest checkpoint."""


def resolve(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Resolved:
    """Return the configuration of this rank. `argv`: `--config FILE`, or overrides. Raises ConfigError, the same on every rank."""
    if any(flag in argv for flag in SWEEP_FLAGS):
        rest = " ".join(text for text in argv if text not in SWEEP_FLAGS)
        remedy = f"run `leantron pretrain -m {rest}` without torchrun"
        raise ConfigError("-m", "", "a sweep starts torchrun itself, once for each job", remedy)
    if argv and (argv[0] == "--config" or argv[0].startswith("--config=")):
        return _from_file(argv)
    world, rank = int(env.get("WORLD_SIZE", "1")), int(env.get("RANK", "0"))
    if world == 1 and "TORCHELASTIC_RUN_ID" not in env:
        return _compose_and_claim(argv, world, env)
    return _through_store(argv, world, rank, env)


def _from_file(argv: Sequence[str]) -> Resolved:
    path = argv[0].partition("=")[2] or (argv[1] if len(argv) > 1 else "")
    rest = list(argv[1:] if argv[0].startswith("--config=") else argv[2:])
    if not path or rest:
        raise ConfigError("--config", " ".join([path, *rest]), "takes one file and no overrides", "give <run>/config.yaml")
    run_dir = Path(path).parent
    attempt = int(read_status(run_dir).get("attempt", 1))
    return Resolved(config=load_config(path), run_dir=run_dir, attempt=attempt, resumed=attempt > 1)


def prepare(overrides: Sequence[str], world: int, processes: int, hosts: int) -> Config:
    """Compose, check and name a run of `world` processes; nothing is written yet. Raises ConfigError."""
    return _checked(compose_run(overrides), world, processes, hosts)


def _checked(config: Config, world: int, processes: int, hosts: int) -> Config:
    config = replace(config, parallel=replace(config.parallel, processes=processes, hosts=hosts))
    config = named(check(config, world))
    check_place(config)
    return config


def _compose_and_claim(overrides: Sequence[str], world: int, env: Mapping[str, str]) -> Resolved:
    processes = int(env.get("LOCAL_WORLD_SIZE", str(world)))
    composed = compose_run(overrides)
    federation = composed.federation
    if federation.sites > 1 and federation.site is None:
        rule = f"torchrun starts the processes of one site, and federation.sites={federation.sites}"
        remedy = "add federation.site=<k> federation.endpoint=<host of site 0>:<port>, or start all sites here with `leantron pretrain`"
        raise ConfigError("federation.site", None, rule, remedy)
    config = _checked(composed, world, processes, max(1, world // processes))
    serves = federation.sites > 1 and check_endpoint(config)
    run_dir, attempt = claim(config, make_plan(config, world))
    if serves:
        serve_by_hand(federation, run_dir)
    return Resolved(config=config, run_dir=run_dir, attempt=attempt, resumed=config.resume is not None)


def _through_store(overrides: Sequence[str], world: int, rank: int, env: Mapping[str, str]) -> Resolved:
    restart, run_id = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("TORCHELASTIC_RUN_ID", "")
    key, place = f"leantron/config/{run_id}/{restart}", f"leantron/run_dir/{run_id}"
    if rank == 0:
        # At first rank 0 composes before torch is imported, so that a mistake is known while the others are still importing it.
        message = _rank_zero(lambda: _compose_and_claim(overrides, world, env)) if restart == "0" else None
        store = _rendezvous_store()
        if message is None:
            run_dir = store.get(place).decode() if store.check([place]) else None
            message = _rank_zero(lambda: _go_on(Path(run_dir)) if run_dir else _compose_and_claim(overrides, world, env))
        if "error" not in message:
            store.set(place, message["run_dir"])
        store.set(key, json.dumps(message))
    else:
        store = _rendezvous_store()
        message = _wait(store, key, rank)
    if "error" not in message:
        return _unpack(message)
    if rank == 0:
        _wait_until_read(store, f"{key}/read", world - 1)
    else:
        store.add(f"{key}/read", 1)
    raise ConfigError(*message["error"])


def _rank_zero(prepare_run: Callable[[], Resolved]) -> dict[str, Any]:
    """Call `prepare_run`; return what the other ranks need to know, or the error."""
    try:
        resolved = prepare_run()
    except ConfigError as error:
        return {"error": [error.key, show(error.value), error.rule, error.remedy]}
    except Exception as error:  # a fault of ours: the others must not wait for the time limit
        return {"error": ["run", "?", f"rank 0 failed while composing ({type(error).__name__}: {error})", "see its output"]}
    return {
        "config": plain(resolved.config), "run_dir": str(resolved.run_dir), "attempt": resolved.attempt, "resumed": resolved.resumed,
    }  # fmt: skip


def _go_on(run_dir: Path) -> Resolved:
    """After torchrun has restarted its workers: the directory is there, made by the workers before."""
    config = load_config(run_dir / CONFIG_FILE)
    if config.federation.site is not None:
        hold(run_of(run_dir), shared=True)
        if check_endpoint(config):
            serve_by_hand(config.federation, run_dir)
    hold(run_dir)
    attempt = int(read_status(run_dir).get("attempt", 1)) + 1
    write_status(run_dir, state="running", attempt=attempt)
    return Resolved(config=config, run_dir=run_dir, attempt=attempt, resumed=True)


def _unpack(message: Mapping[str, Any]) -> Resolved:
    config = build(Config, message["config"])
    return Resolved(config=config, run_dir=Path(message["run_dir"]), attempt=message["attempt"], resumed=message["resumed"])


_kept: "list[Store]" = []


def _rendezvous_store() -> "Store":
    """The store of `env://`, torchrun's own or one that rank 0 opens; kept, since rank 0's end of it serves the others."""
    from torch.distributed.rendezvous import rendezvous

    if not _kept:
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=WAIT_SECONDS)))
        _kept.append(store)
    return _kept[0]


def _wait(store: "Store", key: str, rank: int) -> dict[str, Any]:
    try:
        store.wait([key], datetime.timedelta(seconds=WAIT_SECONDS))
    except RuntimeError as error:
        rule = f"rank {rank} waited {WAIT_SECONDS:.0f} s for rank 0's configuration in vain"
        raise ConfigError("rank 0", "?", rule, "look at rank 0's output; start all ranks within that time") from error
    message = json.loads(store.get(key))
    assert isinstance(message, dict)
    return message


def _wait_until_read(store: "Store", key: str, others: int) -> None:
    deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
    while time.monotonic() < deadline and store.add(key, 0) < others:
        time.sleep(0.1)
