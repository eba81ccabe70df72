"""A trained run's model, whole in one process, whatever layout and however many sites it was trained in.

A checkpoint stores global tensors by name, so one process reads any of them. Of a run over several sites the merged model is taken,
which is made on the way when it is not there.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from train.checkpoint.directory import CHECKPOINTS, list_checkpoints, newest_complete
from train.config.compose import load_config
from train.config.errors import ConfigError
from train.config.place import CONFIG_FILE
from train.config.schema import Config
from train.offload.config import OffloadConfig
from train.worker import quiet_dependencies


def is_spread(config: Config) -> bool:
    """Whether this is the configuration of a run over several sites, and not of one of them."""
    return config.federation.sites > 1 and config.federation.site is None


def find(run: Path, step: int | None) -> tuple[Config, Path]:
    """The configuration and the checkpoint of a run's model: of `step`, or the newest complete one.

    Of a run over several sites those of the merged model; a merge that this takes is told on stderr. Raises ConfigError.
    """
    config = load_config(run / CONFIG_FILE)
    if not is_spread(config):
        return config, _checkpoint(run, step)
    from train.federation.merged_run import merged_checkpoint

    path = merged_checkpoint(run, config, step, lambda line: print(line, file=sys.stderr))
    return load_config(path.parent.parent / CONFIG_FILE), path


def _checkpoint(run: Path, step: int | None) -> Path:
    directory = run / CHECKPOINTS
    if step is not None:
        found = dict(list_checkpoints(directory))
        if step not in found:
            steps = ", ".join(map(str, found)) or "none"
            raise ConfigError("--step", step, f"{directory} has no such checkpoint", f"choose one of: {steps}")
        return found[step]
    path, skipped = newest_complete(directory)
    for line in skipped:
        print(line, file=sys.stderr)
    if path is None:
        raise ConfigError("run", run, "it has no complete checkpoint", "train it to a checkpoint first")
    return path


def alone(config: Config) -> Config:
    """`config` for one process that does not train."""
    parallel = replace(config.parallel, tp=1, pp=1, vpp=1, cp=1, ep=1, sp=False, processes=1, hosts=1)
    return replace(config, parallel=parallel, train=replace(config.train, recompute="none"), offload=OffloadConfig())


def start(config: Config) -> Any:
    """This process as a world of one, where it is none yet, with the groups that a model needs; leave it with `parallel.shutdown`."""
    quiet_dependencies()
    from train.engine import parallel

    return parallel.build_ranks(alone(config), parallel.init_process_group(config.train.timeout))


def load_chunks(config: Config, path: Path, ranks: Any) -> list[Any]:
    """The model with the weights of a checkpoint, as the engine takes it, in evaluation mode.

    The experts are those that `config` gives this site: a site's model may be loaded from a checkpoint that has all of them.
    """
    from train.engine import checkpoint
    from train.engine.build import build_model

    chunks = build_model(alone(config), ranks, trainable=False)
    try:
        checkpoint.load(path, chunks, None)
    except ValueError as error:  # its message begins with the checkpoint
        raise ConfigError("run", path.parent.parent, str(error), "or name another with --step") from error
    for chunk in chunks:
        chunk.eval()
    return chunks


def load_model(config: Config, path: Path) -> Any:
    """`start`, and the model of `load_chunks`."""
    return load_chunks(config, path, start(config))[0]
