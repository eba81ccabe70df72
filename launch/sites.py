"""Start a claimed run: one torchrun world, or one for each of its sites, each in its directory with its share of this host.

    runs/<name>/sites/<k>/config.yaml · status.json · logs/ · ...       one site
    runs/<name>/config.yaml · plan.json · status.json · logs/meeting.log       all of them

The sites of one host meet on 127.0.0.1 at a port that the system chooses. Of sites that are started one by one, each by a launcher of its
own host, the launcher of site 0 serves `federation.endpoint`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.devices import gpu_names, share_cores, share_gpus, sites_here
from launch.supervise import supervise
from launch.torchrun import AGENT, WORKER, World, child_environment
from train.config.place import claim, claim_sites, hold, read_status, run_of, site_dir
from train.config.schema import Config
from train.engine.layout import processes_of_host, processes_of_site
from train.meeting import SERVER, MeetingPoint, check_endpoint, free_port


@dataclass(frozen=True)
class Programs:
    """What is started; tests put small programs there."""

    worker: Sequence[str] = WORKER
    """What torchrun starts on each process, with `--config <directory>/config.yaml`."""
    server: Sequence[str] = SERVER
    """What is started where sites meet, with `<host>:<port>`."""
    agent: Sequence[str] = AGENT
    """What starts the processes of a world."""


REAL = Programs()


def run_claimed(config: Config, plan: dict[str, Any], programs: Programs, tell: Callable[[Path], None] | None = None) -> tuple[Path, int]:
    """Claim the run's directory, start the run and wait for its end; returns the directory and the exit code.

    `tell` is called with the directory once it is claimed. Raises ConfigError when the run cannot start.
    """
    federation = config.federation
    alone = federation.sites > 1 and federation.site is not None
    if alone and config.resume is not None:
        assert federation.site is not None
        own = site_dir(Path(config.resume), federation.site)
        if own.is_dir():
            hold(own)  # whoever has this site is known before it waits for the others
    serves = check_endpoint(config) if alone else False
    place, attempt = claim(config, plan)
    if tell is not None:
        tell(place)
    if federation.sites > 1 and not alone:
        return place, _all_sites(config, place, plan, programs)
    environment = child_environment(processes_of_host(config))
    go_on = f"resume={place}"
    meeting = None
    if alone:
        assert federation.endpoint is not None
        go_on = f"resume={run_of(place)} federation.site={federation.site}"
        if serves:
            log = place / "logs" / "meeting.log"
            meeting = MeetingPoint(federation.endpoint, federation, log, programs.server, environment, wait_for_others=True)
    world = World(
        run_dir=place, attempt=attempt, processes=processes_of_host(config), environment=environment, worker=programs.worker,
        agent=programs.agent, max_restarts=config.train.max_restarts, go_on=go_on, patience=federation.deadline if alone else 0.0,
    )  # fmt: skip
    supervise([world], meeting)
    assert world.code is not None
    return place, world.code


def _all_sites(config: Config, run_dir: Path, plan: dict[str, Any], programs: Programs) -> int:
    sites, processes = config.federation.sites, processes_of_site(config)
    endpoint = f"127.0.0.1:{free_port()}"
    environment = child_environment(processes_of_host(config))
    cores = share_cores(sorted(os.sched_getaffinity(0)), sites) if hasattr(os, "sched_getaffinity") else [None] * sites
    gpus = share_gpus(gpu_names(), sites, processes)
    worlds = [
        World(
            run_dir=place, attempt=attempt, processes=processes, worker=programs.worker, agent=programs.agent,
            max_restarts=config.train.max_restarts, patience=config.federation.deadline,
            environment=environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus[site])} if gpus[site] else {}),
            cores=cores[site], speaks=site == 0,
        )
        for site, (place, attempt) in enumerate(claim_sites(config, run_dir, endpoint, plan))
    ]  # fmt: skip
    supervise(worlds, MeetingPoint(endpoint, config.federation, run_dir / "logs" / "meeting.log", programs.server, environment))
    return _report(run_dir, worlds)


def _report(run_dir: Path, worlds: Sequence[World]) -> int:
    """Say how each site ended unless all completed; returns the first failed site's exit code, or of one that was stopped, else 0."""
    statuses = [read_status(world.run_dir) for world in worlds]
    states = [str(status.get("state")) for status in statuses]
    if set(states) != {"completed"}:
        told = []
        for site, (state, status) in enumerate(zip(states, statuses, strict=True)):
            detail = {"failed": status.get("reason"), "preempted": f"at step {status['step']}" if status.get("step") else None}.get(state)
            told.append(f"site {site} {state}" + (f" ({detail})" if detail else ""))
        print(f"{run_dir}: {', '.join(told)}; go on with `leantron pretrain resume={run_dir}`", file=sys.stderr, flush=True)
    for kind in ("failed", "stopped"):
        codes = [world.code for world, state in zip(worlds, states, strict=True) if state == kind and world.code]
        if codes:
            return codes[0]
    return 0


def placement(config: Config) -> str | None:
    """Where the sites of this host will run, in one line for the plan; None for a run of one world."""
    sites, processes = sites_here(config), processes_of_site(config)
    if sites == 1:
        return None
    each = f"{processes} process{'es' if processes > 1 else ''} each"
    names = gpu_names()
    if not names:
        return f"{sites} sites on this host, {each}, on the CPU"
    shares = share_gpus(names, sites, processes)
    where = ", ".join(f"site {site} on GPU {' '.join(share)}" for site, share in enumerate(shares))
    shared = "; sites share GPUs (federation.share_gpus=true): their speed and memory are not those of sites with their own"
    return f"{sites} sites on this host, {each}: {where}{shared if len(names) < sites * processes else ''}"
