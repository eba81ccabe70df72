"""The optimiser's state in a checkpoint: by parameter, the same whatever the layout.

Megatron-core stores an optimiser as it happens to be arranged: one entry for each sub-optimiser (expert weights have one of their own
when ranks share them out) and each group of parameters on the rank, so that another layout finds too many or too few. Here every
parameter has three tensors under its own name, the fp32 weights and Adam's two moments, and the count of steps is one tensor for all.
Learning rate, decay and the like are not stored: they are the configuration's.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "optimizer.step"


def sharded_state(optimizer: Any, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The state of core's chained `optimizer` as sharded tensors, named after those of `model_state` (collective)."""
    tensors, _ = extract_sharded_tensors_and_factories(model_state)
    owners = {id(tensor.data): tensor for tensor in nested_values(tensors)}
    state: dict[str, Any] = {}
    for number, part in parts(optimizer):
        if _is_spread(part):
            state[number] = part.sharded_param_state_fully_reshardable(model_state, loading, {})
        else:
            state[number] = {
                str(i): {
                    # A distributed optimiser keeps its masters and moments flat.
                    name: make_sharded_optimizer_tensor(owners[id(weight)], value.view(weight.shape), prefix=f"optimizer.state.{name}")
                    for name, value in _tensors(part, main).items()
                }
                for i, (weight, main) in enumerate(weights(part))
            }
    step = torch.tensor([steps_taken(optimizer)], dtype=torch.int64)
    state["step"] = ShardedTensor.from_rank_offsets(_STEP, step, replica_id=dist.get_rank())
    return state


def restore(optimizer: Any, state: dict[str, Any]) -> None:
    """Put loaded `state` (of `sharded_state`) into the optimiser."""
    for number, part in parts(optimizer):
        if _is_spread(part):
            # Core was written for fused Adams without a `step` tensor and looks for one among the checkpoint's.
            part._set_main_param_and_optimizer_states = functools.partial(_set_keeping_step, part)
            part.load_parameter_state_from_fully_reshardable(state[number])
        else:
            for i, (_, main) in enumerate(weights(part)):
                for name, value in _tensors(part, main).items():
                    value.data.copy_(state[number][str(i)][name].view(value.shape))
        for values in part.optimizer.state.values():
            values["step"].fill_(float(state["step"]))


def steps_taken(optimizer: Any) -> int:
    """Updates that Adam has made (its bias correction counts them); skipped steps do not count."""
    for _, part in parts(optimizer):
        for values in part.optimizer.state.values():
            return int(values["step"])
    return 0


def parts(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The optimisers inside core's chained one that have parameters on this rank, each with its number."""
    # A rank without any parameter of a kind (a stage without experts) has a stub in that place.
    for number, part in enumerate(optimizer.chained_optimizers):
        if part.optimizer is not None and not getattr(part, "is_stub_optimizer", False):
            yield str(number), part


def _is_spread(part: Any) -> bool:
    """Whether the states have to be gathered: shared out over data-parallel ranks, or kept by the optimiser in a form of its own."""
    if not isinstance(part, DistributedOptimizer):
        return False
    return part.data_parallel_group.size() > 1 or part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def weights(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model weight, fp32 weight that Adam updates) of an optimiser that is not spread; the same tensor in fp32 if not distributed."""
    if isinstance(part, DistributedOptimizer):
        for weight, (group, order) in part.model_param_group_index_map.items():
            yield weight, part.optimizer.param_groups[group]["params"][order]
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, mains, strict=True)
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    for weights in groups:
        yield from ((weight, weight) for weight in weights)


def _tensors(part: Any, main: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"param": main, **{name: part.optimizer.state[main][name] for name in _MOMENTS}}


def _set_keeping_step(part: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    main = part.optimizer.param_groups[group]["params"][order]
    type(part)._set_main_param_and_optimizer_states(part, model_param, {"step": part.optimizer.state[main]["step"], **tensors})
