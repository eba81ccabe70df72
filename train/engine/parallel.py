"""Process groups of a run: one call sets up torch.distributed and Megatron-core's parallel state for a layout."""

import datetime
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from train.config.schema import Config


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. `groups` is core's ProcessGroupCollection; `device` holds the model."""

    rank: int
    world: int
    dp_rank: int
    dp: int
    device: torch.device
    groups: Any

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def init_process_group(timeout_seconds: float) -> torch.device:
    """Join the world named by torchrun's environment (a world of one without it) and return this rank's device.

    gloo on the CPU; NCCL for CUDA tensors beside gloo for CPU tensors on a GPU. The store prefix carries torchrun's restart
    count: a restarted world must not read the dead one's addresses.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        from train.engine import cpu

        cpu.install()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    timeout = datetime.timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: Store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world,
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timeout,
            multi_tenant=True,
        )
        store = PrefixStore(f"leantron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    else:
        rank, world, store = 0, 1, HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return device


def build_ranks(config: Config, device: torch.device) -> Ranks:
    """Megatron-core's groups for `config.parallel` over the initialised world."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel = config.parallel
    _determinism(config.train.deterministic)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(config.train.timeout / 60),
        create_gloo_process_groups=device.type == "cuda",
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
    return Ranks(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        device=device,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def _determinism(wanted: bool) -> None:
    # warn_only: an operation for which torch has no deterministic kernel is named in a warning instead of ending the run.
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(wanted, warn_only=True)


def shutdown() -> None:
    """Leave all groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
