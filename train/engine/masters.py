"""The fp32 weights that the optimiser steps from, wherever they are: what an outer step reads and writes.

A rank has whole masters, a data-parallel shard of them, or, in fp32, none beside the weights themselves; they lie on the device or, with
`offload.mode`, on the host. Here each is a `Master`: a range of a named parameter with a way to read and to write it. After writing,
`publish` brings the model's weights up to date on every rank. `moments` gives Adam's moments of the experts in the same form, for
experts that move; an outer step leaves moments alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor

from train.engine.checkpoint import unwrap
from train.engine.init import global_name
from train.engine.offload import OffloadedDistributedOptimizer
from train.engine.optimizer_state import parts, weights

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_BIAS = "router.expert_bias"

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, as the optimiser names them."""

_Access = tuple[int, int, Callable[[], Tensor], Callable[[Tensor], object]]


@dataclass(frozen=True)
class Master:
    """What this rank has of a parameter, or of a moment of it: elements `start` to `end`, flattened."""

    name: str
    """The parameter's name in a checkpoint; that of the embedding for a tied head on another pipeline stage."""
    weight: Tensor
    """The model's own tensor, whole on this rank."""
    start: int
    end: int
    sliced: bool
    """Tensor-parallel ranks have different parts of the parameter; else they have the same."""
    experts: tuple[int, ...] | None
    """Global numbers of the experts along the first dim of a stack of experts."""
    read: Callable[[], Tensor]
    """The elements in fp32, flat, on any device; may be a view."""
    write: Callable[[Tensor], object]
    """Set the elements, from a flat fp32 tensor on any device."""


def masters(chunks: list[Any], optimizer: Any) -> list[Master]:
    """All that this rank holds, in the order of the model. Buffers that training changes (a router's bias) are among them."""
    accesses = _by_weight(optimizer, None)
    found = []
    for name, tensor, experts, tied in _named(chunks):
        if isinstance(tensor, torch.nn.Parameter):
            if id(tensor) not in accesses:
                continue  # another data-parallel rank's
            start, end, read, write = accesses[id(tensor)]
        else:
            start, end, read, write = 0, tensor.numel(), *_plain(tensor)
        sliced = experts is None and bool(getattr(tensor, "tensor_model_parallel", False))
        found.append(Master(_EMBEDDING if tied else name, tensor, start, end, sliced, experts, read, write))
    return found


def moments(chunks: list[Any], optimizer: Any, moment: str) -> list[Master]:
    """What this rank has of one of `MOMENTS` of its experts, under the experts' names, in the order of the model."""
    accesses = _by_weight(optimizer, moment)
    return [
        Master(name, tensor, start, end, False, experts, read, write)
        for name, tensor, experts, _ in _named(chunks)
        if experts is not None and id(tensor) in accesses
        for start, end, read, write in [accesses[id(tensor)]]
    ]


@torch.no_grad()
def publish(chunks: list[Any], optimizer: Any) -> None:
    """Bring the model's weights up to date after masters were written (collective)."""
    for _, part in parts(optimizer):
        if isinstance(part, MixedPrecisionOptimizer) and not isinstance(part, OffloadedDistributedOptimizer):
            part._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _named(chunks: list[Any]) -> Iterator[tuple[str, Tensor, tuple[int, ...] | None, bool]]:
    """Global name, tensor, experts of a stack, and whether it is a tied head's copy, of all that training changes."""
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(_BIAS))
        for local, tensor in (*model.named_parameters(), *buffers):
            experts = getattr(model.get_submodule(local.rpartition(".")[0]), "global_experts", None)
            tied = local == _HEAD and model.share_embeddings_and_output_weights
            yield global_name(local, numbers), tensor, experts, tied


def _plain(tensor: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    flat = tensor.detach().view(-1)
    return flat.float, flat.copy_


def _by_weight(optimizer: Any, moment: str | None) -> dict[int, _Access]:
    """Where the fp32 weights that Adam steps from are, or one of its moments, by the id of the model's weight."""
    return {id(weight): access for _, part in parts(optimizer) for weight, access in _accesses(part, moment)}


def _accesses(part: Any, moment: str | None) -> Iterator[tuple[Tensor, _Access]]:
    """(model weight, (start, end, read, write)) of all that an optimiser keeps on this rank."""
    if isinstance(part, OffloadedDistributedOptimizer):
        for weight in part.model_param_group_index_map:
            place = part._get_model_param_range_map(weight)["param"]
            yield weight, (place.start, place.end, *(part.master_of(weight) if moment is None else part.moment_of(weight, moment)))
        return
    for weight, main in weights(part):
        found = main if moment is None else part.optimizer.state[main][moment]
        if isinstance(part, DistributedOptimizer):
            place = part._get_model_param_range_map(weight)["param"]
            yield weight, (place.start, place.end, *_plain(found))
        else:
            yield weight, (0, weight.numel(), *_plain(found))
