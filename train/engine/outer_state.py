"""The outer step's state in a checkpoint: one tensor for each named parameter, the same whatever the site's layout.

Only a coordinate's sender has these tensors, so what it gives is the one copy. A slice of a dense parameter is stored like the
parameter itself; an expert and a router's row are tensors of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

PREFIX = "outer"


class OuterState(Protocol):
    """Who has such a state."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state's parts, each by parameter name; {} on a rank that sends nothing."""
        ...

    def restore(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Take over what was loaded in the place of `tensors()`."""
        ...


def sharded_state(tensors: Mapping[str, Mapping[str, Tensor]], model_state: dict[str, Any]) -> dict[str, Any]:
    """`tensors` as core's sharded tensors `outer.<part>.<name>`; `model_state` is the checkpoint's view of the same rank's model."""
    owners = {value.key: value for value in nested_values(model_state)}
    return {
        part: {name: _sharded(f"{PREFIX}.{part}.{name}", tensor, owners.get(name)) for name, tensor in named.items()}
        for part, named in tensors.items()
    }


def _sharded(key: str, tensor: Tensor, owner: ShardedTensor | ShardedTensorFactory | None) -> ShardedTensor | ShardedTensorFactory:
    if owner is None:
        return ShardedTensor.from_rank_offsets(key, tensor)
    if isinstance(owner, ShardedTensorFactory):
        return replace(owner, key=key, data=tensor, replica_id=0)
    return replace(owner, key=key, data=tensor, dtype=tensor.dtype, replica_id=0)
