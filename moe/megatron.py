"""Megatron-core binding: our grouped experts in core's `MoELayer`, its spec, and the load of each expert.

Core keeps its router (top-k, load-balancing and z loss), token dispatchers and shared expert; only the experts are ours,
because core's grouped ones need Transformer Engine. Verified against megatron-core 0.19.2.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .config import MoeConfig
from .experts import grouped_experts


class GroupedSwiGLUExperts(MegatronModule):
    """The experts of one rank: `w_in` (local experts, 2F, H) with the gate's rows first, `w_out` (local experts, H, F).

    Local expert i of expert-parallel rank r is the layer's global expert resident[r * local + i]; without `resident`, which lists
    the experts that the ranks hold together, r * local + i. An expert lives whole on a rank: expert tensor parallelism is
    refused. Takes and ignores keywords that later core versions add to the constructor.
    """

    global_experts: tuple[int, ...]
    """Global number of each local expert."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        name: str | None = None,
        resident: Sequence[int] | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        _refuse(config, pg_collection)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        first = self.ep_group.rank() * num_local_experts
        numbers = range(first, first + num_local_experts) if resident is None else resident[first : first + num_local_experts]
        self.global_experts = tuple(numbers)
        self.expt_dp_group = pg_collection.expt_dp
        inner, width = int(config.moe_ffn_hidden_size or config.ffn_hidden_size), config.hidden_size
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.w_in = nn.Parameter(torch.empty(num_local_experts, 2 * inner, width, dtype=config.params_dtype, device=device))
        self.w_out = nn.Parameter(torch.empty(num_local_experts, width, inner, dtype=config.params_dtype, device=device))
        # Other tensor-parallel ranks hold the same experts but see other tokens, so with TP too the gradients belong to the
        # expert data-parallel group, which core uses for parameters with allreduce=False.
        own_group = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
        for weight, dim in ((self.w_in, 1), (self.w_out, 2)):
            weight.allreduce = not own_group  # type: ignore[attr-defined]
            # "Parallel" although ETP is 1, as core's own experts say it: the gradient norm must count them on every rank.
            set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=dim, stride=1)
        if config.perform_initialization:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert from a seed of its own, so that its weights do not depend on which rank holds it.

        One number is taken from torch's CPU generator, which must stand alike on all expert-parallel ranks.
        """
        layer_seed = int(torch.randint(2**62, (), dtype=torch.int64))
        devices = [self.w_in.device] if self.w_in.is_cuda else []
        with torch.random.fork_rng(devices):
            for local, expert in enumerate(self.global_experts):
                torch.manual_seed(layer_seed + expert)
                self.config.init_method(self.w_in[local])
                self.config.output_layer_init_method(self.w_out[local])

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """(T, H) tokens sorted by local expert, (local experts,) counts and (T,) gate probabilities -> ((T, H), no bias)."""
        return grouped_experts(permuted_local_hidden_states, tokens_per_expert, self.w_in, self.w_out, permuted_probs), None

    def backward_dw(self) -> None:
        """Core calls this only with delayed weight gradients, which the constructor refuses."""
        raise RuntimeError("GroupedSwiGLUExperts computes weight gradients in its backward pass; nothing is delayed")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        """Both weights as slices of one tensor over all experts of the layer, so that a checkpoint loads at any EP."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError("singleton_local_shards=True: experts are saved as one tensor a layer; use singleton_local_shards=False")
        axis = len(sharded_offsets)
        slices = (axis, self.ep_group.rank(), self.ep_group.size())
        # (PP, TP, DP) as core writes it: the only copies of an expert are those of its data-parallel group.
        replica = (0, 0, self.expt_dp_group.rank())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", weight, *sharded_offsets, slices, replica_id=replica, prepend_axis_num=axis
            )
            for name, weight in (("w_in", self.w_in), ("w_out", self.w_out))
        }


def _refuse(config: TransformerConfig, pg_collection: Any) -> None:
    """Raise ValueError on a setting that these experts would not honour."""
    whole = "an expert is not split over ranks; use 1 and expert parallelism"
    rules: tuple[tuple[str, Any, Any, str], ...] = (
        ("expert_tensor_parallel_size", pg_collection.expt_tp.size(), 1, whole),
        ("add_bias_linear", config.add_bias_linear, False, "experts have no bias; use False"),
        ("gated_linear_unit", config.gated_linear_unit, True, "experts are SwiGLU; use True"),
        ("activation_func", config.activation_func, F.silu, "experts are SwiGLU; use torch.nn.functional.silu"),
        ("activation_func_clamp_value", config.activation_func_clamp_value, None, "experts do not clamp; use None"),
        ("glu_linear_offset", config.glu_linear_offset, 0, "experts add no offset; use 0"),
        ("moe_apply_probs_on_input", config.moe_apply_probs_on_input, False, "the gate acts on the inner activation; use False"),
        ("fp8", config.fp8, None, "experts compute in bf16 or fp32; use None"),
        ("fp4", config.fp4, None, "experts compute in bf16 or fp32; use None"),
        ("moe_latent_size", config.moe_latent_size, None, "experts work at the model's width; use None"),
        ("delay_wgrad_compute", config.delay_wgrad_compute, False, "weight gradients are not delayed; use False"),
    )
    for key, value, only, remedy in rules:
        if value != only:
            raise ValueError(f"{key}={value}: {remedy}")


def moe_layer_spec(config: MoeConfig) -> ModuleSpec:
    """Spec of a Mixture-of-Experts MLP for a transformer layer: core's `MoELayer` and router with our experts.

    A shared expert is built when `config.shared_width` is set; sizes and coefficients are read from core's TransformerConfig,
    which must carry `moe_shared_expert_intermediate_size=config.shared_width` and `expert_tensor_parallel_size=1`.
    """
    shared = None
    if config.shared_width:
        shared = partial(SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=GroupedSwiGLUExperts, shared_experts=shared, router=TopKRouter))


class ExpertLoad:
    """Counts the tokens that the routers send to each expert, on the device and without waiting for it.

        load = ExpertLoad(chunks, num_layers, num_experts)
        ...a training step...
        load.collect(group)            # {layer number: (E,) tokens}, since the last collect

    Each assignment of a training forward pass counts once: evaluation does not count, nor does the first of the two forward
    passes of a recomputed layer. Layers carry core's 1-based global numbers.
    """

    def __init__(self, modules: Iterable[nn.Module], num_layers: int, num_experts: int) -> None:
        modules = list(modules)
        device = next(parameter.device for module in modules for parameter in module.parameters())
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        routers = [router for module in modules for router in module.modules() if isinstance(router, TopKRouter)]
        self._handles = [router.register_forward_hook(self._count) for router in routers]

    @torch.no_grad()
    def _count(self, router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        probs, routing_map = output
        # Core's checkpoint runs the first pass without gradients and the recomputation with them.
        if router.training and probs.requires_grad:
            assert isinstance(router.layer_number, int)
            self._counts[router.layer_number - 1] += routing_map.sum(dim=0)

    def collect(self, group: dist.ProcessGroup | None = None) -> dict[int, Tensor]:
        """Counts of the layers that saw tokens, {layer: (E,) int64}, and start again at zero.

        With `group` they are summed over it and cover the layers of all its ranks; every rank of it must call. The routers of
        any two ranks see different tokens (tensor parallelism with experts needs sequence parallelism), so the group of all
        ranks gives the totals. Without `group`, this rank's own. Waits for the device.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        if group is not None:
            dist.all_reduce(counts, group=group)
        return {row + 1: counts[row] for row, total in enumerate(counts.sum(dim=1).tolist()) if total}

    def close(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
