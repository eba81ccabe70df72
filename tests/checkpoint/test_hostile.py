"""A checkpoint from a stranger: whatever its pickles ask for is refused by name, and nothing of it runs."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError, RankPools
from small_engine import build, small_config

from train.checkpoint.directory import MANIFEST
from train.checkpoint.safety import read_index

SMALL = {"model.layers": 1, "attention.kind": "dense", "attention.dense_layers": []}


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def write(folder: str) -> str:
    from train.engine import checkpoint

    engine = build(small_config(SMALL))
    return str(checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {}))


def read(path: str, changes: dict[str, Any]) -> None:
    build(small_config({**SMALL, **changes}), path)


@pytest.fixture(scope="module")
def written(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ranks(1).run(write, str(tmp_path_factory.mktemp("checkpoint")))[0])


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def sign(path: Path) -> None:
    """Make the manifest agree with the files, as an attacker would."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {file.name: file.stat().st_size for file in path.iterdir() if file.name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "posix.system"), (eval, "builtins.eval"), (getattr, "builtins.getattr"), (torch.load, "torch.serialization.load")],
)
def test_a_hostile_index_is_refused_by_name(ranks: RankPools, copy: Path, tmp_path: Path, function: Callable[..., Any], name: str) -> None:
    marker = tmp_path / "ran"
    code = {os.system: f"touch {marker}", eval: f"open({str(marker)!r}, 'w')"}.get(function, str(marker))
    honest = pickle.loads((copy / ".metadata").read_bytes())
    for index in (Calls(function, code), [honest, Calls(function, code)]):
        (copy / ".metadata").write_bytes(pickle.dumps(index))
        sign(copy)
        message = f"checkpoint index {copy}/.metadata: it refers to {name}, which no checkpoint needs; nothing of it was run"
        with pytest.raises(ValueError) as caught:
            read_index(copy / ".metadata")
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    with pytest.raises(RankError, match=f"it refers to {name}"):
        ranks(1).run(read, str(copy), {})
    assert not marker.exists()


def test_a_pickle_among_the_data_is_refused_by_name(ranks: RankPools, copy: Path, tmp_path: Path) -> None:
    """torch unpickles, without any check, entries that the index calls bytes: the data file runs what it likes."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    marker = tmp_path / "ran"
    index = pickle.loads((copy / ".metadata").read_bytes())
    place = next(place for place in index.storage_data if place.fqn == "decoder.final_layernorm.weight")
    index.state_dict_metadata[place.fqn] = BytesStorageMetadata()
    info = index.storage_data.pop(place)
    bomb = io.BytesIO()
    torch.save(Calls(os.system, f"touch {marker}"), bomb)
    (copy / "bomb").write_bytes(bomb.getvalue())
    info.relative_path, info.offset, info.length = "bomb", 0, len(bomb.getvalue())
    index.storage_data[type(place)(place.fqn)] = info
    (copy / ".metadata").write_bytes(pickle.dumps(index))
    sign(copy)
    with pytest.raises(RankError, match=r"it refers to torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"):
        ranks(1).run(read, str(copy), {})
    assert not marker.exists()


def test_our_own_checkpoints_hold_tensors_only(written: Path) -> None:
    shapes = read_index(written / ".metadata")
    assert shapes["decoder.final_layernorm.weight"] == (64,) and shapes["optimizer.step"] == (1,)
    assert shapes["optimizer.state.exp_avg.output_layer.weight"] == (128, 64)
    assert {path.name for path in written.iterdir()} == {".metadata", "__0_0.distcp", MANIFEST}


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x80\x04.", pickle.dumps(None), pickle.dumps({"a": 1}), pickle.dumps([1])[:-3]])
def test_a_damaged_index_is_said_to_be_damaged(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^checkpoint index .*\.metadata: it is damaged \(.*\); use an earlier checkpoint$"):
        read_index(path)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"model.layers": 2}, r"decoder\.layers\.1\.\S+ is not in it"),
        ({"model.width": 32, "model.heads": 2}, r"\S+ has shape \(.*\) there and \(.*\) in the model"),
        ({"model.tied": True}, None),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(ranks: RankPools, written: Path, changes: dict[str, Any], finding: str | None) -> None:
    if finding is None:  # the head of an untied model is simply not asked for
        ranks(1).run(read, str(written), changes)
        return
    with pytest.raises(RankError, match=rf"ValueError: checkpoint {written}: {finding}; use the configuration of the run that wrote it"):
        ranks(1).run(read, str(written), changes)


def test_data_that_cannot_be_read_is_said_so(ranks: RankPools, copy: Path) -> None:
    data = copy / "__0_0.distcp"
    data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(RankError, match=r"ValueError: checkpoint .*: it could not be read \(\w+: .*\); use an earlier checkpoint"):
        ranks(1).run(read, str(copy), {})


def test_an_incomplete_checkpoint_is_not_loaded(ranks: RankPools, copy: Path) -> None:
    data = copy / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(RankError, match=r"ValueError: checkpoint .*: __0_0\.distcp is \d+ bytes instead of \d+; use an earlier checkpoint"):
        ranks(1).run(read, str(copy), {})
