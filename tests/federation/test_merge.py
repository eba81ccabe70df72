"""Merging hand-made checkpoints: every tensor against a mean written out here, which step, who is missing, what is refused."""

import json
import pickle
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.config import MoeConfig
from moe.residency import ResidencyPlan
from train.checkpoint.directory import checkpoint_path, manifest_of, partial_path, publish
from train.checkpoint.safety import load_index
from train.checkpoint.tensors import StoredTensors, write_tensors
from train.config.check import check
from train.config.compose import dump_config, load_config
from train.config.errors import ConfigError
from train.config.schema import Config, ParallelConfig, RunConfig
from train.federation.config import FederationConfig
from train.federation.merge import choose, mean, merge
from train.federation.merged_run import main, merged_checkpoint, write_merged
from train.model.config import ModelConfig

WIDTH, EXPERTS, BLOCK = 6, 5, 1
EXPERT = f"decoder.layers.{BLOCK}.mlp.experts.{{}}.{{}}"
ROUTER = f"decoder.layers.{BLOCK}.mlp.router.weight"
DENSE = ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight")
MOMENTS = ("exp_avg", "exp_avg_sq")


def run_config(sites: int, replication: int, **federation: Any) -> Config:
    return replace(
        Config(),
        run=RunConfig(name="trial"),
        model=ModelConfig(layers=2, width=WIDTH, heads=2, ffn_width=8, kv_heads=2, head_dim=4),
        moe=MoeConfig(experts=EXPERTS, layers=[BLOCK], ffn_width=8, mode="skip", gate="kept"),
        parallel=ParallelConfig(processes=2 * sites, ep=1),
        federation=FederationConfig(sites=sites, replication=replication, **federation),
    )


def site_tensors(plan: ResidencyPlan, site: int, step: int, low: bool = False, frozen: bool = False) -> dict[str, Tensor]:
    """What a site stores: weights, masters and moments of its own, drawn from (site, step, name); experts that it holds, all if frozen."""

    def draw(name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{site} {step} {name}".encode())))

    held = range(EXPERTS) if frozen else plan.resident(site, BLOCK)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(DENSE, (7, WIDTH))
    shapes[ROUTER] = (EXPERTS, WIDTH)
    shapes |= {EXPERT.format(expert, part): (3, WIDTH) for expert in held for part in ("w_in", "w_out")}
    stored: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        master = draw(name, *shape)
        stored[name] = master.bfloat16() if low else master
        stored[f"optimizer.state.param.{name}"] = master
        stored |= {f"optimizer.state.{kind}.{name}": draw(kind + name, *shape) for kind in MOMENTS}
        stored |= {f"outer.anchor.{name}": draw("anchor" + name, *shape), f"outer.velocity.{name}": draw("velocity" + name, *shape)}
    stored["optimizer.step"] = torch.tensor([step], dtype=torch.int64)
    stored["random.world1_tp1_pp1_ep1.0.torch"] = torch.arange(site, 9, dtype=torch.uint8)
    return stored


def save_site(run: Path, plan: ResidencyPlan, site: int, step: int, tensors: dict[str, Tensor] | None = None, about: Any = None) -> Path:
    """A complete checkpoint of a site, as the engine would leave it."""
    final = checkpoint_path(run / "sites" / str(site) / "checkpoints", step)
    partial = partial_path(final)
    partial.mkdir(parents=True)
    write_tensors(partial, (tensors or site_tensors(plan, site, step)).items())
    progress = {"step": step, "tokens": 100 * step, "skipped": 0, "skipped_in_a_row": 0}
    federation = {"site": site, "sites": plan.sites, "round": step // 4, "plan": plan.to_dict(), **(about or {})}
    stored = {"progress": progress, "steps": 40, "next_sample": 8 * step, "data": {"digest": "d"}, "tracking_id": "abc"}
    publish(partial, final, step, {**stored, "federation": federation})
    return final


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., tuple[Path, ResidencyPlan]]:
    """`make_run(sites, replication, steps by site, ...)` writes a run; returns it and its plan."""

    def make(
        sites: int = 2, replication: int = 1, steps: Sequence[Sequence[int]] | None = None, policy: str = "strided", **federation: Any
    ) -> tuple[Path, ResidencyPlan]:
        run = tmp_path / "trial"
        run.mkdir()
        plan = ResidencyPlan.build(EXPERTS, sites, replication, policy, 3, [BLOCK])
        dump_config(run_config(sites, replication, policy=policy, **federation), run / "config.yaml")
        for site in range(sites):
            for step in steps[site] if steps is not None else (4, 8):
                save_site(run, plan, site, step)
        return run, plan

    return make


def read_all(path: Path) -> dict[str, Tensor]:
    stored = StoredTensors(path)
    return {name: stored.read(name) for name in stored.shapes}


def plainly(values: Sequence[Tensor]) -> Tensor:
    """The mean, the long way."""
    return torch.stack([value.double() for value in values]).mean(0).float()


def expected(plan: ResidencyPlan, sites: Sequence[dict[str, Tensor]], rows: str = "holders") -> dict[str, Tensor]:
    """The merged tensors, written out from the definition; `sites` by number."""
    merged: dict[str, Tensor] = {}
    for prefix in ("", "optimizer.state.param.", *(f"optimizer.state.{kind}." for kind in MOMENTS)):
        for name in DENSE:
            merged[prefix + name] = plainly([site[prefix + name] for site in sites])
        router = torch.empty(EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            holders = plan.holders(expert, BLOCK)
            voters = holders if rows == "holders" else range(len(sites))
            router[expert] = plainly([sites[site][prefix + ROUTER][expert] for site in voters])
            for part in ("w_in", "w_out"):
                name = prefix + EXPERT.format(expert, part)
                merged[name] = plainly([sites[site][name] for site in holders])
        merged[prefix + ROUTER] = router
    merged["optimizer.step"] = torch.tensor([8])
    return merged


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("sites", "replication"), [(2, 1), (3, 2), (4, 3), (2, 2)])
@pytest.mark.parametrize("rows", ["holders", "all"])
def test_every_tensor_is_the_mean_over_those_who_have_it(make_run: Callable[..., Any], sites: int, replication: int, rows: str) -> None:
    run, plan = make_run(sites, replication, router_rows=rows)
    merged = write_merged(run)
    assert merged.checkpoint == run / "merged" / "checkpoints" / "step_00000008" and merged.notes == ()
    wanted = expected(plan, [site_tensors(plan, site, 8) for site in range(sites)], rows)
    assert_same(read_all(merged.checkpoint), wanted)


def test_a_damaged_newer_checkpoint_is_named(make_run: Callable[..., Any]) -> None:
    run, _ = make_run(2, 1, steps=[(4, 8), (4, 8)])
    damaged = run / "sites" / "1" / "checkpoints" / "step_00000008"
    next(damaged.glob("*.distcp")).write_bytes(b"")
    merged = write_merged(run)
    assert merged.checkpoint.name == "step_00000004"
    (note,) = merged.notes
    assert str(damaged) in note and "use an earlier checkpoint" in note


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_of_equal_values_does_not_round(count: int, dtype: torch.dtype) -> None:
    value = torch.cat([torch.randn(9973) * 10.0**power for power in (-38, -8, 0, 8, 37)]).to(dtype)
    value[:3] = torch.tensor([0.0, -0.0, float("inf")])
    found = mean(value.clone() for _ in range(count))
    assert found.dtype == dtype and torch.equal(found.view(torch.int16), value.view(torch.int16))


def test_sites_that_agree_are_merged_to_the_same_bits(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(3, 2, steps=[(), (), ()])
    whole = site_tensors(plan, 0, 8, frozen=True)
    for site in range(3):
        held = {EXPERT.format(expert, part) for expert in plan.resident(site, BLOCK) for part in ("w_in", "w_out")}
        mine = {name: tensor for name, tensor in whole.items() if ".experts." not in name or any(name.endswith(key) for key in held)}
        save_site(run, plan, site, 8, mine)
    kept = {name: tensor for name, tensor in whole.items() if not name.startswith(("outer.", "random."))}
    assert_same(read_all(write_merged(run).checkpoint), kept)


def test_bf16_weights_are_the_rounding_of_the_merged_masters(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(3, 2, steps=[(), (), ()])
    for site in range(3):
        save_site(run, plan, site, 8, site_tensors(plan, site, 8, low=True))
    found = read_all(write_merged(run).checkpoint)
    for name in (*DENSE, ROUTER, EXPERT.format(2, "w_in")):
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], found[f"optimizer.state.param.{name}"].bfloat16()), name


def test_foreign_experts_that_were_kept_frozen_do_not_count(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(2, 1, steps=[(), ()])
    stored = [site_tensors(plan, site, 8, frozen=True) for site in range(2)]
    for site in range(2):
        save_site(run, plan, site, 8, stored[site])
    assert_same(read_all(write_merged(run).checkpoint), expected(plan, stored))


def test_the_merged_run_is_an_ordinary_run_of_one_site(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run, _ = make_run()
    out = tmp_path / "elsewhere"
    merged = write_merged(run, 4, out)
    config = load_config(out / "config.yaml")
    check(replace(config, data=replace(config.data, demo=True)), 2)
    assert (config.federation, config.moe.mode, config.moe.gate, config.parallel.processes) == (FederationConfig(), "full", "full", 2)
    assert (config.run.name, config.run.dir) == ("trial-merged", str(out))
    stored = manifest_of(merged.checkpoint)["progress"]
    assert stored["progress"]["step"] == 4 and stored["progress"]["tokens"] == 800 and stored["next_sample"] == 32
    assert "federation" not in stored and "tracking_id" not in stored, "the merged run is no site, and a run of its own for a tracker"
    assert [part["site"] for part in stored["merged"]["parts"]] == [0, 1]


def test_the_step_is_the_newest_that_all_sites_have_complete(make_run: Callable[..., Any]) -> None:
    run, _ = make_run(steps=[(4, 8, 12), (4, 8)])
    save_site(run, ResidencyPlan.build(EXPERTS, 2, 1, "strided", 3, [BLOCK]), 1, 12)
    (run / "sites" / "1" / "checkpoints" / "step_00000012" / "__0_0.distcp").write_bytes(b"torn")
    assert write_merged(run).checkpoint.name == "step_00000008"
    assert [path.name for path in (run / "merged" / "checkpoints").iterdir()] == ["step_00000008"]
    assert write_merged(run, 4).checkpoint.name == "step_00000004", "a later merge takes the place of the earlier one"
    assert [path.name for path in (run / "merged" / "checkpoints").iterdir()] == ["step_00000004"]


def test_experts_of_a_site_that_is_gone_need_leave(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(2, 1, steps=[(4, 8), (4,)])
    with pytest.raises(ConfigError) as refused:
        write_merged(run, 8)
    assert str(refused.value) == (
        "--step=8: site 1 has no complete checkpoint of it, and these would be missing: block 1: experts 1, 3; "
        "--allow-stale takes them from the last checkpoint that there is, step 4 of site 1"
    )
    assert not (run / "merged" / "checkpoints").exists()
    merged = write_merged(run, allow_stale=True)
    assert merged.checkpoint.name == "step_00000008"
    assert merged.notes == ("site 1: experts that it alone held are of step 4, not 8",)
    found, fresh, old = read_all(merged.checkpoint), site_tensors(plan, 0, 8), site_tensors(plan, 1, 4)
    for name in DENSE:
        assert torch.equal(found[name], fresh[name]), "a site that is gone has no voice in what is shared"
    for expert in range(EXPERTS):
        source = old if expert in (1, 3) else fresh
        assert torch.equal(found[EXPERT.format(expert, "w_in")], source[EXPERT.format(expert, "w_in")])
        moment = f"optimizer.state.exp_avg.{EXPERT.format(expert, 'w_out')}"
        assert torch.equal(found[moment], source[moment]) and torch.equal(found[ROUTER][expert], source[ROUTER][expert])
    assert int(found["optimizer.step"]) == 8
    assert merged_checkpoint(run, load_config(run / "config.yaml"), None, print) == merged.checkpoint, "newer than what all sites have"


def test_a_site_that_is_gone_is_left_out_where_others_hold_its_experts(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(3, 2, steps=[(4, 8), (4, 8), (4,)])
    for stale in (False, True):
        merged = write_merged(run, 8, allow_stale=stale)
        assert merged.notes == ("site 2: it has no complete checkpoint of step 8 and is left out",)
        found, sites = read_all(merged.checkpoint), {site: site_tensors(plan, site, 8) for site in (0, 1)}
        for expert in range(EXPERTS):
            name = EXPERT.format(expert, "w_in")
            assert torch.equal(found[name], plainly([sites[site][name] for site in plan.holders(expert, BLOCK) if site in sites]))


def test_without_a_common_step_the_steps_are_named(make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = make_run(steps=[(8,), (4,)])
    with pytest.raises(ConfigError, match=r"no step of which every site has a complete checkpoint \(site 0: 8; site 1: 4\); give --step"):
        main([str(run)])
    with pytest.raises(ConfigError, match=r"--step=5: no site of .* has a complete checkpoint of it; choose one of: 4, 8"):
        main([str(run), "--step", "5"])
    assert main([str(run), "--allow-stale"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "site 1: experts that it alone held are of step 4, not 8",
        f"merged: {run / 'merged' / 'checkpoints' / 'step_00000008'}",
    ]


def test_what_does_not_fit_is_refused_and_leaves_nothing(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(steps=[(8,), ()])

    def refused(tensors: dict[str, Tensor], about: Any = None) -> str:
        path = save_site(run, plan, 1, 8, tensors, about)
        with pytest.raises(ConfigError) as error:
            write_merged(run)
        assert not list(run.glob("merged/checkpoints/*")) and not list(run.glob("merged/checkpoints/.*"))
        for file in [*path.iterdir()]:
            file.unlink()
        path.rmdir()
        return str(error.value)

    good = site_tensors(plan, 1, 8)
    fewer = {name: tensor for name, tensor in good.items() if name != DENSE[0]}
    assert f"{DENSE[0]} is not in it, and other sites have it" in refused(fewer)
    gone = {name: tensor for name, tensor in good.items() if ".experts.3." not in name}
    assert "expert 3 of block 1 is not in it" in refused(gone)
    assert "has shape (1, 6), and (7, 6) at another site" in refused({**good, DENSE[0]: torch.zeros(1, WIDTH)})
    assert "it belongs to site 0 of 2, not to site 1 of 2" in refused(good, {"site": 0})
    other = ResidencyPlan.build(EXPERTS, 2, 1, "contiguous", 3, [BLOCK])
    assert "different residency plans" in refused(good, {"plan": other.to_dict()})


class Hostile:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched-by-a-hostile-checkpoint"),))


def test_a_hostile_index_is_not_run(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = make_run()
    index = run / "sites" / "1" / "checkpoints" / "step_00000008" / ".metadata"
    size = index.stat().st_size
    index.write_bytes(pickle.dumps(Hostile()).ljust(size, b"\0"))
    with pytest.raises(ConfigError, match="which no checkpoint needs; nothing of it was run"):
        write_merged(run)
    assert not Path("touched-by-a-hostile-checkpoint").exists()


def test_a_hostile_tensor_is_not_run_and_no_other_file_is_read(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = make_run()
    path = run / "sites" / "1" / "checkpoints" / "step_00000008"
    index, _ = load_index(path / ".metadata")
    key = next(key for key in index.storage_data if key.fqn == DENSE[0])
    place = index.storage_data[key]
    data = bytearray((path / place.relative_path).read_bytes())
    data[place.offset : place.offset + place.length] = pickle.dumps(Hostile()).ljust(place.length, b"\0")
    (path / place.relative_path).write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=f"{DENSE[0]} is damaged"):
        write_merged(run)
    assert not Path("touched-by-a-hostile-checkpoint").exists()
    manifest = manifest_of(path)
    index.storage_data[key] = replace(place, relative_path="../step_00000004/__0_0.distcp")
    (path / ".metadata").write_bytes(pickle.dumps(index))
    manifest["files"][".metadata"] = (path / ".metadata").stat().st_size
    (path / "leantron.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="lies outside its files; do not load this checkpoint"):
        write_merged(run)


def test_the_place_of_a_merge_is_not_taken_from_others(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run, _ = make_run()
    (other := tmp_path / "other").mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="it holds something else than an earlier merge"):
        write_merged(run, out=other)
    said: list[str] = []
    checkpoint = merged_checkpoint(run, load_config(run / "config.yaml"), None, said.append)
    assert said == [f"merged the run's 2 sites: {checkpoint}"]
    assert merged_checkpoint(run, load_config(run / "config.yaml"), None, said.append) == checkpoint
    assert len(said) == 1, "what is there serves"
    (run / "merged" / "status.json").write_text("{}")
    with pytest.raises(ConfigError, match="has been trained on; give another directory"):
        write_merged(run, 4)


def test_a_merge_needs_the_memory_of_one_tensor(make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_run(3, 2)
    alive: list[int] = []
    most = 0
    read = StoredTensors.read

    def counted(self: StoredTensors, name: str) -> Tensor:
        nonlocal most
        tensor = read(self, name)
        alive.append(1)
        weakref.finalize(tensor, alive.pop)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(StoredTensors, "read", counted)
    write_merged(run)
    assert most <= 3, f"{most} of the sites' tensors were in memory at once"


@pytest.mark.parametrize(
    ("about", "named"), [({"round": 1}, r"site 0: 2 \(a\), site 1: 1 \(a\)"), ({"line": "b"}, r"\(a\), site 1: 2 \(b\)")]
)
def test_sites_after_different_outer_steps_are_not_mixed(make_run: Callable[..., Any], about: dict[str, Any], named: str) -> None:
    run, plan = make_run(steps=[(), ()])
    for site, says in ((0, {}), (1, about)):
        save_site(run, plan, site, 8, about={"line": "a", **says})
    config = run_config(2, 1, policy="strided")
    with pytest.raises(ConfigError, match=rf"--step=8: .*{named}"):
        choose(run, config, 8)
    choice = choose(run, config, 8, allow_stale=True)
    assert [part.site for part in choice.parts] == [0] and [part.site for part in choice.stale] == [1]
    merged = read_all(merge(config, choice, run / "merged" / "checkpoints"))
    sites = [site_tensors(plan, site, 8) for site in range(2)]
    assert torch.equal(merged[DENSE[0]], sites[0][DENSE[0]]), "the dense part is that of the newest round alone"
    for expert in range(plan.num_experts):
        name = EXPERT.format(expert, "w_in")
        assert torch.equal(merged[name], sites[plan.holders(expert, BLOCK)[0]][name])


def test_a_site_behind_whose_experts_others_hold_is_left_out(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(replication=2, steps=[(), ()])
    for site, round in ((0, 1), (1, 2)):
        save_site(run, plan, site, 8, about={"round": round})
    choice = choose(run, run_config(2, 2, policy="strided"), allow_stale=True)
    assert ([part.site for part in choice.parts], choice.stale, choice.absent) == ([1], (), (0,))


def test_a_routers_bias_is_dense(make_run: Callable[..., Any]) -> None:
    run, plan = make_run(steps=[(), ()])
    bias, values = f"decoder.layers.{BLOCK}.mlp.router.expert_bias", []
    for site in range(2):
        values.append(torch.arange(5.0) + 10 * site)
        save_site(run, plan, site, 8, site_tensors(plan, site, 8) | {bias: values[-1]})
    config = run_config(2, 1, policy="strided")
    merged = read_all(merge(config, choose(run, config), run / "merged" / "checkpoints"))
    assert torch.equal(merged[bias], torch.arange(5.0) + 5)
