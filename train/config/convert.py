"""Plain nested mappings to and from the frozen dataclasses, strictly: no unknown key, no coerced type, no missing value."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Union

from train.config.errors import ConfigError
from train.config.schema import Config

MISSING = "???"
_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@cache
def _hints(cls: typing.Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def known_keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every dotted leaf key of the schema with its annotation, in order of declaration."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = _hints(cls)[field.name]
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            keys.update(known_keys(typing.cast(type, hint), f"{key}."))
        else:
            keys[key] = hint
    return keys


def sections() -> tuple[str, ...]:
    """Return the top-level keys that hold other keys (`train`, `model`, ...)."""
    return tuple(field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(_hints(Config)[field.name]))


def unknown_key(key: str, value: object) -> ConfigError:
    """Return the error for a key that the schema does not have, with the closest one that it has."""
    keys = [*known_keys(), *sections()]
    closest = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not closest:
        last = {candidate.rpartition(".")[2]: candidate for candidate in reversed(keys)}
        closest = [last[name] for name in difflib.get_close_matches(key.rpartition(".")[2], list(last), n=1, cutoff=0.75)]
    remedy = f"did you mean {closest[0]}?" if closest else "`leantron pretrain --help` lists every key"
    return ConfigError(key, value, "there is no such key", remedy)


def describe(hint: Any) -> str:
    """Return the annotation in a user's words."""
    if hint in _NAMES:
        return _NAMES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin in (list, tuple):
        inner = describe(arguments[0])
        return f"a list of {inner.removeprefix('an ').removeprefix('a ')}s" if not inner.startswith("text") else "a list of texts"
    if origin is dict:
        return "a mapping"
    return "any value"


def convert(hint: Any, value: Any, key: str) -> Any:
    """Return `value` as the annotation `hint` wants it, or raise :class:`ConfigError` naming `key`.

    An integer is accepted where a number or a text is asked for; nothing else is coerced.
    """
    if value == MISSING:
        raise ConfigError(key, value, f"a value is required ({describe(hint)})", f"give {key}=...")
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, f"{key}.")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        for argument in arguments:
            try:
                return convert(argument, value, key)
            except ConfigError:
                continue
    elif origin is list and isinstance(value, (list, tuple)):
        return [convert(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value)]
    elif origin is dict and isinstance(value, Mapping):
        return {str(name): convert(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(key, value, "a finite number is expected", "give an ordinary number")
        return float(value)
    elif hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ConfigError(key, value, f"expected {describe(hint)}, got {_kind(value)}", _type_remedy(hint, value, key))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return _NAMES.get(type(value), type(value).__name__)


def _type_remedy(hint: Any, value: Any, key: str) -> str:
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"write {key}={int(value)}"
    if typing.get_origin(hint) is list and not isinstance(value, Mapping):
        return f"write {key}=[{value}]"
    return f"give {describe(hint)}"


def build[T](cls: type[T], data: Any, prefix: str = "") -> T:
    """Return the dataclass `cls` from a nested mapping; keys left out take the dataclass's default."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            prefix.rstrip(".") or "config", data, f"expected a mapping, got {_kind(data)}", f"set {prefix or ''}<key>=<value>"
        )
    hints = _hints(typing.cast(typing.Hashable, cls))
    for name, value in data.items():
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", value)
    return cls(**{str(name): convert(hints[str(name)], value, f"{prefix}{name}") for name, value in data.items()})


def plain(config: Any) -> dict[str, Any]:
    """Return the dataclass tree as nested dicts and lists, ready for YAML or JSON."""
    return dataclasses.asdict(config)
