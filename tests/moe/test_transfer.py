"""Types on the wire, over threads that send each other bytes: agreement to the bit, error bounds, bytes."""

from typing import Any

import pytest
import torch
from sites import build_plan, experts_of, noise, over_queues
from torch import Tensor

from moe.cost import Sizes, comm_bytes
from moe.exchange import PairwiseExchange
from moe.outer import OuterStep
from moe.transfer import CHUNK, buckets, chunks, decode, encode

WIDTHS = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / CHUNK}
"""Bytes an element; in int8 where every run is whole."""
SHAPES = [(3, 5), (), (0,), (700,), (CHUNK,), (2, 2 * CHUNK + 1), (1,)]


def values(site: int) -> list[Tensor]:
    return [10.0 ** (i % 3 - 1) * noise(*shape, seed=100 * site + i) for i, shape in enumerate(SHAPES)]


def sums(sites: int, order: slice = slice(None), **settings: Any) -> list[tuple[list[Tensor], PairwiseExchange]]:
    def job(exchange: PairwiseExchange) -> tuple[list[Tensor], PairwiseExchange]:
        tensors = values(exchange.site)
        exchange.sum(tuple(range(sites)), tensors[order])
        return tensors, exchange

    return over_queues(sites, job, **settings)


@pytest.mark.parametrize(("transfer", "step"), [("bf16", 2.0**-8), ("int8", 1 / 254)])
def test_rounded_sums_agree_to_the_bit_and_stay_within_their_bounds(transfer: str, step: float) -> None:
    results = sums(3, transfer=transfer)
    for tensors, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[0][0], strict=True))
    parts = [values(site) for site in range(3)]
    for i, got in enumerate(results[0][0]):
        if not got.numel():
            continue
        exact = sum(part[i].double() for part in parts)
        # Each site's part and the sum are rounded once, relative to the largest magnitude of their chunk at most.
        bound = step * (sum(part[i].abs().max() for part in parts) + exact.abs().max()) * 1.01
        assert (got - exact).abs().max() <= bound
        assert got.numel() < 2 or not torch.equal(got.double(), exact)


@pytest.mark.parametrize("transfer", ["fp32", "bf16", "int8"])
def test_neither_buckets_nor_neighbours_change_a_bit(transfer: str) -> None:
    whole = sums(3, transfer=transfer)[0][0]
    for bucket in (1, CHUNK, CHUNK + 1, 900):
        assert all(torch.equal(a, b) for a, b in zip(sums(3, transfer=transfer, bucket=bucket)[0][0], whole, strict=True)), bucket
    for order in (slice(None, None, -1), slice(3, 4), slice(5, 6)):
        got = sums(3, order, transfer=transfer)[0][0][order]
        assert all(torch.equal(a, b) for a, b in zip(got, whole[order], strict=True))


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_bytes_by_type(sites: int) -> None:
    elements = sum(t.numel() for t in values(0))
    runs = sum(-(-t.numel() // CHUNK) for t in values(0))
    for transfer in ("fp32", "bf16", "int8"):
        exchanges = [exchange for _, exchange in sums(sites, transfer=transfer)]
        wire = elements + 4 * runs if transfer == "int8" else elements * WIDTHS[transfer]
        assert sum(exchange.bytes_sent for exchange in exchanges) == 2 * (sites - 1) * wire
        assert sum(exchange.bytes_received for exchange in exchanges) == 2 * (sites - 1) * wire
        assert all(exchange.payload_bytes == 2 * wire for exchange in exchanges)


@pytest.mark.parametrize("transfer", ["fp32", "int8"])
def test_copies_are_exact_and_sent_once_to_each(transfer: str) -> None:
    def job(exchange: PairwiseExchange) -> tuple[list[Tensor], tuple[int, int, int]]:
        tensors = values(exchange.site)
        if exchange.site != 2:
            exchange.copy(1, (0, 1, 3), tensors)
        return tensors, (exchange.bytes_sent, exchange.bytes_received, exchange.payload_bytes)

    results = over_queues(4, job, transfer=transfer, bucket=1000)
    size = 4 * sum(t.numel() for t in values(0))
    for site, (tensors, _) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(tensors, values(2 if site == 2 else 1), strict=True))
    assert [counts for _, counts in results] == [(0, size, size), (2 * size, 0, size), (0, 0, 0), (0, size, size)]
    with pytest.raises(ValueError, match="source=2: must be one of the group"):
        over_queues(2, lambda exchange: exchange.copy(2, (0, 1), [torch.zeros(1)]))


def test_int8_by_hand() -> None:
    part = torch.tensor([127.0, -63.4, 0.4, 0.0, 0.0, 2.0])
    raw = encode(part, [3, 2, 1], "int8")
    assert raw.numel() == 6 + 3 * 4
    assert decode(raw, [3, 2, 1], "int8").tolist() == [127.0, -63.0, 0.0, 0.0, 0.0, 2.0]
    assert decode(encode(torch.empty(0), [], "int8"), [], "int8").numel() == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_visible_in_int8(bad: float) -> None:
    part = torch.ones(2 * CHUNK)
    part[3] = bad
    out = decode(encode(part, [CHUNK, CHUNK], "int8"), [CHUNK, CHUNK], "int8")
    assert not out[:CHUNK].isfinite().all() and (out[CHUNK:] == 1).all()


def test_a_bucket_bounds_what_is_in_flight() -> None:
    tensors = [torch.zeros(5000), torch.zeros(3), torch.zeros(777)]
    for grain in (1, CHUNK):
        sizes = [sum(view.numel() for view in views) for views in buckets(tensors, 1000, grain)]
        assert sum(sizes) == 5780 and max(sizes) <= 1000 and len(sizes) <= 8
    assert [len(run) for run in chunks(tensors, 3, "int8")] == [8, 8, 9]


@pytest.mark.parametrize("transfer", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("sites", "replication"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_an_outer_steps_payload_is_that_of_the_formula(transfer: str, sites: int, replication: int) -> None:
    plan = build_plan(sites, replication, experts=8, layers=2)
    sizes = Sizes.uniform(dense=2 * CHUNK, expert=3 * CHUNK, router_row=CHUNK, layers=[0, 1])

    def job(exchange: PairwiseExchange) -> tuple[int, int]:
        named = experts_of(plan, exchange.site, 0.0)
        named = {name: entry._replace(tensor=torch.zeros(entry.tensor.numel() * CHUNK)) for name, entry in named.items()}
        OuterStep(named, plan, exchange, lr=1.0, momentum=0.0).step()
        return exchange.payload_bytes, exchange.bytes_sent

    counted = over_queues(sites, job, transfer=transfer)

    def formula(kind: Any) -> list[float]:
        return [comm_bytes(plan, sizes, 1, kind, site=m, bytes_per_parameter=WIDTHS[transfer]) for m in range(sites)]

    assert [payload for payload, _ in counted] == formula("payload")
    assert sum(sent for _, sent in counted) == sum(formula("ring"))
    if (transfer, sites, replication) == ("int8", 4, 2):
        # 2 dense numbers, and 4 experts of 3 with a row of 1 in each of 2 layers, each 256 bytes and a scale of 4, out and back.
        assert counted[0][0] == 2 * (2 + 2 * 4 * 4) * 260
