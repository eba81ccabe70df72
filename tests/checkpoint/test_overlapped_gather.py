"""With overlapped parameter gathering, a checkpoint must not store weights that a rank has not received yet."""

from typing import Any

import torch
from ranks import RankPools


def weights_before_and_after_saving(overlap: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's weights after two steps, and once a checkpoint's state has been taken."""
    from small_engine import build, names, small_config, take_step

    import train.engine.build as engine_build
    from train.engine import checkpoint

    settings = engine_build.DistributedDataParallelConfig

    def with_overlap(**keywords: Any) -> Any:
        return settings(**{**keywords, "overlap_param_gather": overlap})

    engine_build.DistributedDataParallelConfig = with_overlap  # type: ignore[assignment,misc]
    try:
        engine = build(small_config({}))
    finally:
        engine_build.DistributedDataParallelConfig = settings  # type: ignore[misc]
    for step in range(2):
        take_step(engine, step)
    before = {name: weight.detach().clone() for name, weight in names(engine)}
    checkpoint.sharded_state(engine.chunks, engine.optimizer, loading=False)
    return before, {name: weight.detach().clone() for name, weight in names(engine)}


def test_weights_are_gathered_before_they_are_stored(ranks: RankPools) -> None:
    plain = ranks(2).run(weights_before_and_after_saving, False)
    overlapped = ranks(2).run(weights_before_and_after_saving, True)
    for (wanted, _), (stale, saved) in zip(plain, overlapped, strict=True):
        assert any(not torch.equal(stale[name], wanted[name]) for name in wanted)  # else this test would show nothing
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
