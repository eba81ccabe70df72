"""Going on with a run: its own configuration, plus the overrides that may change on the way."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from train.config.compose import compose, load_config
from train.config.convert import known_keys
from train.config.errors import ConfigError, show
from train.config.schema import Config

MAY_CHANGE = (
    "train.steps", "train.eval_every", "train.eval_steps", "train.log_every", "train.max_bad_steps", "train.timeout",
    "train.hang_timeout", "train.max_restarts",
    "data.cache", "resume", "checkpoint.", "tracking.", "parallel.", "offload.",
)  # fmt: skip


def compose_run(overrides: Sequence[str]) -> Config:
    """Return the configuration of a new run, or, with `resume=<run dir>` among the overrides, of an old one with what may change.

    Raises ConfigError, naming both values, when an override asks for something that the old run was not.
    """
    asked = compose(overrides)
    if asked.resume is None:
        return asked
    path = Path(asked.resume, "config.yaml")
    if not path.is_file():
        raise ConfigError("resume", asked.resume, "there is no run: no config.yaml in it", "give the directory of a run")
    saved = load_config(path)
    defaults = compose(())
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in known_keys():
        wanted, old = get(asked, key), get(saved, key)
        # An option of a group (`parallel=single`) asks for all of its section, also where that is the default.
        asked_for = key in named or (key.partition(".")[0] in named and key.startswith(MAY_CHANGE))
        if (not asked_for and wanted == get(defaults, key)) or wanted == old:
            continue
        if not key.startswith(MAY_CHANGE):
            rule = f"the run was made with {key}={show(old)}, and this cannot change on the way"
            raise ConfigError(key, wanted, rule, "leave it out, or start a new run")
        saved = put(saved, key, wanted)
    return saved


def get(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def put(config: Any, key: str, value: Any) -> Any:
    """Return the dataclass tree with the value of a dotted key replaced."""
    name, _, rest = key.partition(".")
    assert is_dataclass(config) and not isinstance(config, type) and name in {field.name for field in fields(config)}
    return replace(config, **{name: put(getattr(config, name), rest, value) if rest else value})
