"""Which module sits in each slot of Megatron-core's transformer layer, layer by layer."""

import functools
from collections.abc import Sequence
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from s2.megatron import S2CoreAttention
from train.config.check import attention_pattern
from train.config.schema import Config
from train.engine.norm import RMSNorm
from train.federation.residency import resident_experts, trained_experts


def _mlp() -> Any:
    return functools.partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))


def _layer(config: Config, number: int, is_moe: bool) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=functools.partial(S2CoreAttention, pattern=attention_pattern(config), backend=config.attention.backend),
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )
    if is_moe:
        from moe.megatron import moe_layer_spec

        mlp = moe_layer_spec(config.moe, resident_experts(config, number), trained_experts(config, number))
    else:
        mlp = _mlp()
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: Config, core: Any, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """Specs of the layers that stage `pp_rank`, chunk `vp_stage` holds; layers are told apart by their global number."""
    first = get_transformer_layer_offset(core, vp_stage, pp_rank)
    count = get_num_layers_to_build(core, vp_stage, pp_rank)
    moe = set(config.moe.blocks(config.model.layers))
    layers: Sequence[ModuleSpec] = [_layer(config, number, number in moe) for number in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=list(layers), layer_norm=RMSNorm)
