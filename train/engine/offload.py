"""Megatron-core's distributed optimiser with its states on the host: each rank's shard belongs to an `OffloadedAdam`.

Core has a path for optimisers that own their masters (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`, made for Transformer
Engine's FusedAdam): no masters are allocated, the inner optimiser is given the shards of the bf16 weights themselves, gradients
come as `decoupled_grad`, views of the reduced gradient buffer, and nothing is copied back after the step. That is what an
optimiser on the host needs, so core is put on that path and its torch AdamW, which has allocated nothing yet, is replaced.

Gradients of the last micro-batch free memory as they come: from then on states may arrive ahead of the step (`offload.prefetch`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from train.offload.adam import OffloadedAdam
from train.offload.config import OffloadConfig


def own_masters(settings: OptimizerConfig) -> None:
    """Put core on the path of optimisers that own their masters; to be called before core builds the optimiser."""
    # The public flag, use_precision_aware_optimizer, insists on Transformer Engine; this one is what the code reads.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def offload(optimizer: Any, settings: OffloadConfig, cpu_threads: int, micro_batches: int) -> None:
    """Replace each part of core's chained `optimizer` that this rank has parameters of by one with its states on the host.

    `micro_batches` of a step. Raises ValueError when the host's Adam that `settings` ask for cannot work.
    """
    for number, part in enumerate(optimizer.chained_optimizers):
        if not part.is_stub_optimizer:
            optimizer.chained_optimizers[number] = OffloadedDistributedOptimizer(part, settings, cpu_threads, micro_batches)


def exposed_seconds(optimizer: Any, *, wait: bool = False) -> dict[str, float]:
    """`offload_exposed_seconds`: what a step since the last call waited for the states on the host, in the mean; {} without offload.

    `wait`: have the host wait for the last step's end, which else counts in the next call.
    """
    waits = [
        part.optimizer.exposed_seconds(wait) for part in optimizer.chained_optimizers if isinstance(part, OffloadedDistributedOptimizer)
    ]
    told = [seconds for seconds in waits if seconds is not None]
    return {"offload_exposed_seconds": sum(told)} if told else {}


class OffloadedDistributedOptimizer(DistributedOptimizer):
    """Core's distributed optimiser around an `OffloadedAdam`; made from one that core has built, whose ranges and groups it keeps."""

    optimizer: OffloadedAdam

    def __init__(self, built: DistributedOptimizer, settings: OffloadConfig, cpu_threads: int, micro_batches: int) -> None:
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
        self.optimizer = OffloadedAdam(
            groups, mode=settings.mode, fraction=settings.fraction, cpu_adam=settings.cpu_adam, cpu_threads=cpu_threads
        )
        self.micro_batches = micro_batches
        self._gradients: dict[Tensor, int] = {}
        if settings.mode == "stream" and settings.prefetch:
            for model_param in self._shards:
                model_param.register_post_accumulate_grad_hook(self._gradient_came)

    def _gradient_came(self, model_param: Tensor) -> None:
        """A micro-batch's gradient of a parameter is there: of the last one, it frees memory that states may take."""
        count = self._gradients[model_param] = self._gradients.get(model_param, 0) + 1
        if count == self.micro_batches:
            self.optimizer.prefetch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Core's, at the start of a step: what came ahead of a step that was skipped is given back."""
        super().zero_grad(set_to_none)
        self._gradients.clear()
        self.optimizer.drop_prefetched()

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

    def master_of(self, model_param: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
        """Ways to read and to write this rank's fp32 weights of a parameter, flat; what is written reaches the shard and its master."""
        shard = self._shards[model_param]
        if shard.dtype == torch.float32:
            return lambda: shard.detach().view(-1), functools.partial(self._write_full, shard)
        return lambda: self.optimizer.states_of(shard, ("master",))["master"].view(-1), functools.partial(self._write_low, shard)

    def moment_of(self, model_param: Tensor, moment: str) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
        """Ways to read and to write what this rank has of `exp_avg` or `exp_avg_sq` of a parameter, flat."""
        shard = self._shards[model_param]
        return (
            lambda: self.optimizer.states_of(shard, (moment,))[moment].view(-1),
            lambda value: self.optimizer.set_states_of(shard, {moment: value}),
        )

    @torch.no_grad()
    def _write_full(self, shard: Tensor, value: Tensor) -> None:
        shard.view(-1).copy_(value)
        self.optimizer.refresh_masters([shard])

    @torch.no_grad()
    def _write_low(self, shard: Tensor, value: Tensor) -> None:
        shard.view(-1).copy_(value)
        self.optimizer.set_states_of(shard, {"master": value})

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
