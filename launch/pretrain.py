"""`leantron pretrain`: compose once, check, plan, make the run's directory, start torchrun."""

import sys
from collections.abc import Sequence

from launch.devices import check_devices, visible_gpus
from launch.sites import REAL, Programs, placement, run_claimed
from train.config.errors import ConfigError
from train.config.plan import make_plan
from train.config.publish import SWEEP_FLAGS, prepare
from train.config.resume import compose_run
from train.config.schema import Config
from train.engine.layout import processes_of_host, processes_of_site


def pretrain(argv: Sequence[str], programs: Programs = REAL) -> int:
    """Run the command; returns the exit code. Raises ConfigError before anything is written or started.

    `programs`: what is started on each process (tests put small modules there).
    """
    from launch.plan import show_plan

    options = [text for text in argv if text.startswith("-")]
    overrides = [text for text in argv if not text.startswith("-")]
    for option in options:
        if option not in ("--dry-run", *SWEEP_FLAGS):
            raise ConfigError(option, "", "there is no such option", "`leantron pretrain --help` lists them")
    dry_run = "--dry-run" in options
    if any(flag in options for flag in SWEEP_FLAGS):
        from launch.sweep import sweep

        return sweep(overrides, dry_run=dry_run, programs=programs)
    config = plan_run(overrides)
    plan = make_plan(config, processes_of_site(config))
    show_plan(config, plan)
    where = placement(config)
    if where is not None:
        plan["placement"] = where
        print(f"placement       {where}")
    if dry_run:
        return 0
    sys.stdout.flush()
    return run_claimed(config, plan, programs)[1]


def plan_run(overrides: Sequence[str]) -> Config:
    """Return the checked, named configuration of a run that this host can start. Writes nothing; raises ConfigError."""
    composed = compose_run(overrides)
    parallel = composed.parallel
    if parallel.hosts != 1:
        rule = "the launcher starts the processes of one host"
        remedy = "start `torchrun --nnodes=... --nproc-per-node=... -m train.pretrain <overrides>` on each host"
        raise ConfigError("parallel.hosts", parallel.hosts, rule, remedy)
    config = prepare(overrides, processes_of_site(composed), processes_of_host(composed), 1)
    check_devices(config, visible_gpus())
    return config
