"""Bytes that a run's sites counted, beside the formula with the parameters of its checkpoint's index. Free of torch but for the index.

The counts come from the collectives and the sizes from what is stored, so neither is made from the other.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.cost import Sizes
from train.checkpoint.directory import CHECKPOINTS, newest_complete
from train.config.compose import load_config
from train.config.place import CONFIG_FILE, site_dirs
from train.config.schema import Config
from train.federation.planning import ACCOUNTINGS, rotation_bytes, round_bytes
from train.tracking.readers import RunMetrics, read_metrics

METRICS_FILE = "metrics.jsonl"
_MODEL = ("embedding.", "decoder.", "output_layer.")
_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.(\d+)\.w_(?:in|out)")
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")


def sizes_from_index(path: Path) -> Sizes:
    """Parameters by class, whole model, from the index of the checkpoint directory `path`.

    A site's checkpoint has its own experts under their numbers, of which one a layer is enough, and all router rows. Padding of the
    vocabulary counts, as it is trained and exchanged, and so do selection biases of the routers, as they are exchanged. Raises
    ValueError on an index that cannot be read, or has no weights.
    """
    from train.checkpoint.safety import read_index

    shapes = {name: shape for name, shape in read_index(path / ".metadata").items() if name.startswith(_MODEL)}
    if not shapes:
        raise ValueError(f"checkpoint {path}: its index names no weights of a model; use a checkpoint of a training run")
    dense, experts, router_row = 0, dict[int, dict[int, int]](), dict[int, int]()
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            of_layer, number = experts.setdefault(int(match[1]), {}), int(match[2])
            of_layer[number] = of_layer.get(number, 0) + math.prod(shape)
        elif match := _ROUTER.fullmatch(name):
            router_row[int(match[1])] = math.prod(shape[1:])
        else:
            dense += math.prod(shape)
    expert = {layer: next(iter(of_layer.values())) for layer, of_layer in experts.items()}
    return Sizes(dense=dense, expert=expert, router_row=router_row)


def sizes_from_run(run_dir: Path) -> tuple[Sizes, Path] | None:
    """`sizes_from_index` of the newest complete checkpoint of a run or of its first site that has one, and that checkpoint; None
    when there is none."""
    for place in site_dirs(run_dir):
        path, _ = newest_complete(place / CHECKPOINTS)
        if path is not None:
            return sizes_from_index(path), path
    return None


@dataclass(frozen=True, kw_only=True)
class SiteAccount:
    """What one site's outer steps moved, counted and by formula, in bytes over all its rounds so far."""

    site: int
    rounds: int
    """Outer steps, whole ones: with fragments, their parts together."""
    sync_every: int
    sent: int
    """Counted in the collectives: put on the wire."""
    received: int
    payload: int
    """Counted: handed over and got back."""
    formula_payload: float
    formula_ring: float
    moved: int
    """Counted apart: bytes of experts that changed hands, as this site sent them."""
    formula_moved: float
    """The same by formula, had they changed hands whenever the plan says so."""
    source: str
    """Where the formula's parameters are from."""
    caveats: tuple[str, ...]
    """Why the two may differ; () for rounds in which all sites took part and none failed."""

    @property
    def payload_ratio(self) -> float:
        """Counted over formula."""
        return _ratio(self.payload, self.formula_payload)

    @property
    def ring_ratio(self) -> float:
        """Counted, as sent, over formula."""
        return _ratio(self.sent, self.formula_ring)

    def line(self) -> str:
        """One line of text."""
        parts = [
            f"site {self.site}: {self.rounds} outer steps",
            f"payload {self.payload:,} bytes, formula {self.formula_payload:,.0f}, ratio {self.payload_ratio:.4f}",
            f"sent {self.sent:,} bytes, ring formula {self.formula_ring:,.0f}, ratio {self.ring_ratio:.4f}",
        ]
        if self.moved or self.formula_moved:
            parts.append(f"experts handed over {self.moved:,} bytes, formula {self.formula_moved:,.0f}")
        return "; ".join([*parts, *self.caveats])


def account(config: Config, metrics: RunMetrics, sizes: Sizes, source: str) -> SiteAccount | None:
    """Counted bytes of the site of `config` beside the formula with `sizes`; None before its first outer step."""
    federation = config.federation
    lines = [line for line in metrics.training if "outer_bytes" in line]
    if federation.sites == 1 or federation.site is None or not lines:
        return None
    steps = int(lines[-1]["outer_round"])
    if not steps:
        return None
    rounds = steps / federation.fragments
    turned = int(lines[-1].get("residency_round", 0))
    turns = range(federation.rotate_every, turned + 1, federation.rotate_every) if federation.rotate_every else ()
    formula = {kind: rounds * round_bytes(config, sizes, federation.site, kind) for kind in ACCOUNTINGS}
    return SiteAccount(
        site=federation.site,
        rounds=math.ceil(rounds),
        sync_every=federation.sync_every,
        sent=sum(line["outer_bytes"] for line in lines),
        received=sum(line["outer_bytes_received"] for line in lines),
        payload=sum(line["outer_payload_bytes"] for line in lines),
        formula_payload=formula["payload"],
        formula_ring=formula["ring"],
        moved=sum(line.get("moved_bytes", 0) for line in lines),
        formula_moved=sum(rotation_bytes(config, sizes, turn, federation.site) for turn in turns),
        source=source,
        caveats=tuple(_caveats(config, lines)),
    )


def account_of(place: Path) -> SiteAccount | None:
    """`account` of the site whose directory is `place`, from its files; None without an outer step or a complete checkpoint."""
    found = sizes_from_run(place)
    if found is None or not (place / CONFIG_FILE).is_file() or not (place / METRICS_FILE).is_file():
        return None
    return account(load_config(place / CONFIG_FILE), read_metrics(place / METRICS_FILE), found[0], f"the index of {found[1]}")


def _caveats(config: Config, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    federation = config.federation
    missing = sum(line["sites_present"] < federation.sites for line in lines)
    if missing:
        yield f"the formula has all sites in every round, and {missing} logged rounds had fewer"
    if lines[-1]["outer_failed"]:
        yield f"{lines[-1]['outer_failed']} rounds failed, whose bytes are counted"
    if len({line.get("attempt") for line in lines}) > 1:
        yield "the run was started again: what a rolled-back step moved is not counted, what brought a site up to date is"
    if int(lines[-1]["outer_round"]) % federation.fragments:
        yield "fragments differ in size, and the last round is not whole"


def _ratio(counted: float, formula: float) -> float:
    return counted / formula if formula else math.nan
