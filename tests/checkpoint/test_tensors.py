"""Checkpoints read and written tensor by tensor: shards put together, views written without what they look into, the engine's reader."""

from pathlib import Path

import pytest
import torch
from ranks import RankPools

from train.checkpoint.directory import partial_path, publish
from train.checkpoint.tensors import StoredTensors, write_tensors


def save_engine(directory: str, changes: dict[str, object]) -> list[object]:
    from small_engine import build, pieces, small_config, take_step

    from train.engine import checkpoint

    engine = build(small_config(changes))
    take_step(engine, 0)
    checkpoint.save(Path(directory), 1, engine.chunks, engine.optimizer, {})
    return pieces(engine)  # type: ignore[return-value]


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    final = folder / "step_00000001"
    partial_path(final).mkdir(parents=True)
    assert write_tensors(partial_path(final), tensors.items()) == len(tensors)
    publish(partial_path(final), final, 1, {})
    return final


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    whole = torch.randn(1000, 7)
    tensors = {
        "view": whole[3:5],
        "turned": whole[:3].T,
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "low": torch.randn(5, 3).bfloat16(),
        "count": torch.tensor([2**40], dtype=torch.int64),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    path = write(tmp_path, tensors)
    stored = StoredTensors(path)
    assert stored.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert stored.dtype(name) == tensor.dtype and torch.equal(stored.read(name), tensor)
    assert sum(stored.manifest["files"].values()) < 16_000, "the memory that a view looks into is not written"


def test_tensors_in_shards_are_put_together(ranks: RankPools, tmp_path: Path) -> None:
    from small_engine import MOE, assemble

    whole = assemble(ranks(2).run(save_engine, str(tmp_path), {**MOE, "parallel.tp": 2, "parallel.sp": True}))  # type: ignore[arg-type]
    stored = StoredTensors(tmp_path / "step_00000001")
    found = {name: stored.read(name) for name in stored.shapes if not name.startswith("random.")}
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_checkpoint_that_is_not_complete_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": torch.zeros(3)})
    (path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"step_00000001: __0_0.distcp is missing; use an earlier checkpoint"):
        StoredTensors(path)
