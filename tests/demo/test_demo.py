"""The demo as `make demo` runs it, cut short: two sites, one merged model below the entropy of byte pairs. Only through attention:
without it a token sees one byte and cannot be."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools

ROOT = Path(__file__).resolve().parents[2]
STEPS = 128
"""A multiple of the demo's steps between outer steps."""


def demo_commands() -> list[str]:
    """The `leantron` commands of the Makefile's demo."""
    recipe = re.search(r"^demo: setup.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return re.findall(r"\$\(BIN\)/leantron (.*)", recipe[1])


def test_the_demo_is_the_whole_way() -> None:
    words = [command.split()[0] for command in demo_commands()]
    assert words == ["pretrain", "merge", "evaluate", "generate", "report"]
    assert "experiment=demo_2sites" in demo_commands()[0]


def evaluate(run: str, attention: bool) -> dict[str, Any]:
    """What `leantron evaluate` finds, with the attention that the run was trained with."""
    from dataclasses import asdict

    from s2.megatron import S2CoreAttention
    from train.evaluate import evaluate_run

    forward = S2CoreAttention.forward
    if not attention:
        sys.path.insert(0, str(Path(__file__).parent))
        from without_attention import remove_attention

        remove_attention()
    try:
        return asdict(evaluate_run(Path(run)))
    finally:
        S2CoreAttention.forward = forward  # type: ignore[method-assign]


def train(run: Path, cache: Path, attention: bool) -> None:
    from launch.pretrain import pretrain
    from launch.sites import REAL, Programs

    program = REAL if attention else Programs(worker=(str(Path(__file__).with_name("without_attention.py")),))
    overrides = [f"run.dir={run}", f"data.cache={cache}", f"train.steps={STEPS}", "train.eval_every=0", "tracking=none"]
    assert pretrain(["experiment=demo_2sites", *overrides], program) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_merged_model_is_below_the_bigram_entropy(tmp_path: Path, ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    from launch.cli import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = tmp_path / "demo"
    train(run, tmp_path / "cache", attention=True)
    (found,) = ranks(1).run(evaluate, str(run), True, timeout=600.0)
    assert 3.2 < found["bigram_bits_per_byte"] < 3.8
    assert found["step"] == STEPS and found["val_bits_per_byte"] < found["bigram_bits_per_byte"]
    assert [each["experts"] for each in found["sites"]] == [[2], [2]]

    (run / "evaluation.json").write_text(json.dumps(found))
    assert main(["report", str(run)]) == 0
    assert {"loss.png", "evaluation.png", "load_by_site.png"} <= {path.name for path in (run / "report").glob("*.png")}
    assert "What skipping costs" in (run / "report" / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_attention_it_is_above(tmp_path: Path, ranks: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = tmp_path / "demo"
    train(run, tmp_path / "cache", attention=False)
    (found,) = ranks(1).run(evaluate, str(run), False, timeout=600.0)
    assert found["step"] == STEPS and found["val_bits_per_byte"] > found["bigram_bits_per_byte"]
