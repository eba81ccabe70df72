"""The commands of `leantron` that are made of several parts; the table of all of them is in `launch/cli.py`. Imports come on use."""

import sys
from collections.abc import Sequence
from pathlib import Path

from train.config.errors import ConfigError


def pretrain(rest: Sequence[str]) -> int:
    """`leantron pretrain <overrides>`."""
    if wants_help(rest):
        from launch.help import pretrain_help

        print(pretrain_help(), end="")
        return 0
    from launch.pretrain import pretrain as run

    return run(rest)


def config(rest: Sequence[str]) -> int:
    """`leantron config <overrides>`: print what they compose to, as YAML."""
    if wants_help(rest):
        print("usage: leantron config <overrides>\n\nPrint the configuration that the overrides make, as YAML.")
        return 0
    import yaml

    from train.config.compose import compose
    from train.config.convert import plain

    yaml.safe_dump(plain(compose(rest)), sys.stdout, sort_keys=False, allow_unicode=True)
    return 0


def data(rest: Sequence[str]) -> int:
    """`leantron data build | show`."""
    import argparse

    from train.data.cli import add_arguments, run

    parser = argparse.ArgumentParser(prog="leantron data", description="Index text for training, and look into an index.")
    add_arguments(parser)
    return run(parser.parse_args(list(rest)))


def checkpoints(rest: Sequence[str]) -> int:
    """`leantron checkpoints <run>`."""
    if wants_help(rest):
        print("usage: leantron checkpoints <run>\n\nList a run's checkpoints: step, size, whether complete, whether kept for good.")
        return 0
    from launch.checkpoints import show_checkpoints

    return show_checkpoints(existing_run(rest, "checkpoints"))


def report(rest: Sequence[str]) -> int:
    """`leantron report <run>`."""
    if wants_help(rest):
        print("usage: leantron report <run>\n\nDraw a run's curves and patterns into <run>/report/index.html, one for each site.")
        return 0
    run_dir = existing_run(rest, "report")
    from train.report import write_reports

    for page in write_reports(run_dir):
        print(page)
    return 0


def doctor(rest: Sequence[str]) -> int:
    """`leantron doctor`."""
    if wants_help(rest):
        print(
            "usage: leantron doctor [--bandwidth | <overrides>]\n\nWhat this machine offers: devices, packages, "
            "attention back ends for the configuration that the overrides make.\n\n"
            "  --bandwidth  measure the link between host and GPU and the host's Adam instead; the plan of offload takes them from then on"
        )
        return 0
    for argument in rest:
        if argument != "--bandwidth" and (argument.startswith("-") or "=" not in argument or "--bandwidth" in rest):
            raise ConfigError(argument.partition("=")[0], argument.partition("=")[2], "`leantron doctor` does not take it", "leave it out")
    if "--bandwidth" in rest:
        from launch.bandwidth import bandwidth

        return bandwidth()
    from launch.doctor import doctor as examine

    return examine(rest)


def wants_help(rest: Sequence[str]) -> bool:
    """Whether the arguments ask for a command's help."""
    return "-h" in rest or "--help" in rest


def existing_run(argv: Sequence[str], command: str) -> Path:
    """Return the run's directory, the one argument of `leantron <command> <run>`. Raises ConfigError."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError("run", "", f"`leantron {command}` needs a run", f"give its directory: leantron {command} runs/<name>")
    if len(argv) > 1:
        raise ConfigError(
            argv[1].partition("=")[0], argv[1].partition("=")[2], f"`leantron {command}` takes a run and no more", "leave it out"
        )
    run_dir = Path(argv[0])
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError("run", run_dir, "there is no run: no config.yaml in it", "give the directory of a run")
    return run_dir
