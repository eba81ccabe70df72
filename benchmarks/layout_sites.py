"""Two sites of one device each that hold all or half of the experts, beside one site: real runs of the launcher, read from their metrics.

Rounds after the first count: it has the compiling and the connecting in it. `tokens_per_second` is of all sites together over whole
rounds, outer steps included; `local` leaves out the steps that an outer step follows. Bytes are those that the sites counted, over all
rounds, beside the formula.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.layout_cases import MULTICAST_OFF
from train.federation.accounting import account_of
from train.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]
EVERY = 32
"""Local steps between outer steps, H."""
SIZES: dict[str, list[str]] = {
    "full": [
        "model.layers=6", "model.width=1024", "model.heads=8", "moe.ffn_width=1408", "train.seq_len=2048", "train.micro_batch=4",
        "train.precision=bf16",
    ],
    "small": [
        "model.layers=2", "model.width=64", "model.heads=4", "moe.ffn_width=64", "train.seq_len=64", "train.micro_batch=1",
        "train.precision=fp32",
    ],
}  # fmt: skip
"""`full`: 0.24 B parameters, of which 0.21 B are in experts."""


def place_name(sites: int, replication: int) -> str:
    """The folder of a run."""
    return f"{sites}-sites-r{replication}"


def command(size: str, sites: int, replication: int, rounds: int, every: int, folder: Path) -> list[str]:
    """The launcher's command line for a run of `rounds` rounds on `sites` sites, of which `replication` hold each expert."""
    overrides = SIZES[size]
    rows = int(next(text for text in overrides if text.startswith("train.micro_batch=")).partition("=")[2])
    federation = [f"federation.sites={sites}", f"federation.replication={replication}", f"federation.sync_every={every}"]
    return [
        sys.executable, "-P", "-m", "launch", "pretrain", "model=tiny", "attention=dense", f"moe={'fomoe' if sites > 1 else 'mixtral'}",
        "data=demo", f"data.cache={folder / 'data'}", "tracking=none", "optim=constant", "checkpoint=end", "train.eval_steps=0",
        f"train.steps={rounds * every}", f"train.global_batch={rows * sites}", f"run.dir={folder / place_name(sites, replication)}",
        *overrides, *(federation if sites > 1 else []),
    ]  # fmt: skip


def run(
    device: str, size: str, sites: int, replication: int, folder: Path, seconds: float, rounds: int = 3, every: int = EVERY
) -> dict[str, Any]:
    """Run it and read its figures. Raises ValueError with the launcher's last words when it fails or takes longer than `seconds`."""
    environment = {**os.environ, **MULTICAST_OFF, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    place = folder / place_name(sites, replication)
    line = command(size, sites, replication, rounds, every, folder)
    try:
        # What it starts ends with it.
        done = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{place.name}: stopped after {seconds:.0f} s") from error
    if done.returncode:
        raise ValueError(f"{place.name}: exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return figures([place / "sites" / str(site) for site in range(sites)] if sites > 1 else [place], every)


def figures(places: Sequence[Path], every: int) -> dict[str, Any]:
    """Figures of a run whose sites (or itself) have the directories `places`. Raises ValueError when a site met the other too rarely."""
    found = [_of_site(place, every, alone=len(places) == 1) for place in places]
    row: dict[str, Any] = {
        "sites": len(places),
        "tokens_per_second": sum(site["tokens_per_second"] for site in found),
        "local_tokens_per_second": sum(site["local_tokens_per_second"] for site in found),
        "last_loss": statistics.mean(site["last_loss"] for site in found),
    }
    if len(places) > 1:
        row["outer_seconds"] = max(site["outer_seconds"] for site in found)
        accounts = [account_of(place) for place in places]
        told = [account for account in accounts if account is not None]
        if len(told) < len(places):
            raise ValueError("a site has no outer step or no checkpoint")
        row["bytes"] = [
            {
                "site": each.site, "rounds": each.rounds, "sent": each.sent, "received": each.received, "payload": each.payload,
                "payload_over_formula": each.payload_ratio, "sent_over_formula": each.ring_ratio, "caveats": list(each.caveats),
            }
            for each in told
        ]  # fmt: skip
        row["holds"] = all(abs(ratio - 1) < 1e-3 for each in told for ratio in (each.payload_ratio, each.ring_ratio))
    return row


def _of_site(place: Path, every: int, alone: bool) -> dict[str, float]:
    lines = [line for line in read_metrics(place / "metrics.jsonl").training if int(line["step"]) > every]
    local = [line for line in lines if int(line["step"]) % every]
    rounds = [float(line["outer_seconds"]) for line in lines if "outer_seconds" in line]
    if not alone and len(rounds) != len(lines) // every:
        raise ValueError(f"{place.name}: {len(rounds)} outer steps in {len(lines)} steps")
    return {
        "tokens_per_second": _rate(lines),
        "local_tokens_per_second": _rate(local),
        "outer_seconds": statistics.median(rounds) if rounds else 0.0,
        "last_loss": float(lines[-1]["loss"]),
    }


def _rate(lines: Sequence[Any]) -> float:
    # A line's rate is its tokens over its time, and each line is one step.
    seconds = [float(line["step_seconds"]) for line in lines]
    return sum(line["tokens_per_second"] * spent for line, spent in zip(lines, seconds, strict=True)) / sum(seconds)
