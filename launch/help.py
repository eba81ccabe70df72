"""`leantron pretrain --help`: every key with its type, default and one line of documentation, read from the dataclasses themselves."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from functools import cache
from pathlib import Path

from train.config.compose import CONFIG_DIR
from train.config.convert import describe
from train.config.errors import show
from train.config.schema import Config

USAGE = """\
usage: leantron pretrain [--dry-run] [-m] [<group>=<option> ...] [<key>=<value> ...]

Compose a run from configs/, check it, print the plan, and train it with torchrun.

  --dry-run       stop after the plan; nothing is written
  -m, --multirun  sweep: <key>=<value>,<value> runs each combination in turn, each its own run
  -h, --help      this text

examples:
  leantron pretrain experiment=demo
  leantron pretrain attention=s2 attention.stride=4 train.steps=50 tracking=none
  leantron pretrain resume=runs/my-run train.steps=500
  leantron pretrain -m experiment=demo optim.lr=1e-3,3e-4
  leantron pretrain experiment=demo federation=two_sites moe=fomoe parallel.ep=1
"""


def pretrain_help() -> str:
    """Return the whole text."""
    parts = [USAGE, "groups:", *_group_lines(), "", "keys (type, default):", *_key_lines()]
    return "\n".join(parts) + "\n"


def group_options() -> dict[str, list[str]]:
    """Return the options of every group that we ship."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in sorted(CONFIG_DIR.iterdir()) if _is_group(folder)
    }


def _is_group(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.yaml"))


def _group_lines() -> list[str]:
    return [f"  {group + '=':<14} {' | '.join(options)}" for group, options in group_options().items()]


def _key_lines() -> list[str]:
    lines: list[str] = []
    section = None
    for key, hint, default, text in documented_keys():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines.append("")
        lines.append(f"  {key}  ({hint}, {default})")
        lines.extend(textwrap.wrap(text, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines


def documented_keys() -> list[tuple[str, str, str, str]]:
    """Return (key, type, default, documentation) of every leaf key, in the order of the schema."""
    return _documented(Config, Config(), "")


def _documented(cls: type, value: object, prefix: str) -> list[tuple[str, str, str, str]]:
    found = []
    hints, texts = typing.get_type_hints(cls), field_documentation(cls)
    for field in dataclasses.fields(cls):
        key, item = f"{prefix}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            found.extend(_documented(type(item), item, f"{key}."))
        else:
            found.append((key, _type_name(hints[field.name]), show(item), texts.get(field.name, "")))
    return found


def _type_name(hint: object) -> str:
    return describe(hint).replace("an ", "").replace("a ", "")


@cache
def field_documentation(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found
