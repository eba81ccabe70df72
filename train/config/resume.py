"""Going on with a run: its own configuration, plus the overrides that may change on the way."""

from collections.abc import Sequence
from pathlib import Path

from train.config.compose import compose, load_config
from train.config.convert import known_keys
from train.config.errors import ConfigError, show
from train.config.schema import Config
from train.config.sites import get, listed, put, site_config

MAY_CHANGE = (
    "train.steps", "train.eval_every", "train.eval_steps", "train.log_every", "train.max_bad_steps", "train.timeout",
    "train.hang_timeout", "train.max_restarts",
    "data.cache", "resume", "checkpoint.", "tracking.", "parallel.", "offload.", "attention.backend",
    "federation.site", "federation.endpoint", "federation.share_gpus", "federation.quorum", "federation.deadline",
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
    saved = _saved(path, asked.federation.site)
    defaults = compose(())
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    for key in known_keys():
        wanted, old = get(asked, key), get(saved, key)
        # An option of a group (`parallel=single`) asks for all of its section, also where that is the default.
        asked_for = key in named or (key.partition(".")[0] in named and listed(key, MAY_CHANGE))
        if (not asked_for and wanted == get(defaults, key)) or wanted == old:
            continue
        if not listed(key, MAY_CHANGE):
            rule = f"the run was made with {key}={show(old)}, and this cannot change on the way"
            raise ConfigError(key, wanted, rule, "leave it out, or start a new run")
        saved = put(saved, key, wanted)
    return saved


def _saved(path: Path, site: int | None) -> Config:
    """The configuration in a run's `config.yaml`, or that of one of its sites."""
    run_dir, saved = path.parent, load_config(path)
    if saved.federation.site is not None:
        root, number = run_dir.parent.parent, saved.federation.site
        rule = f"this is site {number} of the run in {root}"
        raise ConfigError("resume", run_dir, rule, f"write resume={root}, for this site alone with federation.site={number}")
    if site is None or saved.federation.sites == 1:
        return saved
    own = run_dir / "sites" / str(site) / "config.yaml"
    return load_config(own) if own.is_file() else site_config(saved, site, None)
