"""The command line, `leantron <command> ...`. Mistakes end in one line on stderr and exit code 2."""

import sys
from collections.abc import Sequence

from launch.packages import ForeignPackage, use_own_packages

USAGE = """\
usage: leantron <command> ...

  pretrain [--dry-run] [-m] <overrides>  train: `leantron pretrain experiment=demo`; --help lists every key
  config <overrides>                     print the configuration that the overrides make
  data build | show                      index text, JSONL or Parquet files for training; look into an index
  generate <run> --prompt TEXT           continue a text with a trained run
  checkpoints <run>                      list a run's checkpoints: step, size, whether complete, whether kept for good
  report <run>                           draw a run's curves and patterns into <run>/report/index.html
  doctor                                 what this machine offers: devices, packages, attention back ends

  --version                              version of leantron
  -h, --help                             this text, or the one of a command
"""
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 for bad input, else what the run ended with."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        use_own_packages()
        return _dispatch(arguments)
    except ForeignPackage as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except ValueError as error:
        if not _is_user_error(error):
            raise
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `leantron ... | head`
        sys.stderr.close()
        return 141


def _is_user_error(error: Exception) -> bool:
    from s2.errors import S2Error
    from train.config.errors import ConfigError
    from train.data.errors import DataError

    return isinstance(error, (ConfigError, DataError, S2Error))


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else BAD_INPUT
    if command == "--version":
        print(f"leantron {version()}")
        return 0
    if command == "pretrain":
        return _pretrain(rest)
    if command == "config":
        from launch.pretrain import print_config

        return print_config(rest)
    if command == "data":
        return _data(rest)
    if command == "generate":
        from train.generate import main as generate_main

        return generate_main(rest)
    if command == "checkpoints":
        return _checkpoints(rest)
    if command == "report":
        return _report(rest)
    if command == "doctor":
        from launch.doctor import doctor

        return doctor()
    return _unknown(command)


def _pretrain(rest: list[str]) -> int:
    if "-h" in rest or "--help" in rest:
        from launch.help import pretrain_help

        print(pretrain_help(), end="")
        return 0
    from launch.pretrain import pretrain

    return pretrain(rest)


def _data(rest: list[str]) -> int:
    import argparse

    from train.data.cli import add_arguments, run

    parser = argparse.ArgumentParser(prog="leantron data", description="Index text for training, and look into an index.")
    add_arguments(parser)
    return run(parser.parse_args(rest))


def _checkpoints(rest: list[str]) -> int:
    if "-h" in rest or "--help" in rest:
        print("usage: leantron checkpoints <run>\n\nList a run's checkpoints: step, size, whether complete, whether kept for good.")
        return 0
    from launch.checkpoints import show_checkpoints
    from launch.pretrain import existing_run

    return show_checkpoints(existing_run(rest, "checkpoints"))


def _report(rest: list[str]) -> int:
    if "-h" in rest or "--help" in rest:
        print("usage: leantron report <run>\n\nDraw a run's curves and patterns into <run>/report/index.html.")
        return 0
    from launch.pretrain import existing_run
    from train.report import write_report

    print(write_report(existing_run(rest, "report")))
    return 0


def _unknown(command: str) -> int:
    import difflib

    from train.config.errors import ConfigError

    commands = ("pretrain", "config", "data", "generate", "checkpoints", "report", "doctor")
    closest = difflib.get_close_matches(command, commands, n=1)
    remedy = f"did you mean {closest[0]}?" if closest else f"use one of {', '.join(commands)}"
    if "=" in command:
        remedy = f"write `leantron pretrain {command}`"
    raise ConfigError("command", command, "there is no such command", remedy)


def version() -> str:
    """Version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as distribution_version

    try:
        return distribution_version("leantron")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
