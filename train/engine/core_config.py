"""Leantron's configuration in Megatron-core's words: the one place that fills core's TransformerConfig."""

import torch
from megatron.core.transformer import TransformerConfig

from train.config.schema import Config


def transformer_config(config: Config) -> TransformerConfig:
    """Core's configuration of a checked `config` (derived sizes filled in). Raises core's own error on what it refuses."""
    model, parallel, moe = config.model, config.parallel, config.moe
    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    recompute: dict = {}
    if config.train.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.train.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    experts: dict = {}
    if moe.experts:
        experts = {
            "num_moe_experts": moe.experts,
            "moe_router_topk": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_width,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": moe.aux_coef,
            "moe_z_loss_coeff": moe.z_coef or None,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": moe.top_k == 1,
            "moe_shared_expert_intermediate_size": moe.shared_width,
        }
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_width,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is a sum over tokens; gradients are divided once by the global count of valid tokens.
        calculate_per_token_loss=True,
        # Weights come from train.engine.init, by parameter name, so that every layout starts from the same model.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=cuda,
        cross_entropy_fusion_impl="native",
        batch_p2p_comm=cuda,
        deterministic_mode=config.train.deterministic and cuda,
        **recompute,
        **experts,
    )
