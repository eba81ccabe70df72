"""Our grouped experts as Megatron-core's `MoELayer` takes them: one rank's stack, its place in a checkpoint, what it refuses."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from .experts import FreezeRows, grouped_experts


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
        self.hold(range(self.ep_group.size() * num_local_experts) if resident is None else resident)
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

    def hold(self, resident: Sequence[int]) -> None:
        """Say which experts of the layer the ranks hold together, by global number; the weights stay as they are."""
        first = self.ep_group.rank() * self.num_local_experts
        self.global_experts = tuple(resident[first : first + self.num_local_experts])

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
    rules = (
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
    refuse_others(rules)


def refuse_others(rules: Iterable[tuple[str, Any, Any, str]]) -> None:
    """Raise ValueError for the first of `rules` (key, its value, the only one allowed, remedy) that does not hold."""
    for key, value, only, remedy in rules:
        if value != only:
            raise ValueError(f"{key}={value}: {remedy}")
