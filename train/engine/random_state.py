"""The random generators' states in a checkpoint: torch's and Megatron-core's, one set for each rank.

Nothing in the model draws random numbers after initialisation (there is no dropout); the states are kept so that what does so later
goes on where it was. They belong to a layout: another one keeps the generators as they are seeded.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def sharded_state() -> dict[str, ShardedTensor]:
    """This rank's generator states by their name in a checkpoint, which carries the layout and the rank."""
    return {f"{_place()}.{name}": ShardedTensor.from_rank_offsets(f"{_place()}.{name}", state) for name, state in _states().items()}


def restore(state: dict[str, torch.Tensor]) -> None:
    """Set the generators to loaded `state` (of `sharded_state`)."""
    own = {name.removeprefix(f"{_place()}."): value for name, value in state.items()}
    torch.set_rng_state(own["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: own[f"core.{name}"] for name in tracker.get_states()})


def _states() -> dict[str, torch.Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    tracker: dict[str, Any] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"core.{name}": value.clone() for name, value in tracker.items()}


def _place() -> str:
    tp, pp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_pipeline_model_parallel_world_size()
    ep = parallel_state.get_expert_model_parallel_world_size()
    return f"random.world{dist.get_world_size()}_tp{tp}_pp{pp}_ep{ep}.{dist.get_rank()}"
