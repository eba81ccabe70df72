"""Sums between sites: order, buckets, transfer types, bytes; over gloo ranks and between threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import Tensor

from moe.exchange import GlooExchange, Hub, PairwiseExchange

SHAPES = [(), (1,), (0,), (3, 5), (1, 1, 1), (17,), (2, 0, 3), (11, 9)]


def values(site: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(site)
    # Widely different magnitudes, so that another order of addition gives other bits.
    return [torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 5, shape, generator=generator) for shape in SHAPES]


def expected(sites: tuple[int, ...]) -> list[Tensor]:
    totals = values(sites[0])
    for site in sites[1:]:
        totals = [total + value for total, value in zip(totals, values(site), strict=True)]
    return totals


def total_of(group: tuple[int, ...], bucket: int, transfer: str = "fp32", exact: bool = False) -> tuple[list[Tensor], int]:
    exchange = GlooExchange(bucket=bucket, transfer=transfer)
    tensors = values(exchange.site)
    if exchange.site in group:
        exchange.sum(group, tensors, exact=exact)
    return tensors, exchange.bytes_sent


def strided_views() -> Tensor:
    base = torch.full((6, 4), float(dist.get_rank() + 1))
    GlooExchange().sum((0, 1), [base.T[1], base[4:, 2:]])
    return base


class Noted(PairwiseExchange):
    """Site 0 of two, on a wire that only notes what goes over it."""

    def __init__(self, bucket: int = 2**22) -> None:
        super().__init__(0, "fp32", bucket)
        self.noted: list[tuple[str, int]] = []

    def _send(self, site: int, raw: Tensor) -> None:
        self.noted.append((f"to {site}", raw.numel()))

    def _receive(self, site: int, raw: Tensor) -> None:
        raw.zero_()
        self.noted.append((f"from {site}", raw.numel()))

    def _wait(self, work: None) -> None:
        """Nothing travels."""


def test_receives_are_announced_before_anything_is_sent_and_messages_are_small() -> None:
    wire, mebibyte = Noted(), 2**20
    wire.sum((0, 1), [torch.ones(5 * mebibyte // 4)])
    a_way = [(number, size) for number in ("from 1", "to 1") for size in (mebibyte, mebibyte, mebibyte // 2)]
    assert wire.noted == [*a_way, *a_way]
    assert (wire.bytes_sent, wire.bytes_received) == (5 * mebibyte, 5 * mebibyte)


def total_in_pieces(group: tuple[int, ...], piece: int) -> list[Tensor]:
    import moe.exchange

    before, moe.exchange._PIECE = moe.exchange._PIECE, piece
    try:
        return total_of(group, 50)[0]
    finally:
        moe.exchange._PIECE = before


def test_messages_in_pieces_are_put_together_again(ranks: RankPools) -> None:
    for tensors in ranks(3).run(total_in_pieces, (0, 1, 2), 5):
        assert all(torch.equal(got, want) for got, want in zip(tensors, expected((0, 1, 2)), strict=True))


@pytest.mark.parametrize("bucket", [1, 7, 2**20])
def test_the_sum_is_in_site_order_whatever_the_buckets(ranks: RankPools, bucket: int) -> None:
    results = ranks(3).run(total_of, (0, 1, 2), bucket)
    wanted = expected((0, 1, 2))
    assert not torch.equal(wanted[-1], values(0)[-1] + (values(1)[-1] + values(2)[-1]))  # the case tells orders apart
    for tensors, _ in results:
        for got, want in zip(tensors, wanted, strict=True):
            assert torch.equal(got, want)
    elements = sum(t.numel() for t in wanted)
    assert sum(sent for _, sent in results) == 3 * 2 * (3 - 1) / 3 * elements * 4


def test_a_group_leaves_other_sites_alone(ranks: RankPools) -> None:
    results = ranks(3).run(total_of, (0, 2), 100)
    for site, (tensors, sent) in enumerate(results):
        wanted = expected((0, 2)) if site != 1 else values(1)
        assert all(torch.equal(got, want) for got, want in zip(tensors, wanted, strict=True))
        assert (sent == 0) == (site == 1)


def test_views_are_summed_in_place(ranks: RankPools) -> None:
    for site, base in enumerate(ranks(2).run(strided_views)):
        wanted = torch.full((6, 4), float(site + 1))
        wanted[:, 1] = wanted[4:, 2:] = 3.0
        assert torch.equal(base, wanted)


def test_bf16_halves_the_bytes_and_leaves_all_sites_equal(ranks: RankPools) -> None:
    fp32 = ranks(3).run(total_of, (0, 1, 2), 50)
    bf16 = ranks(3).run(total_of, (0, 1, 2), 50, "bf16")
    assert sum(sent for _, sent in bf16) * 2 == sum(sent for _, sent in fp32)
    for tensors, _ in bf16[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors, bf16[0][0], strict=True))
    largest = torch.stack([torch.stack([v.abs().max() for v in values(s) if v.numel()]) for s in range(3)]).max(0).values
    for got, want, size in zip([t for t in bf16[0][0] if t.numel()], [t for t in fp32[0][0] if t.numel()], largest, strict=True):
        assert not torch.equal(got, want) or want.numel() < 3
        assert (got - want).abs().max() <= 4 * 2**-8 * size
    exact = ranks(3).run(total_of, (0, 1, 2), 50, "bf16", True)
    assert all(torch.equal(a, b) for a, b in zip(exact[0][0], fp32[0][0], strict=True))


def test_threads_give_the_same_bits() -> None:
    hub = Hub(3)

    def site(number: int) -> list[Tensor]:
        tensors = values(number)
        for _ in range(20):
            again = [t.clone() for t in tensors]
            hub.exchange(number).sum((0, 1, 2), again)
        if number != 1:
            hub.exchange(number).sum((0, 2), tensors)
        return again if number == 1 else tensors

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(site, range(3))
    assert all(torch.equal(a, b) for a, b in zip(second, expected((0, 1, 2)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, expected((0, 2)), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(third, first, strict=True))


def test_a_thread_that_does_not_come_is_noticed() -> None:
    with pytest.raises(threading.BrokenBarrierError):
        Hub(2, timeout=0.1).exchange(0).sum((0, 1), [torch.zeros(1)])


@pytest.mark.parametrize(
    ("group", "tensor", "message"),
    [
        ((1, 2), torch.zeros(1), r"group=\(1, 2\): must be ascending site numbers with this site, 0"),
        ((1, 0), torch.zeros(1), r"group=\(1, 0\): must be ascending"),
        ((0, 1), torch.zeros(1, dtype=torch.float64), "tensor of torch.float64 on cpu: sites exchange fp32"),
    ],
)
def test_what_cannot_be_summed_is_refused(group: Any, tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hub(3).exchange(0).sum(group, [tensor])


def bad_settings() -> list[str]:
    messages = []
    for settings in ({"transfer": "fp8"}, {"bucket": 0}):
        try:
            GlooExchange(**settings)  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_unknown_settings_are_refused(ranks: RankPools) -> None:
    assert ranks(2).run(bad_settings)[0] == [
        "transfer=fp8: must be fp32, bf16 or int8; choose one",
        "bucket=0: a bucket holds at least one element; give 1 or more",
    ]
    with pytest.raises(ValueError, match="sites=0"):
        Hub(0)
    with pytest.raises(ValueError, match="site=3: the hub has 3"):
        Hub(3).exchange(3)
