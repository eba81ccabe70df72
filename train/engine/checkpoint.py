"""Sharded, atomic checkpoints of the engine's state in Megatron-core's `torch_dist` format.

A checkpoint is a directory `step_00000100` that exists only when it is complete: it is written under a hidden name,
`leantron.json` (progress and the size of every file) goes in last, and a rename makes it visible. It stores global tensors by
name and nothing else, so another layout reads it. The index (`.metadata`) is a pickle by torch's format: it is read through an
allow-list first (`train.checkpoint.safety`), which also refuses entries that torch would unpickle later.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_state_dict

from train.checkpoint.directory import MANIFEST, checkpoint_path, manifest_of
from train.checkpoint.safety import read_index
from train.engine import optimizer_state


def unwrap(chunk: Any) -> Any:
    """The LanguageModel inside data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _tensors(chunk: Any) -> dict[str, Any]:
    # One key per layer, not layers stacked: MoE and dense blocks differ. Core adds empty `_extra_state` objects, which would be pickles.
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = unwrap(chunk).sharded_state_dict(metadata=metadata)
    return {name: value for name, value in state.items() if isinstance(value, (ShardedTensor, ShardedTensorFactory))}


def sharded_state(chunks: list[Any], optimizer: Any | None, *, loading: bool) -> dict[str, Any]:
    """What a checkpoint holds, as core's sharded tensors: `model<chunk>` and, with an optimiser, `optimizer` (collective)."""
    state: dict[str, Any] = {f"model{i}": _tensors(chunk) for i, chunk in enumerate(chunks)}
    if optimizer is not None:
        state["optimizer"] = optimizer_state.sharded_state(optimizer, dict(state), loading=loading)
    return state


def save(directory: Path, step: int, chunks: list[Any], optimizer: Any, progress: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` under `directory` (collective). `progress` is JSON: what the loop needs to go on.

    Returns its path. A write that fails on any rank raises CheckpointNotWritten on every rank and leaves earlier checkpoints alone.
    """
    final = checkpoint_path(directory, step)
    partial = final.with_name(f".{final.name}.partial")
    try:
        _on_first_rank(lambda: _empty_folder(partial))
        _write(sharded_state(chunks, optimizer, loading=False), partial)
        _on_first_rank(lambda: _finish(partial, final, step, progress))
    except Exception as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointNotWritten(
            f"checkpoint {final}: it could not be written ({_reason(error)}); earlier ones are as they were; make room or give "
            "another run.dir, and go on from the last one"
        ) from error
    return final


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written; the message is one line."""


def _reason(error: BaseException) -> str:
    # torch gathers every rank's exception, with its traceback, in one: the first one's words are enough.
    failures = getattr(error, "failures", None) or {}
    for failure in failures.values():
        error = failure[0] if isinstance(failure, tuple) else failure
        break
    text = " ".join(str(error).split())
    return text if isinstance(error, _FailedOnFirstRank) else f"{type(error).__name__}: {text}"


class _FailedOnFirstRank(RuntimeError):
    pass


def _on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do `work`; what it raises there is raised on every rank, so that none waits for one that has left."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:
            outcome[0] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise _FailedOnFirstRank(outcome[0])


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write(state: dict[str, Any], folder: Path) -> None:
    # torch's own file writer in this process. Core's strategy spawns a process for each save, which imports torch and core anew
    # (11 s on two cores for a model of a few megabytes), and stores every rank's save plan in the index, classes that a safe
    # reader would have to admit.
    tensors, _ = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    save_state_dict(
        mcore_to_pyt_state_dict(by_key, False),
        storage_writer=FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False),
    )


def _finish(partial: Path, final: Path, step: int, progress: dict[str, Any]) -> None:
    files = {}
    for path in sorted(partial.iterdir()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.name] = path.stat().st_size
    with (partial / MANIFEST).open("w") as handle:
        json.dump({"format": 1, "step": step, "progress": progress, "files": files}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    if final.exists():  # the same step, written again after a rollback
        stale = final.with_name(f".{final.name}.stale")
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
        partial.rename(final)
        shutil.rmtree(stale, ignore_errors=True)
    else:
        partial.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _read(state: dict[str, Any], path: Path) -> dict[str, Any]:
    stored = read_index(path / ".metadata")
    wanted, _, factories = load_preprocess(state)
    for tensor in nested_values(wanted):
        shape = stored.get(tensor.key)
        # A vocabulary is padded to the layout: its rows may differ in number.
        if shape is None or (shape != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch):
            found = "is not in it" if shape is None else f"has shape {shape} there and {tuple(tensor.global_shape)} in the model"
            raise ValueError(f"checkpoint {path}: {tensor.key} {found}; use the configuration of the run that wrote it")
    loaded = TorchDistLoadShardedStrategy().load(wanted, path)
    merged: dict[str, Any] = apply_factory_merges(loaded, factories)
    return merged


def load(path: Path, chunks: list[Any], optimizer: Any | None) -> dict[str, Any]:
    """Read a complete checkpoint into the model and, when given, the optimiser (collective). Returns its `progress`.

    Raises ValueError naming the file and the finding when it is incomplete, belongs to another model, or its index holds anything
    but tensor metadata.
    """
    manifest = manifest_of(path)
    state = _read(sharded_state(chunks, optimizer, loading=True), path)
    for i, chunk in enumerate(chunks):
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{i}"], strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
    if optimizer is not None:
        optimizer_state.restore(optimizer, state["optimizer"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return manifest["progress"]
