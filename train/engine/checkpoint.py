"""Sharded, atomic checkpoints of the engine's state through Megatron-core's dist_checkpointing (`torch_dist` format).

A checkpoint is a directory `step_00000100` that exists only when it is complete: it is written under a hidden name,
`leantron.json` (progress and the size of every file) goes in last, and a rename makes it visible. It stores global tensors by
name, so another layout reads it. Weights and optimiser states are tensors; nothing of ours is pickled. The index (`.metadata`)
is a pickle by torch's format: it is read through an allow-list first (`train.checkpoint.safety`).
"""

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from train.checkpoint.directory import MANIFEST, checkpoint_path, manifest_of
from train.checkpoint.safety import check_metadata

# One key per layer, not layers stacked: MoE and dense blocks differ. Optimiser states by parameter, so any layout reads them.
_FORMAT = {"non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Core's `torch_dist` format written by torch's own file writer.

    Core's strategy spawns a process for each save, which imports torch and core anew (11 s on two cores for a model of a few
    megabytes), and stores every rank's save plan in the index, classes that a safe reader would have to admit.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_state_dict(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True, overwrite=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )


def unwrap(chunk: Any) -> Any:
    """The LanguageModel inside data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _metadata() -> dict:
    return {**_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _model_state(chunks: list[Any]) -> dict[str, Any]:
    if len(chunks) == 1:
        return {"model": unwrap(chunks[0]).sharded_state_dict(metadata=_metadata())}
    return {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def _state(chunks: list[Any], optimizer: Any | None, *, loading: bool) -> dict[str, Any]:
    state = _model_state(chunks)
    if optimizer is not None:
        model = state["model"] if len(chunks) == 1 else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, metadata=_metadata())
    return state


def save(directory: Path, step: int, chunks: list[Any], optimizer: Any, progress: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` under `directory` (collective). `progress` is JSON: what the loop needs to go on.

    Returns its path. A failing write raises on every rank and leaves earlier checkpoints alone.
    """
    final = checkpoint_path(directory, step)
    partial = final.with_name(f".{final.name}.partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(chunks, optimizer, loading=False), str(partial), sharded_strategy=_InProcessSave())
    dist.barrier()
    if first:
        _finish(partial, final, step, progress)
    dist.barrier()
    return final


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


def _load_optimizer(optimizer: Any, state: Any) -> None:
    # Two mends for torch's AdamW inside core's distributed optimiser, which was written for fused Adams without a `step`
    # tensor: core looks for `step` among the checkpoint's tensors (it is in the groups, and loaded by then), and then leaves
    # one tensor shared by all parameters, which every parameter's update would increment.
    for part in optimizer.chained_optimizers:
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            part._set_main_param_and_optimizer_states = functools.partial(_set_states, part)
    optimizer.load_state_dict(state)
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            for values in part.optimizer.state.values():
                values["step"] = values["step"].clone()


def _set_states(part: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main = part.optimizer.param_groups[group]["params"][order]
    type(part)._set_main_param_and_optimizer_states(part, model_param, {"step": part.optimizer.state[main]["step"], **tensors})


def load(path: Path, chunks: list[Any], optimizer: Any | None) -> dict[str, Any]:
    """Read a complete checkpoint into the model and, when given, the optimiser (collective). Returns its `progress`.

    Raises ValueError naming the file and the finding when it is incomplete or its index holds anything but tensor metadata.
    """
    manifest = manifest_of(path)
    check_metadata(path / ".metadata")
    state = dist_checkpointing.load(_state(chunks, optimizer, loading=True), str(path))
    for i, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"])
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return manifest["progress"]
