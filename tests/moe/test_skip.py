"""The layer with absent experts against a dense loop over the routing map: outputs, every gradient, statistics."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.skip import Router, SkipMoE, SkipStats, StackedExperts

WIDTH, INNER, EXPERTS, TOP_K = 6, 5, 7, 3
MODES = [("full", "full"), ("skip", "full"), ("skip", "kept"), ("mask", "full"), ("frozen", "full")]
RESIDENT = {"full": [0, 1, 2, 3, 4, 5, 6], "skip": [5, 1, 2], "mask": [4, 0, 6, 1], "frozen": [2, 5]}


def whole(dtype: torch.dtype = torch.float64) -> tuple[Router, StackedExperts]:
    torch.manual_seed(2)
    router, experts = Router(WIDTH, EXPERTS, TOP_K).to(dtype), StackedExperts(EXPERTS, WIDTH, INNER).to(dtype)
    router.bias += 0.1 * torch.randn(EXPERTS, dtype=dtype)
    return router, experts


def held(experts: StackedExperts, mode: str, resident: list[int]) -> StackedExperts:
    """The slots of a site: its residents in their own order, or all."""
    if mode not in ("skip", "mask"):
        return experts
    part = StackedExperts(len(resident), WIDTH, INNER).to(experts.w_in.dtype)
    with torch.no_grad():
        part.w_in.copy_(experts.w_in[resident])
        part.w_out.copy_(experts.w_out[resident])
    return part


def naive(x: Tensor, router: Tensor, bias: Tensor, w_in: Tensor, w_out: Tensor, resident: list[int], mode: str, gate: str) -> Tensor:
    """Token by token over the routing map; `w_in`, `w_out` hold all E experts, absent ones contribute zero."""
    rows = []
    for token in x:
        z = router @ token
        choice = (z + bias).detach().clone()
        if mode == "mask":
            choice[[e for e in range(EXPERTS) if e not in resident]] = -torch.inf
        chosen = choice.argsort(descending=True)[:TOP_K].tolist()
        kept = [e for e in chosen if mode != "skip" or e in resident]
        over = kept if gate == "kept" else chosen
        norm = sum((torch.exp(z[e]) for e in over), start=torch.zeros((), dtype=x.dtype))
        row = torch.zeros(WIDTH, dtype=x.dtype)
        for e in kept:
            frozen = mode == "frozen" and e not in resident
            a, b = (w_in[e].detach(), w_out[e].detach()) if frozen else (w_in[e], w_out[e])
            h, u = (a @ token).chunk(2)
            row = row + torch.exp(z[e]) / norm * (b @ (h / (1 + torch.exp(-h)) * u))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("mode", "gate"), MODES)
def test_equals_a_dense_loop_in_output_and_every_gradient(mode: Any, gate: Any) -> None:
    router, experts = whole()
    resident = RESIDENT[mode]
    mine = held(experts, mode, resident)
    x = torch.randn(40, WIDTH, dtype=torch.float64, requires_grad=True)
    y, stats = SkipMoE(router, mine)(x, resident, mode, gate)
    wanted = naive(x, router.weight, router.bias, experts.w_in, experts.w_out, resident, mode, gate)
    torch.testing.assert_close(y, wanted)
    if mode == "skip":
        assert int(stats.none_resident) > 0 and int(stats.skipped) > 0  # the case has what it is about

    up = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, router.weight, mine.w_in, mine.w_out], up)
    want = torch.autograd.grad(wanted, [x, router.weight, experts.w_in, experts.w_out], up)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    for mine_grad, all_grad in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(mine_grad, all_grad[resident] if mode in ("skip", "mask") else all_grad)
        if mode == "frozen":
            foreign = [e for e in range(EXPERTS) if e not in resident]
            assert mine_grad[foreign].abs().max() == 0 and mine_grad[resident].abs().max() > 0


def test_all_resident_skipping_is_the_ordinary_layer_bit_for_bit() -> None:
    router, experts = whole(torch.float32)
    layer, resident = SkipMoE(router, experts), list(range(EXPERTS))
    x = torch.randn(33, WIDTH)
    results = []
    for mode in ("full", "skip"):
        layer.zero_grad()
        y, stats = layer(x, resident, mode)
        (y.square().sum() + stats.aux_loss).backward()
        results.append((y.detach(), *(p.grad.clone() for p in layer.parameters()), stats.load))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_order_of_slots_does_not_matter() -> None:
    router, experts = whole()
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    outputs = [SkipMoE(router, held(experts, "skip", r))(x, r, "skip")[0] for r in ([1, 2, 5], [5, 1, 2])]
    torch.testing.assert_close(outputs[0], outputs[1])


def test_sites_of_a_partition_add_up_to_the_whole_layer() -> None:
    router, experts = whole()
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    parts = [SkipMoE(router, held(experts, "skip", r))(x, r, "skip")[0] for r in ([0, 3, 6], [1, 2], [4, 5])]
    torch.testing.assert_close(sum(parts), SkipMoE(router, experts)(x, list(range(EXPERTS)), "full")[0])


def test_statistics_by_hand() -> None:
    # Two experts a token, logits = x: tokens choose {2, 1}, {2, 0}, {0, 1}; experts 0 and 1 are absent.
    router = Router(3, 3, 2)
    with torch.no_grad():
        router.weight.copy_(torch.eye(3))
    x = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]])
    layer = SkipMoE(router, StackedExperts(1, 3, 4))
    y, stats = layer(x, [2], "skip")
    assert stats.load.tolist() == [2, 2, 2]
    assert (int(stats.kept), int(stats.skipped), int(stats.none_resident)) == (2, 4, 1)
    assert y[2].abs().max() == 0 and y[:2].abs().min() > 0
    p = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    mean = torch.tensor([p[0] + p[1] + p[2], p[1] + p[0] + p[1], p[2] + p[2] + p[0]]) / 3
    torch.testing.assert_close(stats.aux_loss, 3 * (mean / 3).sum())
    torch.testing.assert_close(stats.z_loss, torch.tensor([0.0, 1.0, 2.0]).exp().sum().log().square())


def test_absent_experts_count_for_balance() -> None:
    router, experts = whole()
    x = torch.randn(50, WIDTH, dtype=torch.float64)
    some = SkipMoE(router, held(experts, "skip", [5, 1]))(x, [5, 1], "skip")[1]
    every = SkipMoE(router, experts)(x, list(range(EXPERTS)), "full")[1]
    assert torch.equal(some.load, every.load)
    assert torch.equal(some.aux_loss, every.aux_loss) and torch.equal(some.z_loss, every.z_loss)
    assert int(some.kept + some.skipped) == 50 * TOP_K == int(some.load.sum())


def test_masking_keeps_k_experts_and_never_an_absent_one() -> None:
    router, experts = whole()
    resident = RESIDENT["mask"]
    _, stats = SkipMoE(router, held(experts, "mask", resident))(torch.randn(50, WIDTH, dtype=torch.float64), resident, "mask")
    assert int(stats.kept) == 50 * TOP_K and int(stats.skipped) == 0 and int(stats.none_resident) == 0
    assert stats.load[[e for e in range(EXPERTS) if e not in resident]].sum() == 0


@pytest.mark.parametrize(("mode", "gate"), MODES)
def test_no_tokens(mode: Any, gate: Any) -> None:
    router, experts = whole()
    layer = SkipMoE(router, held(experts, mode, RESIDENT[mode]))
    x = torch.zeros(0, WIDTH, dtype=torch.float64, requires_grad=True)
    y, stats = layer(x, RESIDENT[mode], mode, gate)
    (y.sum() + stats.aux_loss + stats.z_loss).backward()
    assert y.shape == (0, WIDTH) and stats.aux_loss == 0 and stats.z_loss == 0
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("gate", ["full", "kept"])
def test_no_token_finds_a_resident_expert(gate: Any) -> None:
    router, experts = whole()
    with torch.no_grad():
        router.bias[4] = -1e9  # the only resident expert is never chosen
    layer = SkipMoE(router, held(experts, "skip", [4]))
    x = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    y, stats = layer(x, [4], "skip", gate)
    with torch.autograd.detect_anomaly(check_nan=True):  # no NaN on the way either
        (y.sum() + stats.aux_loss).backward()
    assert y.abs().max() == 0 and int(stats.none_resident) == 9 and int(stats.kept) == 0
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
    assert layer.experts.w_in.grad.abs().max() == 0 and router.weight.grad.abs().max() > 0


def test_bias_steers_the_choice_and_not_the_gates() -> None:
    router, experts = whole()
    x = torch.randn(64, WIDTH, dtype=torch.float64)
    layer, resident = SkipMoE(router, experts), list(range(EXPERTS))
    with torch.no_grad():
        router.bias.fill_(3.0)
        same = layer(x, resident, "full")[0]
        router.bias.zero_()
        torch.testing.assert_close(layer(x, resident, "full")[0], same)

    def spread(stats: SkipStats) -> float:
        return float(stats.load.max() - stats.load.min())

    with torch.no_grad():
        router.weight[0] += 2.0
        before = spread(layer(x.abs(), resident, "full")[1])
        for _ in range(300):
            router.update_bias(layer(x.abs(), resident, "full")[1].load, rate=0.05)
        assert spread(layer(x.abs(), resident, "full")[1]) < 0.5 * before


def test_balanced_routing_has_auxiliary_loss_one() -> None:
    router = Router(WIDTH, EXPERTS, TOP_K)
    nn.init.zeros_(router.weight)
    stats = SkipMoE(router, StackedExperts(EXPERTS, WIDTH, INNER))(torch.randn(8, WIDTH), list(range(EXPERTS)), "full")[1]
    assert stats.aux_loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("resident", "mode", "gate", "count", "message"),
    [
        ([0], "drop", "full", 1, "mode=drop: must be full, skip, mask or frozen"),
        ([0], "skip", "half", 1, "gate=half: must be full or kept"),
        ([0, 1, 2], "mask", "kept", 3, "gate=kept: has no effect in mode=mask"),
        ([0, 0], "skip", "full", 2, r"resident=\[0, 0\]: must be one or more experts, each once"),
        ([7], "skip", "full", 1, r"resident=\[7\]: must be one or more experts, each once, from 0 to 6"),
        ([], "skip", "full", 0, r"resident=\[\]: must be one or more"),
        ([0], "full", "full", 7, "mode=full needs all 7 experts"),
        ([0, 1], "mask", "full", 2, "mode=mask needs at least top_k=3 experts"),
        ([0, 1], "skip", "full", 3, "experts: 3 are stacked, mode=skip computes 2"),
        ([0, 1], "frozen", "full", 2, "experts: 2 are stacked, mode=frozen computes 7"),
    ],
)
def test_what_does_not_fit_is_refused(resident: list[int], mode: Any, gate: Any, count: int, message: str) -> None:
    layer = SkipMoE(Router(WIDTH, EXPERTS, TOP_K), StackedExperts(count, WIDTH, INNER))
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(2, WIDTH), resident, mode, gate)


def test_top_k_beyond_the_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k=3: a token uses 1 to num_experts=2"):
        Router(4, 2, 3)
