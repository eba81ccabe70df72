"""One configuration for a run of several sites, one for each of its sites, and what the sites must agree in.

A run's own `config.yaml` knows no site: `federation.site` and `federation.endpoint` are null and `parallel.processes` counts all sites. A
site's, in `sites/<k>/`, has its number, where the sites meet, and its own processes.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from train.config.convert import known_keys
from train.config.errors import ConfigError, show
from train.config.schema import Config
from train.engine.layout import processes_of_site

MAY_DIFFER = (
    "run.dir", "resume", "federation.site", "federation.endpoint", "federation.share_gpus", "parallel.processes", "parallel.hosts",
    "parallel.ep", "parallel.sp", "parallel.distributed_optimizer", "train.micro_batch", "train.recompute", "train.timeout",
    "train.hang_timeout", "train.max_restarts", "attention.backend", "data.cache", "offload.", "tracking.",
)  # fmt: skip
"""Keys, or whole sections, in which the sites of a run may differ: machines are different. Everything else makes the model."""


def site_config(config: Config, site: int, endpoint: str | None) -> Config:
    """The configuration of one site of a run whose configuration knows no site."""
    federation = replace(config.federation, site=site, endpoint=endpoint)
    return replace(config, federation=federation, parallel=replace(config.parallel, processes=processes_of_site(config)))


def run_config(config: Config) -> Config:
    """The run's configuration, from the one of a site."""
    federation = replace(config.federation, site=None, endpoint=None)
    processes = processes_of_site(config) * federation.sites
    return replace(config, federation=federation, parallel=replace(config.parallel, processes=processes), resume=None)


def with_shared(config: Config, other: Config) -> Config:
    """`config` with what the sites of a run share taken from `other`."""
    for key in known_keys():
        if not listed(key, MAY_DIFFER):
            config = put(config, key, get(other, key))
    return config


def check_agreement(config: Config, other: Config, whose: str) -> None:
    """Raise ConfigError, naming the first key, when `config` differs from `other` in what the sites of a run share.

    `whose`: what has the other value, in words that a value follows: `runs/x was made with`.
    """
    for key in known_keys():
        mine, theirs = get(config, key), get(other, key)
        if mine != theirs and not listed(key, MAY_DIFFER):
            rule = f"{whose} {key}={show(theirs)}, and the sites of a run agree in it"
            other_run = "" if config.resume is not None else ", or another run.name"
            raise ConfigError(key, mine, rule, f"use {key}={show(theirs)}{other_run}")


def listed(key: str, names: tuple[str, ...]) -> bool:
    """Whether `names` has a key, or its section as `section.`."""
    return key in names or key.startswith(tuple(name for name in names if name.endswith(".")))


def get(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def put(config: Any, key: str, value: Any) -> Any:
    """The dataclass tree with the value of a dotted key replaced."""
    name, _, rest = key.partition(".")
    assert is_dataclass(config) and not isinstance(config, type) and name in {field.name for field in fields(config)}
    return replace(config, **{name: put(getattr(config, name), rest, value) if rest else value})
