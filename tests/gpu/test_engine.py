"""The engine on one GPU over NCCL: bf16 with fp32 masters, recomputation, Mixture of Experts, S2 attention, checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from train.config.compose import compose
from train.config.schema import Config
from train.data.dataset import Batch

pytestmark = pytest.mark.gpu

SEQ, ROWS, VOCAB = 256, 2, 1000
SPARSE = ["attention=s2", "attention.block_size=32", "attention.local_blocks=2", "attention.stride=2"]


def config(*overrides: str) -> Config:
    composed = compose(
        [
            "model=tiny", "model.layers=3", "model.width=256", "model.heads=4", "model.kv_heads=2", "model.head_dim=64",
            "model.ffn_width=512", f"model.vocab_size={VOCAB}", f"train.seq_len={SEQ}", f"train.micro_batch={ROWS}",
            f"train.global_batch={2 * ROWS}", "attention=dense", "tracking=none", "train.precision=bf16", *overrides,
        ]
    )  # fmt: skip
    experts = replace(composed.moe, ffn_width=composed.moe.ffn_width or 512) if composed.moe.experts else composed.moe
    return replace(composed, moe=experts)


def batches(step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(2):
        tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=generator)
        cut = SEQ // 3
        bounds = torch.tensor([0, cut, SEQ, 2 * SEQ], dtype=torch.int32)
        positions = torch.arange(2 * SEQ) - torch.repeat_interleave(bounds[:-1], bounds.diff())
        mask = torch.ones(ROWS, SEQ)
        mask[0, cut - 1] = 0
        device = [x.cuda() for x in (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions.view(ROWS, SEQ))]
        found.append(Batch(*device, bounds, [], float(mask.sum())))
    return found


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    from train.engine import parallel

    yield
    parallel.shutdown()


def build(settings: Config) -> tuple[Any, list[Any], Any]:
    from train.engine import parallel
    from train.engine.build import build_model, build_optimizer

    ranks = parallel.build_ranks(settings, parallel.init_process_group(60.0))
    chunks = build_model(settings, ranks)
    return ranks, chunks, build_optimizer(settings, ranks, chunks)


def train(settings: Config, parts: tuple[Any, list[Any], Any], steps: range) -> list[tuple[float, float]]:
    from train.engine.step import train_step

    ranks, chunks, optimizer = parts
    results = []
    for step in steps:
        rows = batches(step)
        result = train_step(chunks, optimizer, lambda rows=rows: iter(rows), ranks, micro_batches=2, rows=ROWS, seq_len=SEQ, lr=1e-3)
        assert result.updated
        results.append((result.loss, result.grad_norm))
    return results


def run(settings: Config, steps: int = 4) -> list[tuple[float, float]]:
    from train.engine import parallel

    results = train(settings, build(settings), range(steps))
    parallel.shutdown()
    return results


def test_bf16_follows_fp32() -> None:
    half, full = run(config()), run(config("train.precision=fp32"))
    for (loss, norm), (wanted_loss, wanted_norm) in zip(half, full, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-2)
        assert norm == pytest.approx(wanted_norm, rel=5e-2)
    assert half[-1] != full[-1]


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(
    "attention", [["attention=dense"], ["attention=s2", "attention.block_size=32", "attention.local_blocks=2", "attention.stride=2"]]
)
def test_recomputation_changes_nothing(recompute: str, attention: list[str]) -> None:
    plain, again = run(config(*attention), 3), run(config(f"train.recompute={recompute}", *attention), 3)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(again, plain, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-4)
        assert norm == pytest.approx(wanted_norm, rel=5e-3)


def test_with_and_without_the_distributed_optimizer() -> None:
    one, other = run(config()), run(config("parallel.distributed_optimizer=false"))
    for (loss, norm), (wanted_loss, wanted_norm) in zip(other, one, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-4)
        assert norm == pytest.approx(wanted_norm, rel=5e-3)


def test_experts_through_the_grouped_multiply_follow_fp32() -> None:
    moe = ("moe=mixtral", "moe.experts=4", "moe.top_k=2", "moe.ffn_width=256")
    half, full = run(config(*moe)), run(config("train.precision=fp32", *moe))
    for (loss, _), (wanted, _) in zip(half, full, strict=True):
        assert loss == pytest.approx(wanted, rel=2e-2)


def test_experts_use_the_grouped_multiply() -> None:
    from torch.profiler import ProfilerActivity, profile

    settings = config("moe=mixtral", "moe.experts=4", "moe.top_k=2", "moe.ffn_width=256")
    parts = build(settings)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(settings, parts, range(1))
    assert any("grouped_mm" in event.key for event in profiled.key_averages())


def test_masters_keep_what_bf16_loses() -> None:
    settings = config()
    _, chunks, optimizer = parts = build(settings)
    train(settings, parts, range(1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    masters = [p for part in optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]]
    assert all(p.dtype == torch.float32 for p in masters)
    weights = dict(chunks[0].named_parameters())
    assert all(p.dtype == torch.bfloat16 and p.main_grad.dtype == torch.float32 for p in weights.values())
    total = sum(float(p.double().sum()) for p in masters), sum(float(p.double().sum()) for p in weights.values())
    assert total[0] != total[1]


def test_checkpoint_and_reload_go_on_bit_for_bit(tmp_path: Path) -> None:
    from train.engine import checkpoint, parallel

    settings = config("moe=mixtral", "moe.experts=4", "moe.top_k=2", "moe.ffn_width=256", "train.deterministic=true")
    parts = build(settings)
    train(settings, parts, range(3))
    path = checkpoint.save(tmp_path, 3, parts[1], parts[2], {"note": "here"})
    wanted = train(settings, parts, range(3, 6))
    parallel.shutdown()
    again = build(settings)
    assert checkpoint.load(path, again[1], again[2]) == {"note": "here"}
    assert json.dumps(train(settings, again, range(3, 6))) == json.dumps(wanted)
