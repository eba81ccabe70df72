"""Megatron-core binding: our router and grouped experts in core's `MoELayer`, for sites that hold all experts or some.

Core keeps its token dispatchers, shared expert and router weights. The experts are ours because core's grouped ones need
Transformer Engine; the routing is ours because core's knows no absent experts, steers by a bias only with other score functions
than softmax, and weighs its losses by other tokens than the language model's. Verified against megatron-core 0.19.2.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .config import MoeConfig
from .experts import FreezeRows, grouped_experts
from .skip import check_residents

RoutingListener = Callable[[int, Tensor, Tensor | None, int], None]
"""Called with a layer's 1-based number, the load (E,) before skipping, which of the chosen assignments were kept, (tokens, E) bool
(None: all), and the number of tokens."""


class SiteRouter(TopKRouter):
    """Scores all E experts of a layer and routes to those that the site holds: `resident`, in the order of their slots.

    What comes out covers the slots alone: probabilities and routing map are (tokens, len(resident)). Losses, bias and statistics are
    taken over all E experts, on what was chosen before anything is skipped. `moe/skip.py` is the same in plain torch.
    """

    resident: Tensor
    """Global number of the expert in each slot, (slots,) int64."""
    here: Tensor
    """Whether the site holds it, for each of E experts, (E,) bool."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        *,
        moe: MoeConfig,
        resident: Sequence[int],
    ) -> None:
        # The layer around it is built for the experts that are here; the router has all of them.
        config = copy.copy(config)
        config.num_moe_experts = moe.experts
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        check_residents(resident, moe.mode, moe.gate, moe.experts, moe.top_k)
        if moe.gate == "kept" and moe.top_k == 1:
            raise ValueError("moe.gate=kept: makes the only gate of a token 1, so the router would learn nothing; use gate=full")
        self.mode, self.gate, self.bias_rate = moe.mode, moe.gate, moe.bias_rate
        here = torch.zeros(moe.experts, dtype=torch.bool)
        here[list(resident)] = True
        device = self.weight.device
        self.register_buffer("here", here.to(device), persistent=False)
        self.register_buffer("resident", torch.tensor(list(resident), device=device), persistent=False)
        if self.bias_rate:
            # Core's name and its care for fp32, not its update: that one wants another score function.
            del self.expert_bias
            self.register_buffer("expert_bias", torch.zeros(moe.experts, device=device))
            self.register_buffer("bias_load", torch.zeros(moe.experts, dtype=torch.int64, device=device), persistent=False)
        self.listeners: list[RoutingListener] = []

    def gating(self, input: Tensor) -> Tensor:
        """Scores of all experts, (..., E) fp32 or in the input's precision, as `moe_router_dtype` says."""
        if input.numel():
            scores: Tensor = super().gating(input)
            return scores
        # Core's function cannot reshape nothing; the weight still gets its zeros.
        return F.linear(input, self.weight).to(torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores (s, b, E) -> gate probabilities and routing map over the slots, (s * b, slots).

        Tokens of `padding_mask` (s, b) are routed and counted like all others, but have no part in the router's losses.
        """
        logits = logits.view(-1, self.config.num_moe_experts)
        if self.mode == "mask":
            logits = logits.masked_fill(~self.here, -torch.inf)
        training = self.training and torch.is_grad_enabled()
        valid = None if padding_mask is None else ~padding_mask.reshape(-1, 1)
        if training:
            logits = self._with_z_loss(logits, valid)
        scores = logits.detach()
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        probs, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            precomputed_indices=scores.topk(self.topk, dim=1).indices,
        )
        kept = chosen & self.here if self.mode == "skip" else None
        if training:
            self._count(chosen, kept)
        if self.gate == "kept":
            assert kept is not None
            probs = _renormalised(logits, kept)
        if training:
            probs = self._with_aux_loss(probs, logits, chosen, valid)
        return probs.index_select(1, self.resident), (chosen if kept is None else kept).index_select(1, self.resident)

    def _with_z_loss(self, logits: Tensor, valid: Tensor | None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient:
            return logits
        squares = logits.logsumexp(-1, keepdim=True).square()
        total = squares.sum() if valid is None else squares.masked_fill(~valid, 0.0).sum()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * total)

    def _with_aux_loss(self, probs: Tensor, logits: Tensor, chosen: Tensor, valid: Tensor | None) -> Tensor:
        coefficient = self.config.moe_aux_loss_coeff
        if not coefficient:
            return probs
        shares = logits.softmax(-1, dtype=torch.float32)
        if valid is not None:
            chosen, shares = chosen & valid, shares.masked_fill(~valid, 0.0)
        load = chosen.sum(0)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(load, group=self.tp_cp_group)
        # E * sum of (load / (k n)) * (shares / n) is the loss of n tokens, and it weighs n tokens: gradients are divided by their
        # number in the end. n = 0 leaves zeros that still reach the router.
        tokens = load.sum().clamp(min=1) / self.topk
        loss = self.config.num_moe_experts * coefficient * (load * shares.sum(0)).sum() / (self.topk * tokens)
        return MoEAuxLossAutoScaler.apply(probs, loss)

    @torch.no_grad()
    def _count(self, chosen: Tensor, kept: Tensor | None) -> None:
        if not (self.bias_rate or self.listeners):
            return
        load = chosen.sum(0)
        if self.bias_rate:
            self.bias_load += load
        for listener in self.listeners:
            listener(int(self.layer_number or 0), load, kept, chosen.shape[0])

    @torch.no_grad()
    def follow_load(self, load: Tensor) -> None:
        """Raise the selection bias of experts with less than the mean of `load` (E,) by `bias_rate`, lower that of those with more.

        In mode mask absent experts cannot be chosen: they have no part in the mean and keep their bias.
        """
        load = load.to(torch.float32)
        here = self.here if self.mode == "mask" else torch.ones_like(self.here)
        self.expert_bias += self.bias_rate * torch.sign((load * here).sum() / here.sum() - load) * here


def _renormalised(logits: Tensor, kept: Tensor) -> Tensor:
    """Softmax over the kept experts of each token, 0 elsewhere; (tokens, E)."""
    # A token without any kept expert would be a softmax over nothing: NaN, also in its gradient. It takes finite logits instead.
    empty = ~kept.any(-1, keepdim=True)
    return logits.masked_fill(~kept & ~empty, -torch.inf).softmax(-1) * kept


def update_biases(modules: Iterable[nn.Module], group: dist.ProcessGroup | None, *, apply: bool) -> None:
    """After a step, let the selection biases of the routers in `modules` follow the load since the last call (collective).

    `group`: the ranks that share these routers. Without `apply` (a step that was skipped) the load is dropped.
    """
    routers = [router for module in modules for router in module.modules() if isinstance(router, SiteRouter) and router.bias_rate]
    if not routers:
        return
    if apply:
        loads = torch.stack([router.bias_load for router in routers])
        dist.all_reduce(loads, group=group)
        for router, load in zip(routers, loads.unbind(), strict=True):
            router.follow_load(load)
    for router in routers:
        router.bias_load.zero_()


class _KeptAllToAll(MoEAlltoAllTokenDispatcher):
    """Core's all-to-all, which counts on `top_k` assignments for each token unless it drops some itself."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        counts: Tensor = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return counts


class SiteMoELayer(MoELayer):
    """Core's layer for the experts of a site: it has `len(resident)` of the router's `moe.experts`.

    `resident` lists the global numbers of the experts here, the same on all expert-parallel ranks: slot i of rank r is
    resident[r * local + i]. `trained` lists those of them that learn, in mode frozen. Raises ValueError on lists that do not fit
    the mode or the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        *args: Any,
        moe: MoeConfig,
        resident: Sequence[int],
        trained: Sequence[int],
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        if len(resident) % pg_collection.ep.size():
            raise ValueError(
                f"resident={list(resident)}: {pg_collection.ep.size()} expert-parallel ranks must share {len(resident)} experts evenly; "
                "use another number of either"
            )
        config = copy.copy(config)
        config.num_moe_experts = len(resident)
        super().__init__(config, submodules, *args, pg_collection=pg_collection, **kwargs)
        if moe.mode == "skip" and config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = _KeptAllToAll(
                self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
            )
        if moe.mode == "frozen":
            self.experts.freeze_others(trained)


class GroupedSwiGLUExperts(MegatronModule):
    """The experts of one rank: `w_in` (local experts, 2F, H) with the gate's rows first, `w_out` (local experts, H, F).

    Local expert i of expert-parallel rank r is the layer's global expert resident[r * local + i]; without `resident`, which lists
    the experts that the ranks hold together, r * local + i. An expert lives whole on a rank: expert tensor parallelism is
    refused. Takes and ignores keywords that later core versions add to the constructor.
    """

    global_experts: tuple[int, ...]
    """Global number of each local expert."""
    frozen_slots: tuple[int, ...]
    """Local experts that do not learn."""
    trainable: Tensor | None
    """Which of the local experts learn, (local experts,) bool; None: all."""

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
        self.frozen_slots = ()
        self.register_buffer("trainable", None, persistent=False)
        if config.perform_initialization:
            self.reset_parameters()

    def freeze_others(self, trained: Sequence[int]) -> None:
        """Give zero gradients to the experts that are not among `trained`, by global number.

        An optimiser with weight decay or momentum moves them all the same: whoever steps it must hold them.
        """
        learns = [expert in trained for expert in self.global_experts]
        self.frozen_slots = tuple(slot for slot, does in enumerate(learns) if not does)
        self.trainable = torch.tensor(learns, device=self.w_in.device)

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
        w_in, w_out = self.w_in, self.w_out
        if self.trainable is not None:
            w_in, w_out = FreezeRows.apply(w_in, self.trainable), FreezeRows.apply(w_out, self.trainable)
        return grouped_experts(permuted_local_hidden_states, tokens_per_expert, w_in, w_out, permuted_probs), None

    def backward_dw(self) -> None:
        """Core calls this only with delayed weight gradients, which the constructor refuses."""
        raise RuntimeError("GroupedSwiGLUExperts computes weight gradients in its backward pass; nothing is delayed")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
        """Each expert whole under a key of its own, `<prefix><global number>.w_in` and `.w_out`.

        A checkpoint then loads wherever its experts are held: at any EP, and by a site that holds some of them.
        """
        # (PP, TP, DP) as core writes it: the only copies of an expert are those of its data-parallel group.
        replica = (0, 0, self.expt_dp_group.rank())
        by_expert = _ByExpert(self.global_experts, sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensorFactory(f"{prefix}{name}", weight, by_expert.split, by_expert.join, replica)
            for name, weight in (("w_in", self.w_in), ("w_out", self.w_out))
        }


class _ByExpert:
    """Stacked experts as tensors under keys of their own; serves weights and what an optimiser keeps for each of them."""

    def __init__(self, experts: tuple[int, ...], offsets: tuple) -> None:
        self._experts, self._offsets = experts, offsets

    def split(self, key: str, stacked: Tensor, replica: ReplicaId, _range: slice | None) -> dict[str, ShardedTensor]:
        head, _, name = key.rpartition(".")
        axes = len(self._offsets)
        return {
            str(expert): ShardedTensor.from_rank_offsets(
                f"{head}.{expert}.{name}", row, *self._offsets, replica_id=replica, prepend_axis_num=axes
            )
            for expert, row in zip(self._experts, stacked.detach().unbind(), strict=True)
        }

    def join(self, loaded: dict[str, Tensor]) -> Tensor:
        rows = [loaded[str(expert)] for expert in self._experts]
        first = rows[0]
        size = first.numel() * first.element_size()
        in_place = all(
            row.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and row.data_ptr() == first.data_ptr() + i * size
            for i, row in enumerate(rows)
        )
        # Rows are loaded into the slices of the stacked tensor that asked for them: it is that tensor again, not a copy.
        return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride())) if in_place else torch.stack(rows)


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


def moe_layer_spec(moe: MoeConfig, resident: Sequence[int] | None = None, trained: Sequence[int] | None = None) -> ModuleSpec:
    """Spec of a Mixture-of-Experts MLP for a transformer layer: core's `MoELayer` with our router and experts.

    `resident`: global numbers of the experts that the site has of this layer (None: all); `trained`: those that learn, in mode
    frozen (None: all it has). A shared expert is built when `moe.shared_width` is set; sizes and coefficients are read from core's
    TransformerConfig, which must carry `moe_shared_expert_intermediate_size=moe.shared_width` and `expert_tensor_parallel_size=1`.
    """
    held = tuple(range(moe.experts)) if resident is None else tuple(resident)
    shared = None
    if moe.shared_width:
        shared = partial(SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    return ModuleSpec(
        module=SiteMoELayer,
        params={"moe": moe, "resident": held, "trained": held if trained is None else tuple(trained)},
        submodules=MoESubmodules(
            experts=partial(GroupedSwiGLUExperts, resident=held),
            shared_experts=shared,
            router=partial(SiteRouter, moe=moe, resident=held),
        ),
    )
