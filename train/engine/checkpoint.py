"""Sharded, atomic checkpoints of the engine's state in Megatron-core's `torch_dist` format.

A checkpoint is a directory `step_00000100` that exists only when it is complete: it is written under a hidden name,
`leantron.json` (progress and the size of every file) goes in last, and a rename makes it visible. It stores global tensors by
name and nothing else, so another layout reads it. The index (`.metadata`) is a pickle by torch's format: it is read through an
allow-list first (`train.checkpoint.safety`), which also refuses entries that torch would unpickle later.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from train.checkpoint.directory import checkpoint_path, manifest_of, partial_path, publish
from train.checkpoint.safety import read_index
from train.engine import optimizer_state, outer_state, random_state
from train.engine.outer_state import OuterState


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


def _gather_parameters(chunks: list[Any]) -> None:
    # With overlapped gathering a rank has the step's new values in its own shard alone until the next forward pass.
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)


def sharded_state(chunks: list[Any], optimizer: Any | None, outer: OuterState | None = None, *, loading: bool) -> dict[str, Any]:
    """What a checkpoint holds, as core's sharded tensors: `model<chunk>` and, with an optimiser, `optimizer` and `random` (collective).

    A site of several has `outer` too.
    """
    if not loading:
        _gather_parameters(chunks)
    state: dict[str, Any] = {f"model{i}": _tensors(chunk) for i, chunk in enumerate(chunks)}
    if outer is not None:
        state["outer"] = outer_state.sharded_state(outer.tensors(), dict(state))
    if optimizer is not None:
        state["optimizer"] = optimizer_state.sharded_state(optimizer, _of_model(state), loading=loading)
        state["random"] = random_state.sharded_state()
    return state


def _of_model(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors for name, tensors in state.items() if name.startswith("model")}


def save(directory: Path, step: int, chunks: list[Any], optimizer: Any, progress: dict[str, Any], outer: OuterState | None = None) -> Path:
    """Write the checkpoint of `step` under `directory` (collective). `progress` is JSON: what the loop needs to go on.

    Returns its path. A write that fails on any rank raises CheckpointNotWritten on every rank and leaves earlier checkpoints alone.
    """
    final, partial = _places(directory, step)
    try:
        _on_first_rank(lambda: _empty_folder(partial))
        save_state_dict(_storable(chunks, optimizer, outer), **_writing(partial))
        _on_first_rank(lambda: publish(partial, final, step, progress))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise _not_written(final, partial, error) from error
    return final


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written; the message is one line."""


class BackgroundSaver:
    """Writes checkpoints while training goes on: a copy of the state in host memory, then a thread that writes it.

    At most one is under way. Every method is called on every rank at the same point (collective), apart from `state`, which only looks.
    A thread, not a process: the copy need not be shared and nothing has to import torch again; what the thread does to tensors runs
    outside Python's lock. Its collectives have a group of their own, or they would mix with the training's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._group = dist.new_group(backend="gloo")
        self._copies = _HostCopies()
        self._places: tuple[Path, Path] | None = None
        self._outcome: Future[None] = Future()
        self.started: float | None = None
        """`time.monotonic()` at the start of the write that is under way; None when there is none."""

    @property
    def state(self) -> str:
        """`idle`, `writing`, `written` or `failed`: as far as this rank knows. The last two wait for `finish`."""
        if self._places is None:
            return "idle"
        if not self._outcome.done():
            return "writing"
        return "failed" if self._outcome.exception() else "written"

    def start(
        self,
        step: int,
        chunks: list[Any],
        optimizer: Any,
        progress: dict[str, Any],
        then: Callable[[], object],
        outer: OuterState | None = None,
    ) -> None:
        """Copy the state and begin to write the checkpoint of `step`; the one before must be finished.

        Rank 0's thread calls `then` once it is complete.
        """
        assert self._places is None, "a checkpoint is still being written"
        final, partial = _places(self._directory, step)
        try:
            _on_first_rank(lambda: _empty_folder(partial))
            stored = _storable(chunks, optimizer, outer, self._copies.copy)
            self._copies.wait()
        except Exception as error:
            raise _not_written(final, partial, error) from error
        self._places, self._outcome, self.started = (final, partial), Future(), time.monotonic()
        written = async_save(stored, process_group=self._group, async_stager=_Staged(), **_writing(partial, staged=True))
        assert isinstance(written, Future)
        outcome = self._outcome

        def complete(done: "Future[Any]") -> None:  # in the writing thread
            try:
                done.result()
                if dist.get_rank() == 0:
                    publish(partial, final, step, progress)
                    then()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        written.add_done_callback(complete)

    def finish(self) -> Path | None:
        """Wait until the write that is under way has ended; its path, None when there was none. Raises CheckpointNotWritten."""
        if self._places is None:
            return None
        (final, partial), error = self._places, self._outcome.exception()
        self._places, self.started = None, None
        try:
            # The others know that all of the data is written; whether it has become a checkpoint only rank 0 does.
            _on_first_rank(lambda: _raise(error))
            _raise(error)
        except (Exception, CheckpointException) as failure:
            raise _not_written(final, partial, failure) from error
        return final


class _HostCopies:
    """Host memory for the state's tensors, kept from save to save: page-locked memory is quick to copy to and slow to get."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._used: set[tuple[str, tuple[int, ...]]] = set()

    def copy(self, tensor: ShardedTensor) -> torch.Tensor:
        """A copy of the data; from a GPU it is complete after `wait`."""
        assert tensor.data is not None
        data, key = tensor.data.detach(), (tensor.key, tuple(tensor.global_offset))
        self._used.add(key)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
            buffer = self._buffers[key] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
        return buffer.copy_(data, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies from the GPU, and let go of memory for what was not copied: experts that have left the site."""
        self._buffers = {key: self._buffers[key] for key in self._used}
        self._used = set()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


class _Staged(AsyncStager):
    """For torch: the state is in host memory already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


def _places(directory: Path, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of `step` will be, and where it is written before."""
    final = checkpoint_path(directory, step)
    return final, partial_path(final)


def _not_written(final: Path, partial: Path, error: BaseException) -> CheckpointNotWritten:
    """The error to raise for `error`, after rank 0 has removed what there is of the checkpoint."""
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return CheckpointNotWritten(
        f"checkpoint {final}: it could not be written ({_reason(error)}); earlier ones are as they were; make room or give "
        "another run.dir, and go on from the last one"
    )


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


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
        except (Exception, CheckpointException) as error:
            outcome[0] = _reason(error)
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise _FailedOnFirstRank(outcome[0])


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _storable(
    chunks: list[Any], optimizer: Any, outer: OuterState | None, copy: Callable[[ShardedTensor], torch.Tensor] | None = None
) -> dict[str, Any]:
    """What this rank writes of the state, as torch's saver takes it (collective); its data are copies when `copy` makes them."""
    tensors, _ = save_preprocess(sharded_state(chunks, optimizer, outer, loading=False))
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    if copy is not None:
        for tensor in nested_values(by_key):
            tensor.data = copy(tensor)
    stored: dict[str, Any] = mcore_to_pyt_state_dict(by_key, False)
    return stored


def _writing(folder: Path, *, staged: bool = False) -> dict[str, Any]:
    """How a state is written to `folder`; `staged`: it is in host memory."""
    # torch's own file writer in this process. Core's strategy spawns a process for each save, which imports torch and core anew
    # (11 s on two cores for a model of a few megabytes), and stores every rank's save plan in the index, classes that a safe
    # reader would have to admit.
    # Its copying ahead from the GPU would, for a state that is on the host, wait for the training's kernels at every 10 MB.
    ahead: dict[str, Any] = {"per_thread_copy_ahead": 0} if staged else {}
    return {
        "storage_writer": FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=True, **ahead),
        "planner": MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False),
    }


def _read(state: dict[str, Any], path: Path) -> dict[str, Any]:
    stored = read_index(path / ".metadata")
    wanted, _, factories = load_preprocess(state)
    for tensor in nested_values(wanted):
        shape = stored.get(tensor.key)
        # A vocabulary is padded to the layout: its rows may differ in number.
        if shape is None or (shape != tuple(tensor.global_shape) and not tensor.allow_shape_mismatch):
            found = "is not in it" if shape is None else f"has shape {shape} there and {tuple(tensor.global_shape)} in the model"
            raise ValueError(f"checkpoint {path}: {tensor.key} {found}; use the configuration of the run that wrote it")
    try:
        loaded = TorchDistLoadShardedStrategy().load(wanted, path)
    except (Exception, CheckpointException) as error:
        raise ValueError(f"checkpoint {path}: it could not be read ({_reason(error)}); use an earlier checkpoint") from error
    merged: dict[str, Any] = apply_factory_merges(loaded, factories)
    return merged


def load(path: Path, chunks: list[Any], optimizer: Any | None, outer: OuterState | None = None) -> dict[str, Any]:
    """Read a complete checkpoint into the model and, when given, optimiser and outer state (collective). Returns its `progress`.

    Raises ValueError naming the file and the finding when it is incomplete, belongs to another model, or its index holds anything
    but tensor metadata.
    """
    manifest = manifest_of(path)
    wanted = sharded_state(chunks, optimizer, outer, loading=True)
    if optimizer is not None and not wanted["random"].keys() <= read_index(path / ".metadata").keys():
        del wanted["random"]  # another layout's
    state = _read(wanted, path)
    for i, chunk in enumerate(chunks):
        missing, unexpected = unwrap(chunk).load_state_dict(state[f"model{i}"], strict=False)
        assert not unexpected and all(name.endswith("_extra_state") for name in missing), (missing, unexpected)
    if optimizer is not None:
        optimizer_state.restore(optimizer, state["optimizer"])
    if outer is not None:
        outer.restore(state.get("outer", {}))
    if "random" in state:
        random_state.restore(state["random"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return manifest["progress"]
