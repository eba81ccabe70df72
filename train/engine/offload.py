"""Megatron-core's distributed optimiser with its states on the host: each rank's shard belongs to an `OffloadedAdam`.

Core has a path for optimisers that own their masters (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, made for Transformer
Engine's FusedAdam): no masters are allocated, the inner optimiser is given the shards of the bf16 weights themselves, gradients
come as `decoupled_grad`, views of the reduced gradient buffer, and nothing is copied back after the step. That is what an
optimiser on the host needs, so core is put on that path and its torch AdamW, which has allocated nothing yet, is replaced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from train.offload.adam import OffloadedAdam


def own_masters(settings: OptimizerConfig) -> None:
    """Put core on the path of optimisers that own their masters; to be called before core builds the optimiser."""
    # The public flag, use_precision_aware_optimizer, insists on Transformer Engine; this one is what the code reads.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def offload(optimizer: Any, mode: str, fraction: float, cpu_threads: int) -> None:
    """Replace each part of core's chained `optimizer` that this rank has parameters of by one with its states on the host."""
    for number, part in enumerate(optimizer.chained_optimizers):
        if not part.is_stub_optimizer:
            optimizer.chained_optimizers[number] = OffloadedDistributedOptimizer(part, mode, fraction, cpu_threads)


class OffloadedDistributedOptimizer(DistributedOptimizer):
    """Core's distributed optimiser around an `OffloadedAdam`; made from one that core has built, whose ranges and groups it keeps."""

    optimizer: OffloadedAdam

    def __init__(self, built: DistributedOptimizer, mode: str, fraction: float, cpu_threads: int) -> None:
        self.__dict__.update(built.__dict__)
        groups = self.optimizer.param_groups
        self.shard_fp32_groups = [[_leaf(shard) for shard in group] for group in built.shard_fp32_groups]
        self._shards = {
            model: shard
            for models, shards in (
                (self.model_fp32_groups, self.shard_fp32_groups),
                (self.model_float16_groups, self.shard_float16_groups),
            )
            for model, shard in zip(_flat(models), _flat(shards), strict=True)
        }
        for group, full, low in zip(groups, self.shard_fp32_groups, self.shard_float16_groups, strict=True):
            group["params"] = [*full, *low]
        self.optimizer = OffloadedAdam(groups, mode=mode, fraction=fraction, cpu_threads=cpu_threads)

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        shard = self._shards[model_param]
        states = self.optimizer.states_of(shard)
        return {"param": states.pop("master", shard), **states}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        shard = self._shards[model_param]
        if shard.dtype == torch.float32:
            shard.copy_(tensors["param"])
            self.optimizer.refresh_masters([shard])
        self.optimizer.set_states_of(shard, {"master": tensors["param"], **tensors})

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any] | None = None) -> None:
        # Core's `reload_model_params`: after weights were written from outside.
        if state_dict is not None:
            raise ValueError("state_dict: masters are taken from the model's weights; load them first and leave it out")
        self.optimizer.refresh_masters()


def _flat(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group]


def _leaf(shard: Tensor) -> Tensor:
    """The shard as a tensor that an optimiser takes: core's views of fp32 weights belong to autograd's graph."""
    leaf = shard.detach()
    leaf.__dict__.update(shard.__dict__)
    return leaf
