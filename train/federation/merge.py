"""The merged model of a run over several sites: one ordinary run of one site that holds every expert.

    leantron merge runs/<name>                     # writes runs/<name>/merged, which generate, evaluate and resume= take

A dense tensor is the mean over the sites, an expert the mean over its holders, a router row as the outer step takes it
(`federation.router_rows`); Adam's moments likewise, and the step is common. All parts come from one step. A mean is taken in fp64
over fp32 values, so that a mean of equal values is that value bit for bit. What belongs to the outer step (`outer.*`) and to the
layout (`random.*`) stays behind. Tensor after tensor is read, averaged and written: no process group, no GPU, the memory of one.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.residency import ResidencyPlan
from train.checkpoint.directory import CHECKPOINTS, checkpoint_path, list_checkpoints, manifest_of, partial_path, publish
from train.checkpoint.tensors import StoredTensors, write_tensors
from train.config.errors import ConfigError
from train.config.place import site_dir
from train.config.schema import Config

_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight$")
_MASTER = "optimizer.state.param."
_STEP = "optimizer.step"
_LEFT_BEHIND = ("outer.", "random.")


@dataclass(frozen=True)
class Part:
    """One site's checkpoint in a merge."""

    site: int
    step: int
    stored: StoredTensors

    @cached_property
    def names(self) -> frozenset[str]:
        """The tensors that a merged checkpoint has a use for."""
        return frozenset(name for name in self.stored.shapes if not name.startswith(_LEFT_BEHIND))

    @property
    def progress(self) -> dict[str, Any]:
        """What the training loop stored."""
        progress: dict[str, Any] = self.stored.manifest["progress"]
        return progress

    @property
    def round(self) -> int:
        """Outer steps that the site had taken; 0 for a run of one site."""
        return int(self.progress.get("federation", {}).get("round", 0))

    @property
    def residency(self) -> int:
        """Round of the residency plan that its experts are those of: `round`, or an earlier one while experts wait to change hands."""
        return int(self.progress.get("federation", {}).get("residency_round", 0))

    @property
    def line(self) -> str:
        """Which outer steps they were (`OuterStep.line`)."""
        return str(self.progress.get("federation", {}).get("line", ""))


@dataclass(frozen=True)
class Choice:
    """The checkpoints that a merge takes."""

    step: int
    parts: tuple[Part, ...]
    """Those of `step`, by site."""
    stale: tuple[Part, ...]
    """The last ones of sites that have none of `step`, or missed outer steps before it: only for experts that no other site holds."""
    absent: tuple[int, ...]
    """Sites that have no part in it: their experts are at others too."""
    plan: ResidencyPlan | None
    """Who holds what; None when every site holds everything."""

    def holders(self, layer: int, expert: int) -> list[Part]:
        """The checkpoints that an expert's mean is taken over: its holders' of the step, else the stale ones; [] when there is none."""
        plan = self.plan
        assert plan is not None
        return next((having for parts in (self.parts, self.stale) if (having := [p for p in parts if _has(p, plan, layer, expert)])), [])


def _has(part: Part, plan: ResidencyPlan, layer: int, expert: int) -> bool:
    return part.site in plan.holders(expert, layer, part.residency)


def choose(run: Path, config: Config, step: int | None = None, *, allow_stale: bool = False) -> Choice:
    """The checkpoints that make up the merged model of a run: of `step`, else of the newest step that every site has complete.

    A site without a complete checkpoint of the step is left out when others hold its experts too. Else the merge is refused, with the
    experts that would be missing; `allow_stale` takes those from the site's last checkpoint before, and the step then is the newest that
    any site has. Checkpoints of one step after different outer steps are refused, and with `allow_stale` those that are behind are stale.
    Raises ConfigError in all such cases, ValueError for a checkpoint that cannot be read.
    """
    found = _complete(run, config)
    chosen = step if step is not None else _newest(run, found, allow_stale)
    parts = tuple(Part(site, chosen, StoredTensors(paths[chosen])) for site, paths in found.items() if chosen in paths)
    if not parts:
        rule = f"no site of {run} has a complete checkpoint of it"
        raise ConfigError("--step", chosen, rule, f"choose one of: {_listed(found[site] for site in found)}")
    plan = _common_plan(run, parts, config)
    parts, behind = _of_one_round(parts, allow_stale)
    late = [site for site in found if chosen not in found[site]]
    last = {site: max((step for step in found[site] if step < chosen), default=None) for site in late}
    older = tuple(Part(site, step, StoredTensors(found[site][step])) for site, step in last.items() if step is not None and allow_stale)
    _check_sites(older, config)
    older = tuple(sorted((*older, *behind), key=lambda part: part.site))
    needed = _needed(Choice(chosen, parts, older, (), plan), last)
    stale = tuple(part for part in older if part.site in needed)
    absent = sorted({*late, *(part.site for part in behind)} - needed)
    return Choice(chosen, parts, stale, tuple(absent), plan)


def newest_common_step(run: Path, config: Config) -> int:
    """The newest step that every site has complete. Raises ConfigError when there is none."""
    return _newest(run, _complete(run, config), allow_stale=False)


def merge(config: Config, choice: Choice, directory: Path) -> Path:
    """Write the merged checkpoint under `directory` (a run's `checkpoints`), whole or not at all; returns its path.

    Raises ValueError when the sites' checkpoints do not fit each other, or one cannot be read.
    """
    final = checkpoint_path(directory, choice.step)
    partial = partial_path(final)
    sources = _sources(choice)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_tensors(partial, _tensors(choice, sources, config.federation.router_rows))
        publish(partial, final, choice.step, _progress(config, choice))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def mean(tensors: Iterator[Tensor]) -> Tensor:
    """The mean of equally shaped tensors, in their dtype; one is read at a time. Equal values come out bit for bit.

    A sum of n equal fp32 values is exact in fp64, and so is its n-th part.
    """
    first = next(tensors)
    total, count = None, 1
    for tensor in tensors:
        total = first.double() if total is None else total
        total += tensor
        count += 1
    return first if total is None else (total / count).to(first.dtype)


def _complete(run: Path, config: Config) -> dict[int, dict[int, Path]]:
    """Complete checkpoints by site and step. Raises ConfigError when there is none at all."""
    sites = config.federation.sites
    found: dict[int, dict[int, Path]] = {}
    for site in range(sites):
        directory = (run if sites == 1 else site_dir(run, site)) / CHECKPOINTS
        found[site] = {}
        for step, path in list_checkpoints(directory):
            try:
                manifest_of(path)
            except ValueError:
                continue
            found[site][step] = path
    if not any(found.values()):
        raise ConfigError("run", run, "no site has a complete checkpoint", "train it to a checkpoint first")
    return found


def _newest(run: Path, found: Mapping[int, Mapping[int, Path]], allow_stale: bool) -> int:
    if allow_stale:
        return max(step for paths in found.values() for step in paths)
    common = set.intersection(*(set(paths) for paths in found.values()))
    if not common:
        having = "; ".join(f"site {site}: {_listed([paths])}" for site, paths in found.items())
        rule = f"there is no step of which every site has a complete checkpoint ({having})"
        raise ConfigError("run", run, rule, "give --step, or --allow-stale for the last experts of a site that is gone")
    return max(common)


def _listed(several: Iterable[Iterable[int]]) -> str:
    """The different numbers in all of them, ascending."""
    return ", ".join(map(str, sorted({number for numbers in several for number in numbers}))) or "none"


def _common_plan(run: Path, parts: Sequence[Part], config: Config) -> ResidencyPlan | None:
    """The residency plan that the checkpoints carry, the same in all. Raises ValueError."""
    if config.federation.sites == 1:
        return None
    _check_sites(parts, config)
    carried = [part.progress["federation"].get("plan") for part in parts]
    if any(plan != carried[0] for plan in carried):
        raise ValueError(f"{run}: its sites' checkpoints of step {parts[0].step} carry different residency plans; merge sites of one run")
    plan = ResidencyPlan.from_dict(carried[0]) if carried[0] is not None else None
    if plan is not None and plan.rotate_every and len({part.round for part in parts}) > 1:
        rounds = ", ".join(f"site {part.site}: {part.round}" for part in parts)
        raise ValueError(f"{run}: experts rotate, and the sites are at different rounds ({rounds}); choose another --step")
    return plan


def _of_one_round(parts: tuple[Part, ...], allow_stale: bool) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The checkpoints that have the newest outer steps behind them, and the rest. Raises ConfigError unless stale ones are allowed."""
    newest = max(parts, key=lambda part: part.round)
    taken = tuple(part for part in parts if (part.round, part.line) == (newest.round, newest.line))
    rest = tuple(part for part in parts if part not in taken)
    if rest and not allow_stale:
        those = ", ".join(f"site {part.site}: {part.round}{f' ({part.line})' if part.line else ''}" for part in parts)
        rule = f"its sites have different outer steps behind them ({those})"
        remedy = "choose another, or --allow-stale to take from those behind only experts that no other site holds"
        raise ConfigError("--step", newest.step, rule, remedy)
    return taken, rest


def _check_sites(parts: Sequence[Part], config: Config) -> None:
    for part in parts:
        says = part.progress.get("federation", {})
        if (says.get("site"), says.get("sites")) != (part.site, config.federation.sites):
            raise ValueError(
                f"checkpoint {part.stored.path}: it belongs to site {says.get('site')} of {says.get('sites')}, not to site {part.site} of "
                f"{config.federation.sites}; put it where it belongs"
            )


def _needed(choice: Choice, last: Mapping[int, int | None]) -> set[int]:
    """The sites whose stale checkpoints have experts that no other has. Raises ConfigError, naming them, when experts are in none at all.

    `last`: the step of the last complete checkpoint of each site that has none of the chosen step.
    """
    if choice.plan is None:
        return set()
    sources = {(layer, expert): choice.holders(layer, expert) for layer in choice.plan.layers for expert in range(choice.plan.num_experts)}
    missing: dict[int, list[int]] = {}
    for (layer, expert), parts in sources.items():
        if not parts:
            missing.setdefault(layer, []).append(expert)
    if not missing:
        return {part.site for parts in sources.values() for part in parts if part in choice.stale}
    which = "; ".join(f"block {layer}: experts {_listed([experts])}" for layer, experts in missing.items())
    rule = f"site {_listed([last])} has no complete checkpoint of it, and these would be missing: {which}"
    older = ", ".join(f"step {step} of site {site}" for site, step in last.items() if step is not None)
    remedy = f"--allow-stale takes them from the last checkpoint that there is, {older}" if older else "bring the site's checkpoints here"
    raise ConfigError("--step", choice.step, rule, remedy)


def _sources(choice: Choice) -> dict[str, list[Part]]:
    """The checkpoints that each tensor of the merged one comes from. Raises ValueError for one that a site should have and has not."""
    sources: dict[str, list[Part]] = {}
    for name in sorted(frozenset[str]().union(*(part.names for part in (*choice.parts, *choice.stale)))):
        owner = _EXPERT.search(name)
        if owner is not None and choice.plan is not None:
            sources[name] = choice.holders(int(owner[1]), int(owner[2]))
        else:
            sources[name] = list(choice.parts)
        for part in sources[name]:
            if name not in part.names:
                raise ValueError(f"checkpoint {part.stored.path}: {name} is not in it, and other sites have it; use an earlier checkpoint")
            here, there = part.stored.shapes[name], sources[name][0].stored.shapes[name]
            if here != there:
                raise ValueError(
                    f"checkpoint {part.stored.path}: {name} has shape {here}, and {there} at another site; merge sites of one run"
                )
    _check_experts(choice, sources)
    return sources


def _check_experts(choice: Choice, sources: Mapping[str, Any]) -> None:
    if choice.plan is None:
        return
    there = {(int(found[1]), int(found[2])) for name in sources if (found := _EXPERT.match(name))}
    for layer in choice.plan.layers:
        for expert in range(choice.plan.num_experts):
            if (layer, expert) not in there:
                path = choice.holders(layer, expert)[0].stored.path
                raise ValueError(f"checkpoint {path}: expert {expert} of block {layer} is not in it; use an earlier checkpoint")


def _tensors(choice: Choice, sources: Mapping[str, list[Part]], router_rows: str) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors by name, made one after the other."""
    for name, parts in sources.items():
        if name == _STEP:
            # Alike at all sites, unless one has skipped a bad step.
            yield name, torch.stack([part.stored.read(name) for part in parts]).amax(0)
            continue
        # A bf16 weight is the rounding of its fp32 master: the mean of the one must be the rounding of the mean of the other.
        master = _MASTER + name
        low = len(parts) > 1 and master in sources and parts[0].stored.dtype(name) != parts[0].stored.dtype(master)
        stored = master if low else name
        router = _ROUTER.search(name) if choice.plan is not None and router_rows == "holders" else None
        merged = _rows(stored, int(router[1]), choice) if router is not None else mean(part.stored.read(stored) for part in parts)
        yield name, merged.to(parts[0].stored.dtype(name))


def _rows(name: str, layer: int, choice: Choice) -> Tensor:
    """A tensor with one row for each expert of a layer: row e is the mean over the holders of e, as in the outer step."""
    plan = choice.plan
    assert plan is not None
    whole = {part: part.stored.read(name) for part in (*choice.parts, *choice.stale)}
    if any(len(tensor) != plan.num_experts for tensor in whole.values()):
        raise ValueError(f"{name}: it has no row for each of the {plan.num_experts} experts of block {layer}; merge sites of one run")
    return torch.stack([mean(whole[part][expert] for part in choice.holders(layer, expert)) for expert in range(plan.num_experts)])


def _progress(config: Config, choice: Choice) -> dict[str, Any]:
    """What the merged run goes on from, and where its parts come from."""
    first = choice.parts[0].progress
    # Each site counts the tokens of its share of the batches.
    totals = [part.progress["progress"] for part in choice.parts]
    return {
        "progress": {
            **first["progress"],
            "tokens": sum(total["tokens"] for total in totals),
            "skipped": max(total["skipped"] for total in totals),
            "skipped_in_a_row": 0,
        },
        **{key: first[key] for key in ("steps", "next_sample", "data")},
        "merged": {
            "run": config.run.name,
            "parts": [{"site": part.site, "step": part.step, "round": part.round} for part in choice.parts],
            "stale": [{"site": part.site, "step": part.step, "round": part.round} for part in choice.stale],
            "absent": list(choice.absent),
        },
    }
