"""`leantron pretrain -m`: a Hydra multirun in the launching process; each job is its own torchrun child and run directory.

Hydra's sweepers and launchers work unchanged (`hydra/sweeper=optuna`, `hydra/launcher=submitit_slurm`): the task that they call composes
nothing, it checks the job's configuration, claims the run's directory and waits for its torchrun. The objective it returns is the run's
last `val_loss`.

Job n of the sweep `<name>` is the run `<name>_<n>`; the sweep's own folder, `runs/<name>`, holds Hydra's `multirun.yaml` and nothing of a
run. The jobs that are known beforehand are all checked before the first starts. A job that fails does not stop the others: it is
named, and the exit code is 1 at the end.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from launch.devices import check_devices, visible_gpus
from launch.sites import REAL, Programs, run_claimed
from train.config.check import check
from train.config.compose import HYDRA_VERSION_BASE, compose, from_container, register_defaults, validate_overrides
from train.config.errors import ConfigError
from train.config.place import RUNS_DIR, check_place, made_up_name, named, read_status, site_dirs
from train.config.plan import make_plan
from train.config.schema import Config
from train.engine.layout import processes_of_host, processes_of_site


def sweep(overrides: Sequence[str], dry_run: bool = False, programs: Programs = REAL) -> int:
    """Run a sweep; returns 0, or 1 when a job failed. Raises ConfigError before the first job when one of them cannot run."""
    name, given = _sweep_name(overrides)
    jobs = _known_jobs([*overrides, *given])
    places = [Path(_checked(compose(job), number).run.dir or "") for number, job in enumerate(jobs)]
    if dry_run:
        for number, (place, job) in enumerate(zip(places, jobs, strict=True)):
            print(f"job {number}: {place}  {' '.join(text for text in job if text not in given)}")
        return 0
    task = partial(run_job, programs=programs)
    try:
        with _hydra() as hydra:
            hydra.multirun(config_name="config", task_function=task, overrides=[*_hydra_settings(overrides, name), *overrides, *given])
    except JobFailed as error:
        print(f"sweep {name}: {_failed(places)}; the last one: {error}", file=sys.stderr)
        return 1
    except HydraException as error:
        raise ConfigError("-m", " ".join(overrides), f"the sweep cannot start ({error})", "correct the override") from error
    return 0


class JobFailed(RuntimeError):
    """A job of a sweep ended with another exit code than 0."""


def run_job(composed: DictConfig, programs: Programs) -> float | None:
    """Hydra's task: run one job, all its sites, to its end and return its last validation loss (None when it had no validation).

    Raises JobFailed, which Hydra's sweepers take as a failed trial.
    """
    number = int(HydraConfig.get().job.num)
    config = _checked(from_container(composed), number)
    overrides = " ".join(HydraConfig.get().overrides.task)
    plan = make_plan(config, processes_of_site(config))
    run_dir, code = run_claimed(config, plan, programs, lambda place: print(f"job {number}: {place}  {overrides}", flush=True))
    if any(read_status(place).get("state") in ("stopped", "preempted") for place in site_dirs(run_dir)):
        raise KeyboardInterrupt
    if code != 0:
        raise JobFailed(f"job {number}, {run_dir}, ended with exit code {code}")
    return last_validation(run_dir)


def last_validation(run_dir: Path) -> float | None:
    """Return the last `val_loss` of the run's `metrics.jsonl`, the mean over its sites; None when there is none."""
    losses = []
    for path in (place / "metrics.jsonl" for place in site_dirs(run_dir)):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        losses += [line["val_loss"] for line in map(json.loads, lines) if "val_loss" in line][-1:]
    return sum(losses) / len(losses) if losses else None


def _checked(config: Config, number: int) -> Config:
    """Check one job's configuration and give it its run directory."""
    if config.resume is not None:
        raise ConfigError("resume", config.resume, "a sweep makes new runs", "resume one run without -m")
    if config.parallel.hosts != 1:
        raise ConfigError("parallel.hosts", config.parallel.hosts, "the launcher starts the processes of one host", "use parallel.hosts=1")
    if config.federation.site is not None:
        rule = "a sweep starts all sites of its jobs on this host"
        raise ConfigError("federation.site", config.federation.site, rule, "leave it out, or run the jobs one by one")
    config = replace(config, parallel=replace(config.parallel, processes=processes_of_host(config)))
    config = check(config, processes_of_site(config))
    check_devices(config, visible_gpus())
    run = replace(config.run, name=f"{config.run.name}_{number}", dir=f"{config.run.dir}_{number}" if config.run.dir else None)
    config = named(replace(config, run=run))
    check_place(config)
    return config


def _sweep_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Return the sweep's name and the override that gives it to the jobs; made up from the date and the time when none is given."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("run.name=")]
    if names:
        return names[-1].replace(",", "-"), []
    name = made_up_name("sweep")
    return name, [f"run.name={name}"]


def _known_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job; for a sweeper other than Hydra's basic one, those of one job without the swept keys."""
    register_defaults()
    with _hydra():
        parsed = validate_overrides(overrides, sweep=True)
    own = [override for override in parsed if not _is_hydra(override)]
    if any(override.key_or_group == "hydra/sweeper" for override in parsed):
        return [[_text(override) for override in own if not override.is_sweep_override()]]
    try:
        (jobs,) = BasicSweeper.split_arguments(own, None)
    except HydraException as error:
        raise ConfigError("-m", " ".join(overrides), str(error), "use key=a,b or choice(...), or another hydra/sweeper") from error
    return [list(job) for job in jobs]


def _is_hydra(override: Override) -> bool:
    return override.key_or_group.startswith(("hydra.", "hydra/")) and override.key_or_group != "hydra.searchpath"


def _text(override: Override) -> str:
    return str(override.input_line)


def _hydra_settings(overrides: Sequence[str], name: str) -> list[str]:
    """Keep Hydra's files in the sweep's folder, and its log out of the way; what the user set stands."""
    settings = {
        "hydra.sweep.dir": f"{RUNS_DIR}/{name}",
        "hydra.sweep.subdir": ".",
        "hydra.output_subdir": "null",
        "hydra/job_logging": "none",
        "hydra/hydra_logging": "none",
    }
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    return [f"{key}={value}" for key, value in settings.items() if key not in given]


class _hydra:
    """Hydra's own object with our groups, for the length of a `with`."""

    def __enter__(self) -> Hydra:
        from hydra._internal.utils import create_config_search_path

        from train.config.compose import CONFIG_DIR

        register_defaults()
        self._before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        from hydra import version

        version.setbase(HYDRA_VERSION_BASE)
        return Hydra.create_main_hydra2(task_name="leantron", config_search_path=create_config_search_path(str(CONFIG_DIR)))

    def __exit__(self, *_: Any) -> None:
        GlobalHydra.instance().clear()
        if self._before is not None:
            GlobalHydra.instance().hydra = self._before


def _failed(places: Sequence[Path]) -> str:
    """How many of the sweep's runs failed; `places` are those known beforehand, a sweeper may have added some with higher numbers."""
    ran, base = list(places), str(places[0]).removesuffix("_0")
    while Path(f"{base}_{len(ran)}").is_dir():
        ran.append(Path(f"{base}_{len(ran)}"))
    failed = [place.name for place in ran if read_status(place).get("state") == "failed"]
    return f"{len(failed)} of its runs failed ({', '.join(failed)})"
