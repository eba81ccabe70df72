"""`leantron doctor`: the back end of each stretch of layers with the reasons, and each attention path run."""

import pytest
import torch

from launch.attention import layer_lines
from launch.cli import main
from train.config.compose import compose


def test_stretches_of_layers_and_reasons() -> None:
    config = compose(
        ["attention=s2", "attention.stride=4", "attention.dense_layers=[0]", "model.layers=4", "model.heads=4", "model.width=128"]
    )
    lines = list(layer_lines(config, "cpu", "float32"))
    assert lines[0] == "attention in training (float32, head dim 32, cpu):"
    assert "  layer 0, dense: sdpa" in lines
    assert "  layers 1 to 3, s2: reference" in lines
    assert "    not sdpa: it serves dense causal attention only" in lines
    at = lines.index("attention in decoding (float32, head dim 32, cpu):")
    assert lines[at + 1] == "  layer 0, dense: reference"
    assert "its kernels need a CUDA or ROCm device, not cpu" in lines[at + 2]


def test_every_path_is_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import s2.decode

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(s2.decode, "attend", broken)
    assert main(["doctor", "attention=s2", "attention.stride=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for path in ("forward", "backward", "documents", "custom mask"):
        assert any(line.startswith(f"  {path}: ") and ", error " in line for line in lines)
    assert "  decoding: reference FAILS: RuntimeError: out of" in lines


def test_a_stray_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "everything"]) == 2
    assert "everything" in capsys.readouterr().err
