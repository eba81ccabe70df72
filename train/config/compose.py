"""Overrides to a :class:`Config`: Hydra composes the groups of `configs/`, our own strict conversion types the result.

    config = compose(["experiment=demo", "train.steps=10"])

One process composes, ranks only read (`load_config`). Everything that can be wrong on a command line ends in one `ConfigError` of one
line. Environment variables are never read into a run: `${oc.env:...}` is refused, because the resolved configuration is written to disk
and sent to the tracker; keys, tokens and passwords stay in the environment of the processes that need them.
"""

import difflib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

import configs
from train.config.convert import build, known_keys, plain, sections, unknown_key
from train.config.errors import ConfigError
from train.config.schema import Config

CONFIG_DIR = Path(configs.__file__).resolve().parent
HYDRA_VERSION_BASE = "1.3"
_REFUSED = "oc.env is refused"
ENVIRONMENT_RULE = "environment variables are not read into a run, whose configuration is written to disk"
ENVIRONMENT_REMEDY = "give the value itself; secrets stay in the environment of the process that uses them"


def register_defaults() -> None:
    """Put the dataclasses' defaults where `configs/config.yaml` finds them, so that every key can be overridden."""
    ConfigStore.instance().store(name="schema", node=plain(Config()), provider="leantron")


def compose(overrides: Sequence[str]) -> Config:
    """Return the configuration that the overrides make, typed but not yet checked across fields.

    Raises ConfigError (one line: key, value, rule, remedy) for anything that cannot be understood.
    """
    register_defaults()
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base=HYDRA_VERSION_BASE, job_name="leantron"):
        validate_overrides(overrides)
        try:
            composed = hydra_compose(config_name="config", overrides=list(overrides))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
            raise _composition_error(overrides, error) from error
    return from_container(composed)


def from_container(composed: Any) -> Config:
    """Resolve the interpolations of a composed configuration and type it."""
    with _resolvers_without_environment():
        try:
            data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        except OmegaConfBaseException as error:
            raise _interpolation_error(composed, error) from error
    assert isinstance(data, dict)
    data.pop("hydra", None)
    return build(Config, data)


def _interpolation_error(composed: Any, error: OmegaConfBaseException) -> ConfigError:
    key = str(error.full_key)
    value: Any = OmegaConf.to_container(composed, resolve=False)
    for part in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    if _REFUSED in str(error):
        return ConfigError(key, value, ENVIRONMENT_RULE, ENVIRONMENT_REMEDY)
    return ConfigError(key, value, f"the interpolation does not resolve ({_first_line(error)})", "name a key that exists")


def validate_overrides(overrides: Sequence[str], sweep: bool = False) -> list[Override]:
    """Parse the overrides and refuse those that the schema does not know; `sweep` allows `a=1,2` and `hydra.*`.

    Needs an initialised Hydra, whose loader knows the groups' options.
    """
    loader = GlobalHydra.instance().config_loader()
    parsed = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise _malformed(text, error) from error
        _validate_override(override, loader, overrides, sweep)
        parsed.append(override)
    return parsed


def _malformed(text: str, error: Exception) -> ConfigError:
    key, equals, value = text.partition("=")
    if not equals:
        remedy = f"write {key}=<value>" if key in known_keys() else "write key=value"
        return ConfigError(key, "", "an override has the form key=value", remedy)
    return ConfigError(key, value, f"the override cannot be parsed ({_first_line(error)})", f"quote the value: '{key}=\"...\"'")


def _validate_override(override: Override, loader: ConfigLoader, overrides: Sequence[str], sweep: bool) -> None:
    key = override.key_or_group
    value = None if override.is_delete() and override.value() is None else _text(override)
    if override.is_delete():
        remedy = f"set {key} to another option or value" if key in (*known_keys(), *sections()) else "leave it out"
        raise ConfigError(f"~{key}", value, "keys and groups cannot be deleted", remedy)
    if key.startswith(("hydra.", "hydra/")):
        if not sweep and key != "hydra.searchpath":
            raise ConfigError(key, value, "hydra's own settings are for sweeps", "use it with -m, or leave it out")
        if key == "hydra.searchpath":
            _validate_search_path(override)
        return
    if override.is_sweep_override() and not sweep:
        raise ConfigError(
            key, value, "several values are a sweep", f"sweep with `leantron pretrain -m ...`, or write a list as {key}=[...]"
        )
    if override.package is not None:
        raise ConfigError(f"{key}@{override.package}", value, "groups have fixed places in the configuration", f"write {key}=<option>")
    groups = loader.list_groups("")
    known = key in groups or key in known_keys() or any(key == name for name in sections())
    if not known:
        raise unknown_key(f"{'++' if override.is_force_add() else '+' if override.is_add() else ''}{key}", value)
    if override.is_add():
        raise ConfigError(f"+{key}", value, "the key exists already, + is for adding", f"write {key}={_text(override)}")
    if key in sections() and isinstance(override.value(), Mapping):
        _validate_nested(key, override.value())
    if key in groups and not override.is_sweep_override():
        _validate_option(key, override, loader, overrides)


def _validate_search_path(override: Override) -> None:
    value = override.value()
    for entry in value if isinstance(value, list) else [value]:
        text = entry.text if isinstance(entry, QuotedString) else str(entry)
        if not text.startswith("pkg://") and not Path(text.removeprefix("file://")).is_dir():
            raise ConfigError(
                override.key_or_group, text, "is not a folder", "give a folder that holds groups, as hydra.searchpath=[folder]"
            )


def _validate_nested(prefix: str, values: Any) -> None:
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if key not in known_keys():
            raise unknown_key(key, value)


def _validate_option(group: str, override: Override, loader: ConfigLoader, overrides: Sequence[str]) -> None:
    value = override.value()
    if isinstance(value, Mapping) and group in sections():
        raise ConfigError(group, _text(override), f"{group} takes the name of an option", f"set its keys one by one: {group}.<key>=<value>")
    search = [text for text in overrides if text.startswith("hydra.searchpath=")]
    options = loader.get_group_options(group, ObjectType.CONFIG, config_name="config", overrides=search)
    name = value.text if isinstance(value, QuotedString) else str(value)
    if not isinstance(value, (str, QuotedString)) or name not in options:
        closest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
        hint = f"did you mean {closest[0]}? " if closest else ""
        raise ConfigError(group, _text(override), f"there is no such option of {group}", f"{hint}choose one of {', '.join(options)}")


def _text(override: Override) -> str:
    return override.get_value_string() if override.value_type is not None else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _composition_error(overrides: Sequence[str], error: Exception) -> ConfigError:
    """Errors that the checks before did not foresee: a broken YAML of the user's search path, a type that Hydra itself refuses."""
    text = " ".join(str(error).split())
    rule = f"the configuration does not compose ({text})"
    return ConfigError("overrides", " ".join(overrides), rule, "correct the named file or override")


def _refuse_environment(*_: Any) -> NoReturn:
    raise PermissionError(_REFUSED)


@contextmanager
def _resolvers_without_environment() -> Iterator[None]:
    """Replace `oc.env` while a run's configuration is resolved; Hydra's own configuration may use it before and after."""
    resolvers: dict[str, Callable[..., Any]] = BaseContainer._resolvers
    original = resolvers["oc.env"]
    OmegaConf.register_new_resolver("oc.env", _refuse_environment, replace=True)
    try:
        yield
    finally:
        resolvers["oc.env"] = original


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read a run's resolved `config.yaml`, as strictly as a command line. Raises ConfigError naming the file or the key."""
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", file, f"the file cannot be read ({error.strerror})", "give the config.yaml of a run") from error
    except yaml.YAMLError as error:
        raise ConfigError("config", file, f"the file is not YAML ({_first_line(error)})", "give the config.yaml of a run") from error
    return build(Config, data)


def dump_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the resolved configuration as YAML, whole or not at all."""
    write_atomic(path, yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))


def write_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file through a temporary neighbour, so that readers see the old or the new one."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
