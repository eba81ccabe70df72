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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
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
from .megatron_experts import GroupedSwiGLUExperts, refuse_others
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
        _refuse(config)
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

    @torch.no_grad()
    def hold(self, resident: Sequence[int]) -> None:
        """Have the slots stand for other experts, as many as before."""
        self.resident.copy_(torch.tensor(list(resident)))
        self.here.zero_()
        self.here[self.resident] = True

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


def _refuse(config: TransformerConfig) -> None:
    """Raise ValueError on a setting of core's router that this one would not honour."""
    softmax = "gates are a softmax over the chosen experts"
    ours = "MoeConfig.bias_rate is the bias here; use False"
    sums = "the losses of the router are sums over tokens; use True and divide gradients by the tokens of a step"
    refuse_others(
        (
            ("calculate_per_token_loss", config.calculate_per_token_loss, True, sums),
            ("moe_router_load_balancing_type", config.moe_router_load_balancing_type, "aux_loss", "there is no other; use aux_loss"),
            ("moe_router_score_function", config.moe_router_score_function, "softmax", f"{softmax}; use softmax"),
            ("moe_router_topk_scaling_factor", config.moe_router_topk_scaling_factor, None, f"{softmax}; use None"),
            ("moe_router_num_groups", config.moe_router_num_groups, None, "experts are chosen one by one; use None"),
            ("moe_router_enable_expert_bias", config.moe_router_enable_expert_bias, False, ours),
            ("moe_expert_capacity_factor", config.moe_expert_capacity_factor, None, "an expert takes all its tokens; use None"),
            ("moe_enable_routing_replay", config.moe_enable_routing_replay, False, "nothing is replayed; use False"),
        )
    )


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

    def hold(self, resident: Sequence[int], trained: Sequence[int]) -> None:
        """Have the slots stand for the experts `resident`, as many as before, of which `trained` learn in mode frozen.

        What is in the slots does not change; the dispatcher knows only slots. Raises ValueError on another number of experts.
        """
        if len(resident) != len(self.router.resident):
            raise ValueError(f"resident={list(resident)}: there are {len(self.router.resident)} slots; name as many experts")
        self.router.hold(resident)
        self.experts.hold(resident)
        if self.router.mode == "frozen":
            self.experts.freeze_others(trained)


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
