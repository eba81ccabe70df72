"""From a checked configuration to a model in data-parallel wrapping and its optimiser."""

import os
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from train.config.schema import Config
from train.engine.core_config import transformer_config
from train.engine.frozen import hold_frozen
from train.engine.init import initialize
from train.engine.layout import ParallelLayout
from train.engine.model import LanguageModel
from train.engine.offload import offload, own_masters
from train.engine.parallel import Ranks


def build_model(config: Config, ranks: Ranks, *, trainable: bool = True) -> list[Any]:
    """This rank's model chunks (one, or `parallel.vpp`), initialised by parameter name.

    Trainable chunks are wrapped in core's DistributedDataParallel, which owns the gradient buffers (fp32 main gradients).
    """
    core = transformer_config(config)
    chunks: list[Any] = []
    vpp = core.virtual_pipeline_model_parallel_size
    for chunk in range(vpp or 1):
        stage = chunk if vpp else None
        model = LanguageModel(
            config,
            core,
            ranks.groups,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        initialize(model, config, ranks.groups)
        chunks.append(model.to(ranks.device))
    if core.bf16:
        chunks = [Float16Module(core, chunk) for chunk in chunks]
    if not trainable:
        return chunks
    return _data_parallel(chunks, core, config, ranks)


def _data_parallel(chunks: list[Any], core: TransformerConfig, config: Config, ranks: Ranks) -> list[Any]:
    overlap = ranks.dp > 1 and ranks.device.type == "cuda"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and config.parallel.distributed_optimizer,
        check_for_nan_in_grad=False,  # the training loop decides on NaN, on all ranks alike
    )
    wrapped = [
        DistributedDataParallel(config=core, ddp_config=ddp, module=chunk, disable_bucketing=i > 0, pg_collection=ranks.groups)
        for i, chunk in enumerate(chunks)
    ]
    if overlap:
        core.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        core.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].start_grad_sync
    core.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(config: Config, ranks: Ranks, chunks: list[Any]) -> Any:
    """Core's (distributed) optimiser with torch's fused AdamW inside: fp32 masters over bf16 weights, no decay on norms.

    Its states are where `offload.mode` says.
    """
    optim = config.optim
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip,
        bf16=config.train.precision == "bf16",
        params_dtype=torch.bfloat16 if config.train.precision == "bf16" else torch.float32,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
    )
    offloaded = config.offload.mode != "none"
    if offloaded:
        own_masters(settings)
    optimizer = get_megatron_optimizer(settings, chunks, use_gloo_process_groups=ranks.device.type == "cuda")
    if offloaded:
        micro_batches = ParallelLayout.build(config, ranks.world).micro_batches(config)
        offload(optimizer, config.offload, _threads_of_a_rank(), micro_batches)
    else:
        for part in optimizer.chained_optimizers:
            if part.optimizer is not None:
                _prepare_adam(part.optimizer)
    if config.moe.mode == "frozen":
        hold_frozen(chunks, optimizer)
    return optimizer


def _threads_of_a_rank() -> int:
    # torchrun sets one thread a process, which costs the host's Adam its speed.
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _prepare_adam(adam: torch.optim.Optimizer) -> None:
    # The state exists before the first step: core reads `step` from it when a checkpoint is loaded into a fresh optimiser.
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }
