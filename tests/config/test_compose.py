"""Composition, files and the derived values: what is accepted, and that it comes back the same."""

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from train.config.check import attention_pattern, check
from train.config.compose import CONFIG_DIR, compose, dump_config, load_config
from train.config.convert import known_keys
from train.config.errors import ConfigError
from train.config.plan import make_plan
from train.config.resume import compose_run, get, put
from train.config.schema import Config
from train.engine.layout import ParallelLayout, processes_of_site

SHIPPED = [f"{file.parent.name}={file.stem}" for file in sorted(CONFIG_DIR.glob("*/*.yaml"))]
NEEDS_ALSO = {
    "attention=s2": ["attention.stride=4"],
    "model=gpt_1b": [],
    "data=custom": [],
    "parallel=ep2": ["moe=mixtral"],
    "federation=two_sites": ["moe=fomoe"],
    "parallel=node8": [],
}


@pytest.fixture
def indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of a small data set."""
    from train.data.build import build_dataset
    from train.data.tokenizer import load_tokenizer

    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(f"words of {name}\n" * 50)
    build_dataset([Path("a.txt"), Path("b.txt")], "set", load_tokenizer("byte"), kind="text")
    return "set"


@pytest.mark.parametrize("option", SHIPPED)
def test_every_shipped_option_composes_checks_and_plans(option: str, indexed: str) -> None:
    own_data = option == "data=custom" or option.startswith("experiment=")
    overrides = [option, *NEEDS_ALSO.get(option, []), *([f"data.paths=[{indexed}]"] if own_data and option != "experiment=demo" else [])]
    composed = compose(overrides)
    world = processes_of_site(composed)
    config = check(composed, world)
    plan = make_plan(config, world)
    assert plan["parameters"]["total"] >= plan["parameters"]["active"] > 0
    assert len(plan["layers"]) == config.model.layers


def test_every_group_has_options_and_every_section_that_is_a_group_names_known_keys() -> None:
    assert {option.partition("=")[0] for option in SHIPPED} == {
        "attention", "checkpoint", "data", "experiment", "federation", "model", "moe", "offload", "optim", "parallel", "tracking",
    }  # fmt: skip


def test_every_key_can_be_overridden_with_its_own_value() -> None:
    config = compose([])
    for key in known_keys():
        value = get(config, key)
        if value is None or value == []:
            continue
        text = (
            "[" + ",".join(map(str, value)) + "]" if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else value
        )
        assert compose([f"{key}={text}"]) == config, key


def test_groups_and_keys_combine() -> None:
    config = compose(["attention=s2", "attention.stride=4", "moe=mixtral", "moe.experts=16", "tracking=none", "++train.steps=7"])
    assert (config.attention.kind, config.attention.stride, config.moe.experts) == ("s2", 4, 16)
    assert (config.tracking.kind, config.train.steps) == ("none", 7)
    assert compose(["optim.betas=[0.8,0.9]", "optim.lr=1"]).optim.betas == [0.8, 0.9]
    assert compose(["run.name=2026"]).run.name == "2026"
    assert compose(["run.name=${attention.kind}-${train.steps}"]).run.name == "dense-100"
    assert compose(["train={steps:9,seed:1}"]).train.steps == 9


def test_the_command_line_wins_over_an_experiment() -> None:
    config = compose(["experiment=demo", "attention=dense", "train.steps=3", "parallel.ep=1"])
    assert (config.attention.kind, config.train.steps, config.parallel.ep) == ("dense", 3, 1)
    assert config.train.seq_len == compose(["experiment=demo"]).train.seq_len


def test_a_users_own_folder_of_options(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /moe: mixtral\ntrain:\n  steps: 5\n")
    (tmp_path / "experiment" / "bad.yaml").write_text("# @package _global_\ntrain:\n  stepz: 5\n")
    (tmp_path / "experiment" / "broken.yaml").write_text("train: [\n")
    search = f"hydra.searchpath=[{tmp_path}]"
    config = compose([search, "experiment=mine"])
    assert (config.train.steps, config.moe.experts) == (5, 8)
    with pytest.raises(ConfigError, match=r"^train\.stepz=5: there is no such key; did you mean train\.steps\?$"):
        compose([search, "experiment=bad"])
    with pytest.raises(ConfigError, match=r"^overrides=.*does not compose .*broken\.yaml") as caught:
        compose([search, "experiment=broken"])
    assert "\n" not in str(caught.value)


def test_no_environment_variable_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    hidden = ["run.name='${oc.${run.dir}:MY_TOKEN}'", "run.dir=env"]
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "leaky.yaml").write_text("project: ${oc.env:MY_TOKEN}\n")
    for overrides in (["run.name=${oc.env:MY_TOKEN}"], hidden, [f"hydra.searchpath=[{tmp_path}]", "tracking=leaky"]):
        with pytest.raises(ConfigError) as caught:
            compose(overrides)
        assert "environment variables are not read" in str(caught.value)
        assert "very-secret" not in str(caught.value)


def test_config_file_round_trip_and_atomic_write(tmp_path: Path) -> None:
    config = check(compose(["experiment=demo", "optim.eps=1e-8", "run.name='1e3'", "data.weights=null"]), 2)
    path = tmp_path / "config.yaml"
    dump_config(config, path)
    assert load_config(path) == config
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
    path.write_text(path.read_text() + "extra: 1\n")
    with pytest.raises(ConfigError, match=r"^extra=1: there is no such key"):
        load_config(path)
    path.write_text("train: [")
    with pytest.raises(ConfigError, match=r"^config=.*is not YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"^config=.*cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_check_fills_in_the_derived_sizes_and_is_idempotent() -> None:
    config = check(compose(["moe=mixtral", "model.width=192", "model.heads=6"]), 1)
    assert (config.model.ffn_width, config.model.kv_heads, config.model.head_dim, config.model.vocab_size) == (512, 6, 32, 257)
    assert config.moe.ffn_width == 512
    assert check(config, 1) == config


def test_the_demo_is_what_it_must_be() -> None:
    config = check(compose(["experiment=demo"]), 2)
    pattern = attention_pattern(config)
    views = [pattern.for_layer(layer) for layer in range(config.model.layers)]
    sparse = [view for view in views if not view.is_dense]
    assert len(views) - len(sparse) == 1 and len(sparse) >= 2
    assert all(view.density(config.train.seq_len) < 0.6 for view in sparse)
    assert len(set(sparse[0].residues())) > 1
    assert config.train.seq_len >= 8 * config.attention.block_size
    assert len(config.moe.blocks(config.model.layers)) == 1
    assert config.parallel.processes == 2


def test_layout_numbers() -> None:
    config = compose(["moe=mixtral", "parallel.tp=2", "parallel.sp=true", "parallel.pp=2", "parallel.ep=4", "train.global_batch=16"])
    layout = ParallelLayout.build(config, 16)
    assert (layout.dp, layout.edp, layout.micro_batches(config)) == (4, 2, 4)
    assert layout.describe() == "dp 4 x tp 2 x pp 2 (+sp), ep 4"


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 4), (2, 4), (4, 4), (2, 2)])
def test_fewer_kv_heads_than_ranks_is_accepted_where_core_replicates(kv_heads: int, tp: int) -> None:
    assert ParallelLayout.build(compose([f"model.kv_heads={kv_heads}", f"parallel.tp={tp}"]), tp).tp == tp


def test_parameters_by_hand() -> None:
    config = check(compose(["moe=mixtral", "moe.layers=[1]", "model.layers=2", "model.kv_heads=2", "moe.shared_width=64"]), 1)
    attention, norms, mlp = 128 * 128 * 2 + 128 * 64 * 2, 2 * 128, 3 * 128 * 384
    expected = 2 * (attention + norms) + mlp + 8 * mlp + 128 * 8 + 3 * 128 * 64 + 128 + 2 * 257 * 128
    counted = make_plan(config, 1)["parameters"]
    assert counted == {"total": expected, "active": expected - 6 * mlp, "embedding": 2 * 257 * 128}
    tied = replace(config, model=replace(config.model, tied=True))
    assert make_plan(tied, 1)["parameters"]["total"] == expected - 257 * 128


def test_errors_pickle() -> None:
    error = ConfigError("a.b", [1, None, True], "a rule\nof two lines", "a remedy")
    assert str(error) == "a.b=[1,null,true]: a rule of two lines; a remedy"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_put_and_get() -> None:
    config = put(Config(), "train.steps", 5)
    assert (get(config, "train.steps"), get(Config(), "train.steps")) == (5, 100)


class TestResume:
    """`resume=<run>` takes the run's own configuration and what may change on the way."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        dump_config(check(compose(["experiment=demo", "run.name=old", "optim.lr=0.002"]), 2), tmp_path / "config.yaml")
        return tmp_path

    def resumed(self, run: Path, overrides: Sequence[str]) -> Config:
        return compose_run([f"resume={run}", *overrides])

    def test_keeps_what_is_not_named(self, run: Path) -> None:
        config = self.resumed(run, ["train.steps=900", "tracking=none", "checkpoint.every=50", "parallel.processes=1", "parallel.ep=1"])
        assert (config.optim.lr, config.attention.stride, config.run.name) == (0.002, 4, "old")
        assert (config.train.steps, config.tracking.kind, config.checkpoint.every, config.parallel.ep) == (900, "none", 50, 1)
        assert config.resume == str(run)

    def test_an_option_counts_where_it_is_the_default_too(self, run: Path) -> None:
        one = self.resumed(run, ["parallel=single", "tracking=none"])
        assert (one.parallel.processes, one.parallel.ep, one.tracking.kind) == (None, 1, "none")
        dump_config(one, run / "config.yaml")
        two = self.resumed(run, ["tracking=wandb"])
        assert (two.parallel.processes, two.parallel.ep, two.tracking.kind) == (None, 1, "wandb")

    def test_accepts_the_same_again(self, run: Path) -> None:
        assert self.resumed(run, ["experiment=demo", "optim.lr=0.002"]) == self.resumed(run, [])

    def test_refuses_another_value_with_both(self, run: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            self.resumed(run, ["optim.lr=0.1"])
        expected = "optim.lr=0.1: the run was made with optim.lr=0.002, and this cannot change on the way; leave it out, or start a new run"
        assert str(caught.value) == expected
        with pytest.raises(ConfigError, match=r"^attention\.kind=dense: the run was made with attention\.kind=s2"):
            self.resumed(run, ["attention.kind=dense"])

    def test_refuses_a_folder_without_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^resume=.*: there is no run: no config\.yaml in it; give the directory of a run$"):
            compose_run([f"resume={tmp_path}/none"])


def test_no_torch_and_under_three_seconds() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from train.config.check import check; from train.config.compose import compose; from train.config.plan import make_plan\n"
        "make_plan(check(compose(['experiment=demo']), 2), 2)\n"
        "assert not {'torch', 'megatron', 'wandb'} & set(sys.modules), 'heavy import'\n"
        "assert time.process_time() - start < 3.0, time.process_time() - start"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
