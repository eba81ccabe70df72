"""The layer of a site that holds some experts: against a naive loop, against `moe/skip.py`, and over expert-parallel ranks."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPools
from torch import Tensor
from torch.nn import functional as F

EXPERTS, TOP_K, HELD = 6, 3, (4, 0, 3, 1)
SHAPE = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}


def layers() -> ModuleType:
    """The module of the layer tests, by path: test files are no package."""
    if "layer_jobs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("layer_jobs", Path(__file__).with_name("test_megatron_layer.py"))
        assert spec is not None and spec.loader is not None
        sys.modules["layer_jobs"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["layer_jobs"])
    return sys.modules["layer_jobs"]


def build(moe: dict[str, Any], ep: int = 1, resident: tuple[int, ...] = HELD, **settings: Any) -> Any:
    shape = {**SHAPE, **settings}
    return layers().build(ep=ep, moe=moe, resident=resident if moe["mode"] in ("skip", "mask") else None, trained=resident, **shape)


def naive(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, resident: tuple[int, ...], gate: str, top_k: int = TOP_K) -> Tensor:
    """Token by token over its chosen experts, absent ones adding nothing; slot i of the weights is expert resident[i]."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        values, chosen = (router @ token).topk(top_k)
        weights = values.softmax(0)
        here = [place for place, e in enumerate(chosen.tolist()) if e in resident]
        total = weights[here].sum() if gate == "kept" and here else torch.ones(())
        row = torch.zeros_like(token)
        for place in here:
            slot = resident.index(int(chosen[place]))
            h, u = (w_in[slot] @ token).chunk(2)
            row = row + weights[place] / total * (w_out[slot] @ (F.silu(h) * u))
        rows.append(row)
    return torch.stack(rows).view_as(x)


def against_naive(gate: str, dispatcher: str) -> int:
    jobs = layers()
    layer = build({"mode": "skip", "gate": gate}, moe_token_dispatcher_type=dispatcher)
    x = jobs.tokens().requires_grad_()
    weights = [layer.router.weight, layer.experts.w_in, layer.experts.w_out]
    assert layer.experts.global_experts == HELD and layer.router.weight.shape[0] == EXPERTS
    output, _ = layer(x)
    router, w_in, w_out = weights
    wanted = naive(x, router, w_in, w_out, HELD, gate)
    torch.testing.assert_close(output, wanted)
    up = torch.randn_like(output)
    for got, want in zip(torch.autograd.grad(output, [x, *weights], up), torch.autograd.grad(wanted, [x, *weights], up), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return int((output == 0).all(-1).sum())


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("gate", ["full", "kept"])
def test_skipping_equals_a_loop_without_the_absent_experts(ranks: RankPools, gate: str, dispatcher: str) -> None:
    ranks(1).run(against_naive, gate, dispatcher)


def against_library(moe: dict[str, Any], resident: tuple[int, ...]) -> None:
    """Output, every gradient with both losses of the router, and statistics, against `SkipMoE` with the same weights."""
    from moe.load import ExpertLoad
    from moe.skip import Router, SkipMoE, StackedExperts

    jobs, aux, z = layers(), 0.3, 0.05
    layer = build(moe, resident=resident, moe_aux_loss_coeff=aux, moe_z_loss_coeff=z, moe_token_dispatcher_type="alltoall")
    load = ExpertLoad([layer], 1, EXPERTS)
    library = SkipMoE(Router(jobs.WIDTH, EXPERTS, TOP_K), StackedExperts(layer.experts.num_local_experts, jobs.WIDTH, jobs.INNER))
    own = [layer.router.weight, layer.experts.w_in, layer.experts.w_out]
    theirs = [library.router.weight, library.experts.w_in, library.experts.w_out]
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) * 0.3
    library.router.bias += bias
    layer.router.expert_bias += bias
    with torch.no_grad():
        for one, other in zip(theirs, own, strict=True):
            one.copy_(other)
    x = jobs.tokens().requires_grad_()
    up = torch.randn(jobs.TOKENS, 1, jobs.WIDTH, generator=torch.Generator().manual_seed(2))
    output, _ = layer(x)
    y, stats = library(x.view(-1, jobs.WIDTH), resident, moe["mode"], moe.get("gate", "full"))
    torch.testing.assert_close(output.view_as(y), y)
    # Both losses are means over tokens, weighed by their number as the language model's sum is.
    total = (y * up.view_as(y)).sum() + jobs.TOKENS * (aux * stats.aux_loss + z * stats.z_loss)
    wanted = torch.autograd.grad(total, [x, *theirs])
    for got, want in zip(torch.autograd.grad((output * up).sum(), [x, *own]), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    counts = load.collect()[1]
    assert bool(layer.router(x)[0].isfinite().all())  # also of tokens without any kept expert
    assert torch.equal(counts.load, stats.load) and counts.tokens == jobs.TOKENS
    assert (counts.kept, counts.skipped, counts.none_resident) == (int(stats.kept), int(stats.skipped), int(stats.none_resident))
    if moe["mode"] == "skip":
        assert counts.skipped > 0 and (len(resident) > 1 or counts.none_resident > 0)


@pytest.mark.parametrize(
    ("moe", "resident"),
    [
        ({"mode": "skip"}, HELD),
        ({"mode": "skip", "gate": "kept"}, HELD),
        ({"mode": "skip", "gate": "kept"}, (5,)),
        ({"mode": "mask"}, HELD),
        ({"mode": "frozen"}, HELD),
        ({"mode": "full"}, tuple(range(EXPERTS))),
    ],
    ids=str,
)
def test_every_mode_equals_the_library_with_losses_bias_and_counts(ranks: RankPools, moe: dict[str, Any], resident: tuple) -> None:
    ranks(1).run(against_library, {**moe, "bias_rate": 0.1}, resident)


def run_site(
    ep: int, moe: dict[str, Any], dispatcher: str, resident: tuple[int, ...] = HELD, push: float = 0.0, shared: int | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients of the 12 tokens, split over the ranks, put together in the order of the slots."""
    jobs = layers()
    layer = build(
        moe,
        ep,
        resident,
        moe_token_dispatcher_type=dispatcher,
        moe_aux_loss_coeff=0.02,
        moe_shared_expert_intermediate_size=shared,
    )
    world, rank = dist.get_world_size(), dist.get_rank()
    with torch.no_grad():  # tokens are made positive: every one prefers the experts above the last resident
        layer.router.weight[max(resident) + 1 :] += push
    x = (jobs.tokens().abs() if push else jobs.tokens()).chunk(world)[rank].clone().requires_grad_()
    up = torch.randn(jobs.TOKENS, 1, jobs.WIDTH, generator=torch.Generator().manual_seed(2)).chunk(world)[rank]
    output, _ = layer(x)
    output.backward(up)
    router = layer.router.weight.grad
    dist.all_reduce(router)
    stacks = {name: weight.grad for name, weight in layer.experts.named_parameters()}
    assert all(grad is not None for grad in stacks.values())
    if ep == 1:
        for grad in stacks.values():
            dist.all_reduce(grad)
    else:
        stacks = {name: jobs.gather(grad) for name, grad in stacks.items()}
    return {"output": jobs.gather(output.detach()), "x": jobs.gather(x.grad), "router": router, **stacks}


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert all(bool(value.isfinite().all()) for value in want.values())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("moe", [{"mode": "skip"}, {"mode": "skip", "gate": "kept"}, {"mode": "mask"}, {"mode": "frozen"}], ids=str)
def test_two_expert_parallel_ranks_of_a_site_equal_one(ranks: RankPools, moe: dict[str, Any], dispatcher: str) -> None:
    two = ranks(2).run(run_site, 2, moe, dispatcher)
    for got, want in zip(two, ranks(2).run(run_site, 1, moe, dispatcher), strict=True):
        close(got, want)
    if moe["mode"] == "frozen":
        frozen = [e not in HELD for e in range(EXPERTS)]
        assert two[0]["w_in"][frozen].abs().max() == 0 and bool((two[0]["w_in"][list(HELD)].flatten(1).abs().amax(1) > 0).all())


@pytest.mark.parametrize("gate", ["full", "kept"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_whose_residents_no_token_chooses(ranks: RankPools, ep: int, dispatcher: str, gate: str) -> None:
    moe = {"mode": "skip", "gate": gate}
    for got in ranks(2).run(run_site, ep, moe, dispatcher, (1, 0), 9.0):
        assert got["output"].abs().max() == 0 and got["x"].abs().max() < 1.0
        assert got["w_in"].abs().max() == 0 and got["w_out"].abs().max() == 0
        assert bool(got["router"].isfinite().all()) and got["router"].abs().max() > 0  # the balancing loss is there


def test_the_shared_expert_serves_tokens_that_no_other_does(ranks: RankPools) -> None:
    (got,) = ranks(1).run(run_site, 1, {"mode": "skip"}, "alltoall", (1, 0), 9.0, 20)
    assert bool((got["output"].abs().amax(-1) > 0).all())


def no_tokens(ep: int, moe: dict[str, Any], dispatcher: str) -> None:
    layer = build(moe, ep, moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)
    x = torch.zeros(0, 1, layers().WIDTH, requires_grad=True)
    output, _ = layer(x)
    output.sum().backward()
    assert output.shape == x.shape
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("moe", [{"mode": "full"}, {"mode": "skip", "gate": "kept"}, {"mode": "mask"}], ids=str)
def test_no_tokens_at_all(ranks: RankPools, ep: int, moe: dict[str, Any]) -> None:
    for dispatcher in ("allgather", "alltoall"):
        ranks(2).run(no_tokens, ep, moe, dispatcher)


def masked(_: None) -> tuple[Tensor, Tensor]:
    layer = build({"mode": "mask"})
    return layer.router(layers().tokens())


def test_mask_keeps_every_tokens_experts(ranks: RankPools) -> None:
    ((probs, chosen),) = ranks(1).run(masked, None)
    assert chosen.shape[1] == len(HELD) and bool((chosen.sum(1) == TOP_K).all())
    torch.testing.assert_close(probs.sum(1), torch.ones(len(chosen)))


def with_padding(valid: list[int], pieces: int) -> Tensor:
    """Router gradient of both losses alone, over the 12 tokens in `pieces` micro-batches, of which those in `valid` have weight."""
    jobs = layers()
    layer = build({"mode": "skip"}, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1)
    padding = torch.ones(1, jobs.TOKENS, dtype=torch.bool)
    padding[0, valid] = False
    for x, mask in zip(jobs.tokens().chunk(pieces), padding.chunk(pieces, 1), strict=True):
        (layer(x, padding_mask=mask)[0] * 0.0).sum().backward()
    grad: Tensor = layer.router.weight.grad
    return grad


def only(valid: list[int]) -> Tensor:
    jobs = layers()
    layer = build({"mode": "skip"}, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.1)
    (layer(jobs.tokens()[valid])[0] * 0.0).sum().backward()
    grad: Tensor = layer.router.weight.grad
    return grad


def test_tokens_without_weight_have_no_part_in_the_routers_losses(ranks: RankPools) -> None:
    some = [0, 2, 3, 5]
    (want,), (got,) = ranks(1).run(only, some), ranks(1).run(with_padding, some, 1)
    torch.testing.assert_close(got, want)
    # The second micro-batch has none, and adds nothing.
    torch.testing.assert_close(ranks(1).run(with_padding, some, 2)[0], want)


def steered(moe: dict[str, Any], rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Load before and after the bias has followed it for some rounds, and the bias; ranks see different tokens."""
    from moe.load import ExpertLoad
    from moe.megatron import update_biases

    jobs = layers()
    layer = build({**moe, "bias_rate": 0.05})
    load = ExpertLoad([layer], 1, EXPERTS)
    # A common part in all tokens, so that some experts are liked by most of them.
    x = torch.randn(200, 1, jobs.WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())) + 0.5
    history = []
    for number in range(rounds):
        layer(x)
        history.append(load.collect(dist.group.WORLD)[1].load)
        update_biases([layer], dist.group.WORLD, apply=number != 0)  # the first step is one that was skipped
        if number == 0:
            assert layer.router.expert_bias.abs().max() == 0 and layer.router.bias_load.sum() == 0
    return history[0], history[-1], layer.router.expert_bias.clone()


@pytest.mark.parametrize("mode", ["skip", "mask"])
def test_the_bias_moves_the_load_the_same_on_all_ranks(ranks: RankPools, mode: str) -> None:
    (first, last, bias), (_, _, other) = ranks(2).run(steered, {"mode": mode}, 40)
    assert torch.equal(bias, other) and bias.abs().max() > 0.04
    here = sorted(HELD) if mode == "mask" else list(range(EXPERTS))
    assert (last[here] - last[here].float().mean()).abs().max() < 0.5 * (first[here] - first[here].float().mean()).abs().max()
    if mode == "mask":
        assert all(bias[e] == 0 and first[e] == last[e] == 0 for e in range(EXPERTS) if e not in HELD)


def refused(moe: dict[str, Any], resident: tuple[int, ...], ep: int = 1, **settings: Any) -> None:
    layers().build(ep=ep, moe=moe, resident=resident, **{**SHAPE, **settings})


def test_what_cannot_work_is_refused(ranks: RankPools) -> None:
    for moe, resident, words in (
        ({"mode": "full"}, HELD, "mode=full needs all 6 experts"),
        ({"mode": "skip"}, (0, 6), "must be one or more experts, each once, from 0 to 5"),
        ({"mode": "mask"}, (0, 1), "mode=mask needs at least top_k=3 experts"),
        ({"mode": "mask", "gate": "kept"}, HELD, "gate=kept: has no effect in mode=mask"),
    ):
        with pytest.raises(RankError, match=words):
            ranks(1).run(refused, moe, resident)
    with pytest.raises(RankError, match="2 expert-parallel ranks must share 3 experts evenly"):
        ranks(2).run(refused, {"mode": "skip"}, (0, 1, 2), 2)
    with pytest.raises(RankError, match="gate=kept: makes the only gate of a token 1"):
        ranks(1).run(refused_alone, None)


def refused_alone(_: None) -> None:
    refused({"mode": "skip", "gate": "kept", "top_k": 1}, HELD, moe_router_topk=1, moe_router_pre_softmax=True)
