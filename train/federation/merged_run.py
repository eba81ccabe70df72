"""`leantron merge <run>`: the run of one site that the merged model of a run over several sites makes, and how commands find it.

    runs/<name>/merged/config.yaml                        one site, every expert resident
    runs/<name>/merged/checkpoints/step_<8 digits>/       one merged checkpoint

`generate` and `evaluate` merge by themselves where that has not been done. The folder is an ordinary run: `leantron pretrain
resume=runs/<name>/merged` goes on with it on one site, and from then on no merge writes there.
"""

import argparse
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from train.checkpoint.directory import CHECKPOINTS, list_checkpoints, manifest_of, newest_complete, stale_path
from train.config.compose import dump_config, load_config
from train.config.errors import ConfigError
from train.config.place import CONFIG_FILE, STATUS_FILE, hold, site_dir
from train.config.schema import Config, RunConfig
from train.federation.config import FederationConfig

MERGED = "merged"
"""Name of the folder in a run's directory."""


@dataclass(frozen=True)
class Merged:
    """What a merge wrote."""

    run_dir: Path
    checkpoint: Path
    notes: tuple[str, ...]
    """A line for each site that has a part of another step, or none, and for each newer checkpoint that was passed over."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises ConfigError for what cannot be merged."""
    parser = argparse.ArgumentParser(prog="leantron merge", description="Make one ordinary run of the sites of a run.")
    parser.add_argument("run", type=Path, help="the run's directory, which holds sites/")
    parser.add_argument("--step", type=int, help="step to merge (default: the newest that every site has complete)")
    parser.add_argument("--out", type=Path, help=f"directory of the merged run (default: <run>/{MERGED})")
    parser.add_argument(
        "--allow-stale", action="store_true", help="take experts that only a site that is gone held from its last checkpoint"
    )
    arguments = parser.parse_args(list(argv))
    merged = write_merged(arguments.run, arguments.step, arguments.out, allow_stale=arguments.allow_stale)
    for line in merged.notes:
        print(line)
    print(f"merged: {merged.checkpoint}")
    return 0


def merged_config(config: Config, out: Path) -> Config:
    """The configuration of the merged run: one site with the processes of one, which takes the whole global batch and skips nothing."""
    parallel, federation = config.parallel, config.federation
    processes = parallel.processes
    if processes is not None and federation.site is None:
        processes //= federation.sites
    # The experts of a site were shared out over ep ranks; all experts need not be divisible by as many.
    ep = math.gcd(parallel.ep, config.moe.experts) if config.moe.experts else parallel.ep
    return replace(
        config,
        run=RunConfig(name=f"{config.run.name or 'run'}-merged"[:128], dir=str(out)),
        resume=None,
        parallel=replace(parallel, ep=ep, processes=processes),
        moe=replace(config.moe, mode="full", gate="full"),
        federation=FederationConfig(),
    )


def write_merged(run: Path, step: int | None = None, out: Path | None = None, *, allow_stale: bool = False) -> Merged:
    """Merge a run (see `train.federation.merge`) into the run directory `out`, in place of an earlier merge there.

    Raises ConfigError when the run cannot be merged, or `out` holds anything else.
    """
    from train.federation.merge import choose, merge

    config = load_config(run / CONFIG_FILE)
    out = out if out is not None else run / MERGED
    _check_free(out, config.run.name)
    try:
        choice = choose(run, config, step, allow_stale=allow_stale)
        out.mkdir(parents=True, exist_ok=True)
        hold(out)
        dump_config(merged_config(config, out), out / CONFIG_FILE)
        checkpoint = merge(config, choice, out / CHECKPOINTS)
    except OSError as error:
        raise ConfigError("--out", out, f"it cannot be written ({error.strerror})", "give another one, or make room") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("run", run, str(error), "or choose another --step") from error
    for _, path in list_checkpoints(out / CHECKPOINTS):
        if path != checkpoint:
            stale = stale_path(path)
            path.rename(stale)
            shutil.rmtree(stale)
    notes = [f"site {part.site}: experts that it alone held are of step {part.step}, not {choice.step}" for part in choice.stale]
    notes += [f"site {site}: it has no complete checkpoint of step {choice.step} and is left out" for site in choice.absent]
    if step is None:
        sites = config.federation.sites
        places = [site_dir(run, site) for site in range(sites)] if sites > 1 else [run]
        notes += [line for place in places for line in newest_complete(place / CHECKPOINTS)[1]]
    return Merged(out, checkpoint, tuple(notes))


def _check_free(out: Path, name: str | None) -> None:
    """Raise ConfigError unless `out` is new, empty, or an earlier merge of the run `name` that nobody has trained on."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    if (out / STATUS_FILE).exists():
        rule = "the merged run there has been trained on"
        raise ConfigError("--out", out, rule, "give another directory: leantron merge <run> --out <directory>")
    others = [path for _, path in list_checkpoints(out / CHECKPOINTS) if _origin(path) != name]
    if not (out / CONFIG_FILE).is_file() or others:
        raise ConfigError("--out", out, "it holds something else than an earlier merge of the run", "give another directory, or delete it")


def _origin(path: Path) -> str | None:
    """Name of the run that a merged checkpoint was made of; None for any other checkpoint, and for one that is incomplete."""
    try:
        merged = manifest_of(path)["progress"].get("merged")
    except ValueError:
        return None
    return str(merged.get("run")) if isinstance(merged, dict) else None


def merged_checkpoint(run: Path, config: Config, step: int | None, say: Callable[[str], object]) -> Path:
    """The checkpoint of the merged model of a run over several sites, made in `<run>/merged` where there is none that serves.

    One serves when it is of `step`, or, without, of the newest step that every site has complete or a newer one. `say` is told of a
    merge. Raises ConfigError as `write_merged` does.
    """
    from train.federation.merge import newest_common_step

    there = {found: path for found, path in list_checkpoints(run / MERGED / CHECKPOINTS) if _origin(path) is not None}
    if step is None:
        try:
            wanted = newest_common_step(run, config)
        except ConfigError:
            if not there:
                raise
            wanted = max(there)
        newest = max(there, default=-1)
        step = newest if newest >= wanted else wanted
    if step in there:
        return there[step]
    merged = write_merged(run, step)
    for line in (*merged.notes, f"merged the run's {config.federation.sites} sites: {merged.checkpoint}"):
        say(line)
    return merged.checkpoint
