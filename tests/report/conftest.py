"""A run's directory as training leaves it, made in milliseconds."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.config import MoeConfig
from train.config.compose import dump_config
from train.config.schema import Config, RunConfig
from train.model.config import AttentionConfig, ModelConfig
from train.tracking.jsonl import JsonlTracker

MODEL = ModelConfig(layers=4, width=64, heads=4, kv_heads=4, head_dim=16, ffn_width=192, vocab_size=257)
SPARSE = AttentionConfig(kind="s2", block_size=16, local_blocks=2, stride=4, dense_layers=[0])


def training_line(step: int, **more: Any) -> dict[str, Any]:
    """What the loop logs at a step."""
    loss = 2.0 + 3.0 * math.exp(-step / 10)
    return {
        "step": step,
        "tokens": step * 1024,
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "lr": 1e-3 * min(1, step / 5),
        "grad_norm": 1.0 + 1.0 / step,
        "tokens_per_second": 1000.0 + step,
        "step_seconds": 1.0,
        "memory_gib": 0.5,
        "expert_load": {"3": [0.4, 0.3, 0.2, 0.1], "1": [0.25] * 4},
        "attempt": 0,
        "time": 1e9 + step,
        **more,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(lines, name=..., **sections)` writes config.yaml and metrics.jsonl and returns the directory."""

    def make(lines: list[dict[str, Any]] | None = None, name: str = "test", facts: dict[str, Any] | None = None, **sections: Any) -> Path:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        base = Config()
        config = replace(
            base,
            run=RunConfig(name=name),
            train=replace(base.train, steps=20, seq_len=256),
            model=MODEL,
            attention=SPARSE,
            moe=MoeConfig(experts=4, layers=[1, 3], ffn_width=192),
        )
        dump_config(replace(config, **sections), run_dir / "config.yaml")
        tracker = JsonlTracker(run_dir / "metrics.jsonl")
        for line in lines if lines is not None else [training_line(step) for step in range(1, 21)]:
            tracker.log(line)
        tracker.finish("completed")
        if facts is not None:
            (run_dir / "status.json").write_text(json.dumps(facts))
        return run_dir

    return make
