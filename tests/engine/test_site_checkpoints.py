"""Checkpoints of models with experts, by the experts' global numbers: what a site stores, and who can load it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, RankPools
from small_engine import MOE, Piece, assemble, build, pieces, small_config, take_step
from torch import Tensor

EIGHT = {**MOE, "moe.experts": 8, "moe.top_k": 3, "train.precision": "bf16"}
SKIP = {**EIGHT, "moe.mode": "skip", "federation.sites": 2, "federation.replication": 1, "federation.policy": "strided"}
RESIDENT = {0: {0, 2, 4, 6}, 1: {1, 3, 5, 7}}
PLAIN = {"parallel.distributed_optimizer": False}
EP = {"parallel.ep": 2}


def save(changes: dict[str, Any], folder: str) -> tuple[str, list[Piece], dict[str, tuple[int, ...]]]:
    """Two steps and a checkpoint: its path, what this rank has of it, and the shapes that its index tells of."""
    from train.checkpoint.safety import read_index
    from train.engine import checkpoint

    engine = build(small_config(changes))
    for step in range(2):
        assert take_step(engine, step).updated
    path = checkpoint.save(Path(folder), 2, engine.chunks, engine.optimizer, {})
    return str(path), pieces(engine), read_index(path / ".metadata")


def load(changes: dict[str, Any], path: str) -> list[Piece]:
    return pieces(build(small_config({**changes, "train.seed": 99}), path))


def experts_in(names: Any) -> set[int]:
    return {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".mlp.experts." in name}


def stored(ranks: RankPools, size: int, changes: dict[str, Any], folder: Path) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    folder.mkdir()
    by_rank = ranks(size).run(save, changes, str(folder))
    return by_rank[0][0], assemble([held for _, held, _ in by_rank]), by_rank[0][2]


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


@pytest.mark.parametrize(
    ("site", "layout"), [(0, EP), (1, EP), (1, PLAIN), (1, {**EP, **PLAIN}), (1, {}), (1, {"parallel.pp": 2})], ids=str
)
def test_a_site_stores_its_experts_and_nothing_of_others(ranks: RankPools, tmp_path: Path, site: int, layout: dict[str, Any]) -> None:
    changes = {**SKIP, "federation.site": site}
    path, whole, index = stored(ranks, 2, {**changes, **layout}, tmp_path / "site")
    assert experts_in(index) == RESIDENT[site] == experts_in(name for name in index if name.startswith("optimizer.state.exp_avg."))
    weight = f"decoder.layers.1.mlp.experts.{min(RESIDENT[site])}"
    assert index[f"{weight}.w_in"] == (96, 64) and index[f"optimizer.state.exp_avg.{weight}.w_out"] == (64, 48)
    assert whole.keys() <= index.keys()
    # Another layout of the site has the same bits of weights, masters and moments.
    equal(assemble(ranks(1).run(load, changes, path)), whole)
    if layout == {}:
        equal(assemble(ranks(2).run(load, {**changes, **EP}, path)), whole)


def test_a_full_checkpoint_serves_a_site_and_a_sites_does_not_serve_another(ranks: RankPools, tmp_path: Path) -> None:
    path, whole, index = stored(ranks, 2, {**EIGHT, **EP}, tmp_path / "full")
    assert experts_in(index) == set(range(8))
    for size, layout in ((1, PLAIN), (2, EP)):
        held = assemble(ranks(size).run(load, {**SKIP, "federation.site": 1, **layout}, path))
        assert experts_in(held) == RESIDENT[1]
        assert held.keys() == {name for name in whole if experts_in([name]) <= RESIDENT[1]}
        equal(held, whole)
    site, _, _ = stored(ranks, 1, {**SKIP, "federation.site": 1}, tmp_path / "site")
    with pytest.raises(RankError, match=r"checkpoint .*experts\.0\.w_in is not in it"):
        ranks(1).run(load, {**SKIP, "federation.site": 0}, site)


def in_place(changes: dict[str, Any]) -> list[bool]:
    """Whether what a save takes of each expert lies in the model's own memory, and what a load joins is that memory again."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from train.engine.checkpoint import sharded_state

    engine = build(small_config(changes))
    state = sharded_state(engine.chunks, None, loading=False)["model0"]
    answers = []
    for factory in state.values():
        if isinstance(factory, ShardedTensorFactory) and ".experts." in factory.key and ".shared_experts." not in factory.key:
            rows = factory.build()
            answers += [row.data.untyped_storage().data_ptr() == factory.data.untyped_storage().data_ptr() for row in rows.values()]
            joined = factory.merge_fn({number: row.data for number, row in rows.items()})
            answers.append(joined.data_ptr() == factory.data.data_ptr() and torch.equal(joined, factory.data))
            apart = factory.merge_fn({number: row.data.clone() for number, row in rows.items()})
            answers.append(apart.data_ptr() != factory.data.data_ptr() and torch.equal(apart, factory.data))
    return answers


def test_experts_are_stored_from_where_they_are(ranks: RankPools) -> None:
    for answers in ranks(2).run(in_place, {**SKIP, "federation.site": 1, **EP}):
        assert len(answers) == 2 * 2 * (2 + 2) and all(answers)
