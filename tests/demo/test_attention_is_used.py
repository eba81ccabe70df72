"""The demo's model beats counting byte pairs only through attention: without it, it sees one byte and cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools

STEPS = 110


class Recorder:
    """A tracker that keeps the evaluation lines."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, Any]] = []

    def log(self, metrics: Any) -> None:
        if "val_loss" in metrics:
            self.evaluations.append(dict(metrics))

    def finish(self, status: str) -> None:
        pass


def train_demo(run_dir: str, cache: str, attention: bool) -> dict[str, Any]:
    """The last evaluation of the demo's model after STEPS steps in one process, its attention's output replaced by zeros if asked."""
    from s2.megatron import S2CoreAttention
    from train.config.check import check
    from train.config.compose import compose
    from train.engine import parallel
    from train.loop import pretrain

    overrides = ["experiment=demo", "parallel=single", "tracking=none", f"train.steps={STEPS}", "train.eval_every=0"]
    config = check(compose([*overrides, f"data.cache={cache}"]), 1)
    recorder = Recorder()
    forward = S2CoreAttention.forward
    if not attention:

        def nothing(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return 0.0 * (query.flatten(2) + key.sum() + value.sum())

        S2CoreAttention.forward = nothing  # type: ignore[method-assign]
    try:
        ranks = parallel.build_ranks(config, parallel.init_process_group(60.0))
        pretrain(config, Path(run_dir), 1, False, ranks, recorder)
    finally:
        S2CoreAttention.forward = forward  # type: ignore[method-assign]
    return recorder.evaluations[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_is_below_the_bigram_entropy_with_attention_and_above_without(tmp_path: Path, ranks: RankPools) -> None:
    cache = str(tmp_path / "cache")
    (with_attention,) = ranks(1).run(train_demo, str(tmp_path / "with"), cache, True, timeout=420.0)
    (without,) = ranks(1).run(train_demo, str(tmp_path / "without"), cache, False, timeout=420.0)
    bigram = with_attention["bigram_bits_per_byte"]
    assert 3.2 < bigram < 3.8
    assert with_attention["val_bits_per_byte"] < bigram < without["val_bits_per_byte"]
