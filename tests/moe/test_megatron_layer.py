"""Our experts in Megatron-core's MoELayer: against a naive layer, and the same layer over expert-parallel ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPools
from torch import Tensor
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, TOKENS = 16, 24, 4, 12


def build(
    ep: int = 1,
    tp: int = 1,
    etp: int = 1,
    layer_number: int = 1,
    moe: Mapping[str, Any] | None = None,
    resident: Sequence[int] | None = None,
    trained: Sequence[int] | None = None,
    **settings: Any,
) -> Any:
    """An MoELayer of core with our spec, fp32, alone on this rank's groups; `moe`: changes to its MoeConfig."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from moe.config import MoeConfig
    from moe.megatron import moe_layer_spec
    from train.engine import cpu

    cpu.install()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": WIDTH,
        "num_attention_heads": 2,
        "ffn_hidden_size": INNER,
        "moe_ffn_hidden_size": INNER,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall" if ep > 1 else "allgather",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "calculate_per_token_loss": True,
        "init_method_std": 0.3,
    }
    config = TransformerConfig(**{**fields, **settings})
    shape = {"experts": config.num_moe_experts, "top_k": config.moe_router_topk, "ffn_width": INNER}
    shared = config.moe_shared_expert_intermediate_size
    spec = moe_layer_spec(MoeConfig(**{**shape, "shared_width": shared, **(moe or {})}), resident, trained)
    torch.manual_seed(5)
    layer = spec(config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups(), is_mtp_layer=False)
    layer.set_layer_number(layer_number)
    return layer


def tokens(seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, 1, WIDTH, generator=generator)


def naive(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, top_k: int = 2) -> Tensor:
    """Each token through its top-k experts, gates a softmax over the k logits."""
    rows = []
    for token in x.reshape(-1, WIDTH):
        values, chosen = (router @ token).topk(top_k)
        gates = values.softmax(0)
        row = torch.zeros(WIDTH)
        for gate, e in zip(gates, chosen.tolist(), strict=True):
            h, u = (w_in[e] @ token).chunk(2)
            row = row + gate * (w_out[e] @ (F.silu(h) * u))
        rows.append(row)
    return torch.stack(rows).view_as(x)


def against_naive(dispatcher: str) -> None:
    layer = build(moe_token_dispatcher_type=dispatcher)
    x = tokens().requires_grad_()
    weights = [layer.router.weight, layer.experts.w_in, layer.experts.w_out]
    output, bias = layer(x)
    assert bias is None
    wanted = naive(x, *weights)
    torch.testing.assert_close(output, wanted)
    up = torch.randn_like(output)
    for got, want in zip(torch.autograd.grad(output, [x, *weights], up), torch.autograd.grad(wanted, [x, *weights], up), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def with_shared_expert() -> None:
    layer = build(moe_shared_expert_intermediate_size=20)
    x = tokens()
    output, _ = layer(x)
    shared = layer.shared_experts
    h, u = F.linear(x, shared.linear_fc1.weight).chunk(2, -1)
    wanted = naive(x, layer.router.weight, layer.experts.w_in, layer.experts.w_out) + F.linear(F.silu(h) * u, shared.linear_fc2.weight)
    torch.testing.assert_close(output, wanted)


def train_once(ep: int, tp: int = 1, push: float = 0.0, **settings: Any) -> dict[str, Tensor]:
    """Outputs and gradients of the 12 tokens, split over the ranks, summed and gathered to what one rank would hold."""
    layer = build(ep=ep, tp=tp, **settings)
    world, rank = dist.get_world_size(), dist.get_rank()
    if push:
        with torch.no_grad():  # every token prefers the experts of rank 0, so that other ranks get none
            layer.router.weight[: EXPERTS // 2] += push
            layer.router.weight[EXPERTS // 2 :] -= push
    x = (tokens().abs() if push else tokens()).chunk(world)[rank].clone().requires_grad_()
    up = torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(2)).chunk(world)[rank]
    output, _ = layer(x)
    output.backward(up)
    grads = {"router": layer.router.weight.grad, "w_in": layer.experts.w_in.grad, "w_out": layer.experts.w_out.grad}
    assert all(grad is not None for grad in grads.values())
    dist.all_reduce(grads["router"])
    for name in ("w_in", "w_out"):
        if ep == 1:
            dist.all_reduce(grads[name])
        else:
            grads[name] = gather(grads[name])
    weights = {f"weight_{n}": gather(w.detach()) if ep > 1 else w.detach() for n, w in layer.experts.named_parameters()}
    return {"output": gather(output.detach()), "x": gather(x.grad), **grads, **weights}


def gather(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def attributes(ep: int, tp: int) -> list[tuple[bool, bool]]:
    layer = build(ep=ep, tp=tp)
    return [(weight.allreduce, weight.tensor_model_parallel) for weight in layer.experts.parameters()]


def initial(ep: int, layers: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [gather(build(ep=ep, layer_number=n + 1).experts.w_in.detach()) for n in range(layers)]


def two_layers_differ(_: None) -> bool:
    from moe.megatron import GroupedSwiGLUExperts

    experts = build().experts
    assert isinstance(experts, GroupedSwiGLUExperts)
    first = experts.w_in.detach().clone()
    experts.reset_parameters()
    return not torch.equal(first, experts.w_in)


def router_gradient(coefficient: float, z: float | None, pieces: int) -> Tensor:
    """Router gradient of the aux and z loss alone (the output's gradient is zero), over `pieces` micro-batches."""
    layer = build(moe_aux_loss_coeff=coefficient, moe_z_loss_coeff=z)
    for piece in tokens().chunk(pieces):
        output, _ = layer(piece)
        (output * 0.0).sum().backward()
    grad: Tensor = layer.router.weight.grad
    return grad


def save(folder: str) -> None:
    from megatron.core import dist_checkpointing

    layer = build(ep=2)
    dist_checkpointing.save(layer.sharded_state_dict(prefix="mlp.", metadata={"dp_cp_group": layer.router.tp_dp_cp_group}), folder)


def load(folder: str, ep: int) -> tuple[Tensor, Tensor, Tensor]:
    from megatron.core import dist_checkpointing

    layer = build(ep=ep)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    wanted = layer.sharded_state_dict(prefix="mlp.", metadata={"dp_cp_group": layer.router.tp_dp_cp_group})
    state = dist_checkpointing.load(wanted, folder)
    layer.load_state_dict({name.removeprefix("mlp."): value for name, value in state.items()})
    return layer.experts.w_in.detach(), layer.experts.w_out.detach(), layer.router.weight.detach()


def weights_of(ep: int) -> tuple[Tensor, Tensor, Tensor]:
    layer = build(ep=ep)
    return layer.experts.w_in.detach(), layer.experts.w_out.detach(), layer.router.weight.detach()


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_equals_a_naive_layer_in_output_and_every_gradient(ranks: RankPools, dispatcher: str) -> None:
    ranks(1).run(against_naive, dispatcher)


def test_shared_expert_adds_its_output(ranks: RankPools) -> None:
    ranks(1).run(with_shared_expert)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_two_expert_parallel_ranks_equal_one(ranks: RankPools, dispatcher: str) -> None:
    (one,) = ranks(1).run(train_once, 1)
    for two in ranks(2).run(run_dispatcher, dispatcher):
        assert two.keys() == one.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def run_dispatcher(dispatcher: str) -> dict[str, Tensor]:
    return train_once(2, moe_token_dispatcher_type=dispatcher)


def test_tensor_parallel_ranks_with_sequence_parallelism_equal_one(ranks: RankPools) -> None:
    (one,) = ranks(1).run(train_once, 1)
    for two in ranks(2).run(train_once, 1, 2):
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-5)


def test_a_rank_whose_experts_get_no_token(ranks: RankPools) -> None:
    (one,) = ranks(1).run(train_once, 1, 1, 9.0)
    two = ranks(2).run(train_once, 2, 1, 9.0)[0]
    assert one["w_in"][EXPERTS // 2 :].abs().max() == 0 and one["w_in"][: EXPERTS // 2].abs().max() > 0
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-4)


def test_weights_are_flagged_for_the_group_that_reduces_them(ranks: RankPools) -> None:
    assert ranks(1).run(attributes, 1, 1) == [[(True, True)] * 2]
    assert ranks(2).run(attributes, 2, 1) == [[(False, True)] * 2] * 2
    assert ranks(2).run(attributes, 1, 2) == [[(False, True)] * 2] * 2


def test_initial_weights_follow_the_global_expert_number(ranks: RankPools) -> None:
    (one,) = ranks(1).run(train_once, 1)
    two = ranks(2).run(train_once, 2)[0]
    for name in ("weight_w_in", "weight_w_out"):
        assert torch.equal(one[name], two[name])
        assert len({row.sum().item() for row in one[name]}) == EXPERTS
    assert ranks(1).run(two_layers_differ, None) == [True]


def test_settings_that_would_be_ignored_are_refused(ranks: RankPools) -> None:
    with pytest.raises(RankError, match="expert_tensor_parallel_size=2: an expert is not split over ranks"):
        ranks(2).run(build, 1, 2, 2)
    with pytest.raises(RankError, match="gated_linear_unit=False: experts are SwiGLU"):
        ranks(1).run(build_ungated)


def build_ungated() -> None:
    build(gated_linear_unit=False)


def test_router_gradient_is_linear_in_the_loss_coefficients(ranks: RankPools) -> None:
    pool = ranks(1)
    none, aux, twice = (pool.run(router_gradient, c, None, 1)[0] for c in (0.0, 0.01, 0.02))
    assert none.abs().max() == 0 and aux.abs().max() > 0
    torch.testing.assert_close(twice, 2 * aux)
    z, z_twice = (pool.run(router_gradient, 0.0, c, 1)[0] for c in (1e-3, 2e-3))
    assert z.abs().max() > 0
    torch.testing.assert_close(z_twice, 2 * z)


def test_auxiliary_losses_do_not_grow_with_accumulation(ranks: RankPools) -> None:
    # Core weighs them by tokens, to be divided by the global token count with all gradients: the z loss, a mean over
    # tokens, is then the same however the tokens are split. The aux loss is a product of means, so near it.
    pool = ranks(1)
    torch.testing.assert_close(pool.run(router_gradient, 0.0, 1e-3, 4)[0], pool.run(router_gradient, 0.0, 1e-3, 1)[0])
    whole, split = (pool.run(router_gradient, 0.01, None, pieces)[0].norm() for pieces in (1, 4))
    assert 0.5 < split / whole < 2.5


LOSSES = {"moe_aux_loss_coeff": 0.05, "moe_z_loss_coeff": 1e-2}


def with_losses(ep: int, tp: int) -> dict[str, Tensor]:
    return train_once(ep, tp, **LOSSES)


def accumulated(pieces: int) -> dict[str, Tensor]:
    """Gradients of one rank that takes the tokens in `pieces` micro-batches, auxiliary losses on."""
    layer = build(**LOSSES)
    up = torch.randn(TOKENS, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    for x, u in zip(tokens().chunk(pieces), up.chunk(pieces), strict=True):
        layer(x)[0].backward(u)
    return {"router": layer.router.weight.grad, "w_in": layer.experts.w_in.grad, "w_out": layer.experts.w_out.grad}


@pytest.mark.parametrize(("ep", "tp", "pieces"), [(2, 1, 2), (1, 1, 2), (1, 2, 1)])
def test_with_auxiliary_losses_ranks_equal_what_one_accumulates(ranks: RankPools, ep: int, tp: int, pieces: int) -> None:
    # Data ranks split the tokens as micro-batches do; sequence-parallel ranks balance over their tokens together.
    (one,) = ranks(1).run(accumulated, pieces)
    (plain,) = ranks(1).run(train_once, 1)
    assert (one["router"] - plain["router"]).norm() > 0.01 * plain["router"].norm()
    for two in ranks(2).run(with_losses, ep, tp):
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_two_expert_parallel_ranks_loads_on_one_and_back(ranks: RankPools, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    ranks(2).run(save, str(folder))
    (wanted,) = ranks(1).run(weights_of, 1)
    (got,) = ranks(1).run(load, str(folder), 1)
    for have, want in zip(got, wanted, strict=True):
        assert torch.equal(have, want)
    halves = ranks(2).run(load, str(folder), 2)
    assert torch.equal(torch.cat([half[0] for half in halves]), wanted[0])
