"""wandb that takes a minute to start holds no step up, and has every line in the end."""

import time
from pathlib import Path

import pytest
from real_runs import Forge, steps_logged

from train.tracking import read_metrics


def slow_wandb(rank: int) -> None:
    """`wandb.init` takes 60 seconds."""
    import wandb

    original = wandb.init

    def init(**settings: object) -> object:
        time.sleep(60)
        return original(**settings)  # type: ignore[arg-type]

    wandb.init = init  # type: ignore[assignment]


@pytest.mark.slow
def test_a_start_of_a_minute_stalls_nothing(forge: Forge, tiny: list[str], tmp_path: Path) -> None:
    settings = ["tracking=wandb", "tracking.start_timeout=90", "train.steps=60", "train.hang_timeout=30"]
    started = time.monotonic()
    job = forge.start([*tiny, *settings, f"run.dir={tmp_path}/run"], fault=slow_wandb)
    job.until(lambda: steps_logged(job.run) == 60, "all steps", 40)
    assert time.monotonic() - started < 40
    job.finish(120)
    lines = read_metrics(job.run / "metrics.jsonl").training
    assert "tracker_failures" not in lines[-1] and len(list((job.run / "wandb").rglob("*.wandb"))) == 1
    assert "tracking: wandb offline in" in job.output()
