"""Real processes, one for each of four sites: one is killed without a word, the others go on, and it comes back."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import TINY, Forge, Job, corpus, figures, steps_logged

from train.tracking import read_metrics

SITES = 4
STEPS = 160


@pytest.fixture
def forge() -> Iterator[Forge]:
    made = Forge()
    yield made
    made.close()


def slowly(_: int) -> None:
    """Steps of a tenth of a second, so that there is time to come back."""
    from train import loop

    original = loop.Trainer._step

    def step(self: loop.Trainer) -> object:
        time.sleep(0.1)
        return original(self)

    loop.Trainer._step = step  # type: ignore[method-assign, assignment]


@pytest.mark.slow
def test_a_killed_site_comes_back_while_the_others_go_on(forge: Forge, tmp_path: Path, endpoint: str) -> None:
    data = corpus(tmp_path / "data")
    run = tmp_path / "run"
    shared = [
        *TINY, f"data.paths=[{data}]", "moe=fomoe", "moe.experts=8", "moe.ffn_width=32", f"train.steps={STEPS}", "train.global_batch=4",
        "checkpoint.every=4", f"federation.sites={SITES}", "federation.replication=1", "federation.sync_every=4", "federation.quorum=3",
        "federation.deadline=20",
    ]  # fmt: skip
    shared.remove("moe=none")

    def start(site: int, again: bool = False) -> Job:
        where = [f"resume={run}"] if again else [*shared, f"run.dir={run}"]
        return forge.start([*where, f"federation.site={site}", f"federation.endpoint={endpoint}"], ranks=1, fault=slowly)

    jobs = [start(site) for site in range(SITES)]
    jobs[3].until(lambda: steps_logged(jobs[3].run) >= 10, "the first rounds", 120.0)
    jobs[3].kill(signal.SIGKILL)
    assert jobs[3].wait() == [-signal.SIGKILL]
    killed = steps_logged(jobs[3].run)
    jobs[0].until(lambda: steps_logged(jobs[0].run) >= killed + 9, "rounds without the killed site", 120.0)
    jobs[3] = start(3, again=True)
    for job in jobs:
        job.finish(150.0)
    lines = read_metrics(jobs[0].run / "metrics.jsonl").training
    present = {int(line["step"]): int(line["sites_present"]) for line in lines if "sites_present" in line}
    assert min(present.values()) == 3 and present[4] == present[STEPS] == SITES
    assert all(max(figures(job.run)) == STEPS for job in jobs)
    output = jobs[3].output()
    assert "behind and has the others' weights now" in output and "no other site holds" in output
    # It took schedule and step from the others, and did not do the steps between again.
    done = [step for step in figures(jobs[3].run) if step > killed]
    assert min(done) > killed + 4 and done == list(range(min(done), STEPS + 1))
