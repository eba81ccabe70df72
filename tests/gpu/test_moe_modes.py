"""A site's layer on a GPU: skipped assignments with bf16, the grouped multiply and the device-side counts of core's all-to-all."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

WIDTH, INNER, EXPERTS, TOP_K, TOKENS, HELD = 128, 64, 8, 2, 512, (6, 1, 3)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    from train.engine import parallel

    yield
    parallel.shutdown()


def build(moe: dict[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from moe.config import MoeConfig
    from moe.megatron import moe_layer_spec
    from train.engine.parallel import init_process_group

    init_process_group(60.0)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, ffn_hidden_size=INNER, moe_ffn_hidden_size=INNER,
        num_moe_experts=EXPERTS, moe_router_topk=TOP_K, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01,
        moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False, calculate_per_token_loss=True, init_method_std=0.1,
    )  # fmt: skip
    settings = MoeConfig(experts=EXPERTS, top_k=TOP_K, ffn_width=INNER, **moe)
    torch.manual_seed(5)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = moe_layer_spec(settings, HELD)(config=config, pg_collection=groups, is_mtp_layer=False)
    layer.set_layer_number(1)
    return layer.cuda()


@pytest.mark.parametrize("gate", ["full", "kept"])
@pytest.mark.parametrize("push", [0.0, 9.0])
def test_skipping_equals_the_library_in_fp32(gate: Any, push: float) -> None:
    """`push`: every token prefers experts that are not here."""
    from moe.load import ExpertLoad
    from moe.skip import Router, SkipMoE, StackedExperts

    layer = build({"mode": "skip", "gate": gate})
    x = torch.randn(TOKENS, 1, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).abs().bfloat16()
    absent = [e for e in range(EXPERTS) if e not in HELD]
    library = SkipMoE(Router(WIDTH, EXPERTS, TOP_K), StackedExperts(len(HELD), WIDTH, INNER)).cuda()
    with torch.no_grad():
        layer.router.weight[absent] += push
        library.router.weight.copy_(layer.router.weight)
        library.experts.w_in.copy_(layer.experts.w_in)
        library.experts.w_out.copy_(layer.experts.w_out)
    load = ExpertLoad([layer], 1, EXPERTS)
    x.requires_grad_()
    output, _ = layer(x)
    exact = x.detach().float().view(-1, WIDTH).requires_grad_()
    wanted, stats = library(exact, HELD, "skip", gate)
    up = torch.randn_like(wanted)
    counts = load.collect()[1]
    assert counts.skipped == int(stats.skipped) and counts.none_resident == int(stats.none_resident)
    near(output.view(-1, WIDTH), wanted)
    got = torch.autograd.grad(output, [x, layer.experts.w_in, layer.experts.w_out], up.bfloat16().view_as(output))
    theirs = torch.autograd.grad(wanted, [exact, library.experts.w_in, library.experts.w_out], up)
    if push:
        assert counts.kept == 0 and output.abs().max() == 0 and all(grad.abs().max() == 0 for grad in got[1:])
        return
    for one, other in zip(got, theirs, strict=True):
        assert (one.float().view_as(other) - other).norm() <= 3e-2 * other.norm()


def near(got: Tensor, want: Tensor) -> None:
    assert bool(got.isfinite().all())
    assert (got.float() - want).norm() <= 2e-2 * want.norm()
