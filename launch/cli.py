"""The command line, `leantron <command> ...`. Mistakes end in one line on stderr and exit code 2.

A new command is one row of `COMMANDS`: its function takes the arguments after the command's name and returns the exit code.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from launch.packages import ForeignPackage, use_own_packages

BAD_INPUT = 2


@dataclass(frozen=True)
class Command:
    """A row of the table."""

    arguments: str
    """What follows the name, as the help shows it."""
    words: str
    """What it does, in one line."""
    function: str
    """`module:function`, imported when the command is used; it answers -h and --help itself."""


COMMANDS = {
    "pretrain": Command(
        "[--dry-run] [-m] <overrides>",
        "train: `leantron pretrain experiment=demo`; --help lists every key",
        "launch.commands:pretrain",
    ),
    "plan": Command(
        "[--json] <overrides>", "check a run and show its plan; for several sites also what they hold and move", "launch.plan:plan_command"
    ),
    "config": Command("<overrides>", "print the configuration that the overrides make", "launch.commands:config"),
    "data": Command("build | show", "index text, JSONL or Parquet files for training; look into an index", "launch.commands:data"),
    "generate": Command("<run> --prompt TEXT", "continue a text with a trained run", "train.generate:main"),
    "evaluate": Command(
        "[--json] <run> [<overrides>]", "validation loss of a run's model, of several sites merged and sliced", "train.evaluate:main"
    ),
    "merge": Command("<run>", "make one ordinary run of one site of a run over several", "train.federation.merged_run:main"),
    "checkpoints": Command(
        "<run>",
        "list a run's checkpoints: step, size, whether complete, whether kept for good",
        "launch.commands:checkpoints",
    ),
    "report": Command("<run>", "draw a run's curves and patterns into <run>/report/index.html", "launch.commands:report"),
    "doctor": Command(
        "[--bandwidth]",
        "what this machine offers: devices, packages, attention back ends; --bandwidth: how fast it moves and updates states",
        "launch.commands:doctor",
    ),
}


def usage() -> str:
    """The text of `leantron --help`."""
    shapes = {f"{name} {command.arguments}".rstrip(): command.words for name, command in COMMANDS.items()}
    width = max(map(len, shapes))
    rows = [f"  {shape:<{width}}  {words}" for shape, words in shapes.items()]
    options = [("--version", "version of leantron"), ("-h, --help", "this text, or the one of a command")]
    rows += ["", *(f"  {name:<{width}}  {words}" for name, words in options)]
    return "usage: leantron <command> ...\n\n" + "\n".join(rows) + "\n"


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
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0 if arguments else BAD_INPUT
    if name == "--version":
        print(f"leantron {version()}")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    module, _, function = COMMANDS[name].function.partition(":")
    code = getattr(import_module(module), function)(rest)
    assert isinstance(code, int)
    return code


def _unknown(name: str) -> int:
    import difflib

    from train.config.errors import ConfigError

    closest = difflib.get_close_matches(name, COMMANDS, n=1)
    remedy = f"did you mean {closest[0]}?" if closest else f"use one of {', '.join(COMMANDS)}"
    if "=" in name:
        remedy = f"write `leantron pretrain {name}`"
    raise ConfigError("command", name, "there is no such command", remedy)


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
