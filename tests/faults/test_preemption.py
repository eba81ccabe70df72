"""A signal to any one rank: all save after the same step, end with 0, and the next start goes on as if nothing had been."""

import json
import signal
from pathlib import Path

import pytest
from real_runs import Forge, figures, state, steps_logged


@pytest.mark.parametrize(("number", "rank", "background"), [(signal.SIGTERM, 1, "true"), (signal.SIGUSR1, 0, "false")])
def test_one_signalled_rank_stops_all_and_the_run_goes_on(
    forge: Forge, tiny: list[str], tmp_path: Path, number: int, rank: int, background: str
) -> None:
    whole = forge.start([*tiny, f"run.dir={tmp_path}/whole", "train.steps=60"]).finish()
    run = tmp_path / "split"
    job = forge.start([*tiny, f"run.dir={run}", "train.steps=60", f"checkpoint.async_save={background}"])
    job.until(lambda: steps_logged(run) >= 3, "step 3")
    job.kill(number, [rank])
    job.finish()
    assert state(run) == "preempted"
    status = json.loads((run / "status.json").read_text())
    last = steps_logged(run)
    assert status["exit_code"] == 0 and status["step"] == last < 60
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{last:08d}"]
    assert f"asked to stop by {signal.Signals(number).name}" in job.output(rank)
    assert job.output(0).splitlines()[-1] == "run preempted"
    again = forge.start([f"resume={run}"]).finish()
    assert f"going on from {run}/checkpoints/step_{last:08d}" in again.output()
    assert state(run) == "completed"
    assert figures(run) == figures(whole.run)
