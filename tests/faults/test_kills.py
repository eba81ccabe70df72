"""SIGKILL of all ranks at random moments, saves included: each start goes on from a complete checkpoint, none announced is lost."""

import random
import re
import time
from pathlib import Path

import pytest
from real_runs import Forge, figures

from train.checkpoint.directory import newest_complete

KILLS = 20


def announced(output: str) -> int:
    """Step of the last checkpoint that the output calls complete."""
    return max((int(step) for step in re.findall(r"^checkpoint .*/step_(\d+)$", output, re.MULTILINE)), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_killed_again_and_again_loses_nothing(forge: Forge, tiny: list[str], tmp_path: Path, background: str) -> None:
    moments = random.Random(7)
    run, promised, kills = tmp_path / "run", 0, KILLS if background == "true" else KILLS // 2
    settings = ["optim=constant", "checkpoint.every=3", "checkpoint.keep=2", f"checkpoint.async_save={background}", "train.steps=1000000"]
    for attempt in range(kills):
        job = forge.start([f"resume={run}"] if attempt else [*tiny, *settings, f"run.dir={run}"])
        if attempt % 5 != 4:  # each fifth one may die before its first step
            job.until(lambda: this_start_has_a_step(run), "a step")
        time.sleep(moments.uniform(0.0, 1.0))
        job.kill()
        assert job.wait() == [-9, -9], job.output()
        if attempt:
            started = re.search(r"^going on from .*/step_(\d+)$", job.output(), re.MULTILINE)
            assert started is None or int(started[1]) >= promised, "an announced checkpoint was lost"
            assert "there is no complete checkpoint" not in job.output() or promised == 0
        promised = max(promised, announced(job.output()))
        path, _ = newest_complete(run / "checkpoints")
        assert (int(path.name[5:]) if path else 0) >= promised
    assert promised >= 6, "the starts went on from one another"
    last = promised + 20
    forge.start([f"resume={run}", f"train.steps={last}"]).finish()
    assert not list((run / "checkpoints").glob(".*")), "what a kill left is cleared up"
    whole = forge.start([*tiny, *settings, f"run.dir={tmp_path}/whole", f"train.steps={last}", "checkpoint.every=0"]).finish(300)
    split = figures(run)
    assert {step: split[step] for step in range(1, last + 1)} == figures(whole.run)


def this_start_has_a_step(run: Path) -> bool:
    """Whether this start has logged a step: its attempt's lines come last."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return False
    lines = path.read_bytes().splitlines()
    attempts = len(list(run.glob("config_*.yaml"))) + 1
    return any(f'"attempt": {attempts}'.encode() in line for line in lines[-50:])
