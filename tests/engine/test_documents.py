"""Packed documents do not see each other: neither their tokens nor their places in the row."""

from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, build, small_config
from torch import Tensor

LENGTH, FIRST = 96, 40
DENSE = {"attention.kind": "dense"}


def logits_of(model: Any, *documents: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) of documents packed into one row, padded by a last document of zeros."""
    lengths = [len(document) for document in documents]
    lengths += [LENGTH - sum(lengths)] if sum(lengths) < LENGTH else []
    row = torch.zeros(LENGTH, dtype=torch.int64)
    row[: sum(map(len, documents))] = torch.cat(documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    result: Tensor = model(row[None], positions[None], bounds)[0]
    return result


def packed(changes: dict[str, Any]) -> dict[str, Tensor]:
    from train.engine.checkpoint import unwrap

    model = unwrap(build(small_config({**changes, "model.init_std": 0.2})).chunks[0]).eval()
    torch.set_grad_enabled(False)
    generator = torch.Generator().manual_seed(3)
    one, other = (torch.randint(1, 120, (FIRST,), generator=generator) for _ in range(2))
    second = torch.randint(1, 120, (LENGTH - FIRST,), generator=generator)
    results = {
        "second": logits_of(model, one, second)[FIRST:],
        "second after another": logits_of(model, other, second)[FIRST:],
        "second alone": logits_of(model, second)[: LENGTH - FIRST],
        "second after a shorter one": logits_of(model, one[:7], second)[7 : 7 + LENGTH - FIRST],
        "first": logits_of(model, one, second)[:FIRST],
        "first before another": logits_of(model, one, second.flip(0))[:FIRST],
    }
    whole = model(torch.cat((one, second))[None], torch.arange(LENGTH)[None], None)[0]
    return {**results, "second in one document": whole[FIRST:], "other": logits_of(model, other, second)[:FIRST]}


@pytest.mark.parametrize("model", [DENSE, {}, MOE, {**MOE, **DENSE}], ids=["dense", "s2", "s2+experts", "dense+experts"])
def test_a_document_is_blind_to_its_neighbours(ranks: RankPools, model: dict[str, Any]) -> None:
    (logits,) = ranks(1).run(packed, model)
    for change in ("second after another", "second alone", "second after a shorter one"):
        torch.testing.assert_close(logits[change], logits["second"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits["first before another"], logits["first"], rtol=1e-5, atol=1e-5)
    if "moe.experts" not in model:  # other tokens in an expert's group may round its matrix multiply otherwise
        assert torch.equal(logits["second after another"], logits["second"])
    # The same comparisons must be able to fail.
    assert (logits["second in one document"] - logits["second"]).abs().max() > 1e-2
    assert (logits["other"] - logits["first"]).abs().max() > 1e-2


@pytest.mark.parametrize("model", [DENSE, {}], ids=["dense", "s2"])
def test_no_token_sees_a_later_one(ranks: RankPools, model: dict[str, Any]) -> None:
    for length in (1, 17, 48, 95):
        ((short, long),) = ranks(1).run(prefix, model, length)
        torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-5)


def prefix(changes: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """Logits of the first `length` tokens of a row, and of the same with other tokens behind them."""
    from train.engine.checkpoint import unwrap

    model = unwrap(build(small_config({**changes, "model.init_std": 0.2})).chunks[0]).eval()
    torch.set_grad_enabled(False)
    row = torch.randint(0, 120, (LENGTH,), generator=torch.Generator().manual_seed(4))
    changed = torch.cat((row[:length], row[length:].flip(0) // 2))
    return logits_of(model, row)[:length], logits_of(model, changed)[:length]
