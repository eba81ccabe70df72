"""Going on with a run: damaged checkpoints, other data, other lengths, several epochs, another number of processes."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from real_runs import Forge, corpus, figures

from train.config.errors import ConfigError
from train.config.publish import prepare
from train.data.dataset import BatchSource

EVERY = ["checkpoint.every=4", "checkpoint.keep=3", "optim=constant"]


@pytest.fixture(scope="module")
def finished(forge: Forge, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps on two processes with checkpoints at 4, 8 and 12."""
    return forge.start([*tiny, *EVERY, f"run.dir={tmp_path_factory.mktemp('finished')}/run"]).finish().run


@pytest.fixture(scope="module")
def longer(forge: Forge, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of 14 steps, never interrupted."""
    return forge.start([*tiny, *EVERY, "train.steps=14", f"run.dir={tmp_path_factory.mktemp('longer')}/run"]).finish().run


@pytest.mark.slow
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "leantron.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "empty"])
def test_any_damaged_file_of_the_newest_checkpoint_falls_back(
    forge: Forge, finished: Path, longer: Path, tmp_path: Path, name: str, damage: str
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    file = run / "checkpoints/step_00000012" / name
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 0 if damage == "empty" else -1])
    job = forge.start([f"resume={run}", "train.steps=14"]).finish()
    lines = job.output().splitlines()
    assert any(line.startswith(f"checkpoint {run}/checkpoints/step_00000012: {name} is ") for line in lines), lines
    assert f"going on from {run}/checkpoints/step_00000008" in lines
    assert figures(run) == figures(longer)


def test_an_older_one_is_taken_and_no_file_of_it_is_missed(forge: Forge, finished: Path, longer: Path, tmp_path: Path) -> None:
    """One of the cases above in the fast suite."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "checkpoints/step_00000012/__1_0.distcp").unlink()
    forge.start([f"resume={run}", "train.steps=14"]).finish()
    assert figures(run) == figures(longer)


def test_other_data_is_refused_and_what_differs_is_named(forge: Forge, finished: Path, tiny: list[str], tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    other = corpus(tmp_path / "other", documents=61, seed=2)
    config = (run / "config.yaml").read_text()
    prefix = next(text for text in tiny if text.startswith("data.paths="))[len("data.paths=[") : -1]
    (run / "config.yaml").write_text(config.replace(prefix, other))
    job = forge.start([f"resume={run}", "train.steps=14"])
    assert job.wait() == [1, 1]
    said = json.loads((run / "logs/rank_0.failure.json").read_text())["error"]
    assert f"{run}/checkpoints/step_00000012: it was trained on other data ({other} (then {prefix}): documents 60 then, 61 now; " in said
    assert f"{other} (then {prefix}): tokens " in said and "hash of the .bin" in said and "\n" not in said
    moved = Path(shutil.copy(f"{prefix}.bin", tmp_path / "moved.bin")).with_suffix("")
    shutil.copy(f"{prefix}.idx", f"{moved}.idx")
    (run / "config.yaml").write_text(config.replace(prefix, str(moved)))
    forge.start([f"resume={run}", "train.steps=14"]).finish()


def test_what_must_not_change_is_refused_with_both_values(finished: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare([f"resume={finished}", "optim.lr=1"], 2, 2, 1)
    assert str(caught.value) == (
        "optim.lr=1.0: the run was made with optim.lr=0.0003, and this cannot change on the way; leave it out, or start a new run"
    )


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_rate_of_a_split_run_is_the_unsplit_ones_and_another_length_warns(
    forge: Forge, tiny: list[str], tmp_path: Path, schedule: str
) -> None:
    settings = [*tiny, f"optim={schedule}", "optim.warmup_steps=3", "checkpoint.every=5"]
    whole = forge.start([*settings, f"run.dir={tmp_path}/whole"], ranks=1).finish()
    run = Path(shutil.copytree(whole.run, tmp_path / "split"))
    shutil.rmtree(run / "checkpoints/step_00000012")
    job = forge.start([f"resume={run}"], ranks=1).finish()
    assert figures(run) == figures(whole.run) and "warning" not in job.output()
    shutil.rmtree(run / "checkpoints/step_00000012")
    job = forge.start([f"resume={run}", "train.steps=16"], ranks=1).finish()
    (line,) = [line for line in job.output().splitlines() if "warning" in line]
    want = f"train.steps=16: warning: the run had 12, and the schedule {schedule} changes with it: the learning rate of step 11 is "
    assert line.startswith(want)


@pytest.mark.slow
def test_two_and_a_half_epochs_split_at_several_steps_on_several_processes(forge: Forge, tiny: list[str], tmp_path: Path) -> None:
    source = one_epoch(tiny)
    steps = round(2.5 * source.total_rows / 4)
    settings = [*tiny, "checkpoint.keep=1", "optim=constant", f"train.steps={steps}"]
    whole = figures(forge.start([*settings, f"run.dir={tmp_path}/whole"], ranks=1).finish(120).run)
    run = tmp_path / "split"
    at = [0, steps // 5, round(source.total_rows / 4), round(source.total_rows / 4) + 1, steps // 2, steps]
    for start, stop in itertools.pairwise(at):
        first = [f"resume={run}"] if start else [*settings, f"run.dir={run}"]
        forge.start([*first, f"train.steps={stop}"], ranks=1 + stop % 2).finish(120)
    split = figures(run)
    assert split.keys() == whole.keys()
    for step, values in whole.items():
        assert split[step][3] == values[3], "the tokens seen are those of the unsplit run"
        assert split[step] == pytest.approx(values, rel=1e-4)


def one_epoch(tiny: list[str]) -> BatchSource:
    from train.data.tokenizer import load_tokenizer

    config = prepare([*tiny, "run.dir=/tmp/not-made"], 1, 1, 1)
    source = BatchSource(config.data, load_tokenizer("byte"), config.train.seq_len, config.train.seed, "train")
    ids = np.array([i for step in range(round(2.5 * source.total_rows / 4)) for i in source.sample_ids(step, 4)])
    assert len(set(ids.tolist())) == ids.size
    return source
