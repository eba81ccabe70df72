"""`leantron plan` as a user sees it."""

import json
from pathlib import Path

import pytest

from launch.cli import main
from moe.cost import comm_bytes, ddp_bytes, resident_parameters
from train.config.check import check
from train.config.compose import compose
from train.config.plan import class_sizes
from train.federation.residency import residency_plan

SITES = [
    "moe=fomoe",
    "moe.experts=4",
    "federation=two_sites",
    "federation.sites=4",
    "federation.replication=2",
    "tracking=none",
    "data=demo",
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "220")


def planned(*overrides: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["plan", "--json", *overrides]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert isinstance(plan, dict)
    return plan


def test_the_json_holds_what_the_cost_model_gives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    federation = planned(*SITES, "federation.transfer_dtype=bf16", capsys=capsys)["federation"]
    config = check(compose([*SITES]), 1)
    plan, sizes = residency_plan(config), class_sizes(config)
    assert plan is not None
    this, diloco, ddp = federation["bytes_per_step"]
    for kind in ("payload", "ring"):
        assert this[kind] == [comm_bytes(plan, sizes, 32, kind, site=site, bytes_per_parameter=2.0) for site in range(4)]  # type: ignore[arg-type]
        assert ddp[kind] == [ddp_bytes(sizes, 4, 4, kind)] * 4  # type: ignore[arg-type]
    assert diloco["payload"] == [2 * sizes.total(4) * 2 / 32] * 4
    assert (this["bytes_per_element"], diloco["bytes_per_element"], ddp["bytes_per_element"]) == (2, 2, 4)
    assert federation["site_parameters"] == [resident_parameters(plan, sizes, site) for site in range(4)]
    assert federation["site_memory_model"][0] == {
        "device": 18 * federation["site_parameters"][0],
        "host": 8 * federation["site_parameters"][0],
    }
    assert {(row["sites"], row["replication"]) for row in federation["trade_offs"]} >= {(4, 1), (4, 2), (4, 4), (8, 8)}
    assert [round(count / 1e9, 1) for count in federation["projection_model"]["by_expert_share"][0]["site_parameters"]] == [
        100,
        52.5,
        28.8,
        16.9,
    ]
    assert list(tmp_path.iterdir()) == [], "a plan leaves nothing behind"


def test_the_tables_name_both_accountings_and_what_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *SITES]) == 0
    text = capsys.readouterr().out
    for words in (
        "site 0 holds 0, 1; site 1 holds 2, 3",
        "payload",
        "ring",
        "DiLoCo",
        "DDP",
        "projected, not measured",
        "(model)",
        "> 4  2",
    ):
        assert words in text, words
    assert list(tmp_path.iterdir()) == []


def test_one_site_shows_the_ordinary_plan_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "data=demo"]) == 0
    shown = capsys.readouterr().out
    assert "processes" in shown and "payload" not in shown
    assert planned("data=demo", capsys=capsys)["federation"] is None


def test_sites_without_experts_hold_everything(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("data=demo", "federation=diloco", capsys=capsys)
    federation, total = plan["federation"], plan["parameters"]["total"]
    assert federation["site_parameters"] == [total, total] and federation["residents"] == []
    assert federation["bytes_per_step"][0]["payload"] == [2 * 4 * total / 32] * 2
    assert all(row["replication"] == row["sites"] for row in federation["trade_offs"])


def test_moving_experts_are_named_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rotating = ["federation.replication=1", "federation.policy=rotating", "federation.rotate_every=2"]
    moved = planned(*SITES, *rotating, capsys=capsys)["federation"]["moved_per_rotation"]
    sizes = class_sizes(check(compose([*SITES, *rotating]), 1))
    # Anchor, outer momentum and two moments of an expert, the first two of its router row, in fp32.
    assert moved > 0 and moved % (16 * sizes.expert[0] + 8 * sizes.router_row[0]) == 0
    assert planned(*SITES, capsys=capsys)["federation"]["moved_per_rotation"] == 0


def test_several_hosts_are_planned_though_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("data=demo", "parallel.hosts=2", "parallel.processes=2", capsys=capsys)["layout"]["processes"] == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--yaml"], "--yaml=: there is no such option; `leantron plan --help` lists them"),
        (["resume=nowhere"], "resume=nowhere: there is no run: no config.yaml in it; give the directory of a run"),
        (
            ["data=demo", "federation=two_sites"],
            "federation.replication=1: says how many sites hold an expert, and moe.experts=0; leave it out, or use moe=fomoe",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", line + "\n")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_frozen_experts_travel_to_every_site(capsys: pytest.CaptureFixture[str]) -> None:
    federation = planned(*SITES, "federation.replication=1", "moe.mode=frozen", capsys=capsys)["federation"]
    this, diloco, _ = federation["bytes_per_step"]
    assert federation["site_parameters"] == [federation["sizes"]["total"]] * 4
    rows = 2 * 4 * federation["sizes"]["router_rows"] / 32  # with one holder each they stay where they are
    assert this["payload"] == [value - rows for value in diloco["payload"]]
    assert "site 0 holds 0; site 1 holds 1" in federation["residents"][0], "who trains which is said all the same"


def test_a_run_with_a_checkpoint_is_planned_from_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from train.checkpoint.directory import checkpoint_path, partial_path, publish
    from train.checkpoint.tensors import write_tensors
    from train.config.compose import dump_config

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    overrides = [*SITES, "model.layers=1", f"run.dir={run_dir}"]
    dump_config(check(compose(overrides), 1), run_dir / "config.yaml")
    assert "the configuration" in planned(f"resume={run_dir}", capsys=capsys)["federation"]["sizes"]["source"]
    final = checkpoint_path(run_dir / "sites" / "1" / "checkpoints", 8)
    (run_dir / "sites" / "1").mkdir(parents=True)
    dump_config(check(compose(overrides), 1), run_dir / "sites" / "1" / "config.yaml")
    partial_path(final).mkdir(parents=True)
    prefix = "decoder.layers.0.mlp"
    weights = {"embedding.word_embeddings.weight": (5, 2), f"{prefix}.router.weight": (4, 3), f"{prefix}.experts.2.w_in": (6,)}
    write_tensors(partial_path(final), ((name, torch.zeros(shape)) for name, shape in weights.items()))
    publish(partial_path(final), final, 8, {})
    sizes = planned(f"resume={run_dir}", capsys=capsys)["federation"]["sizes"]
    assert sizes == {"source": f"the index of {final}", "total": 10 + 4 * 6 + 4 * 3, "dense": 10, "experts": 24, "router_rows": 12}
