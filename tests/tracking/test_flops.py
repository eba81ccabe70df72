"""FLOPs a token and MFU against hand counts, and the pattern counted pair by pair."""

from dataclasses import replace
from typing import Any

import pytest

from moe.config import MoeConfig
from train.config.check import attention_pattern
from train.config.schema import Config
from train.model.config import AttentionConfig, ModelConfig
from train.tracking.flops import UtilisationMeter, attention_pairs, device_peak_flops, train_flops_per_token

GPT = ModelConfig(layers=2, width=8, heads=4, kv_heads=2, head_dim=4, ffn_width=12, vocab_size=100)


def config(model: ModelConfig = GPT, **sections: Any) -> Config:
    base = Config()
    return replace(base, model=model, train=replace(base.train, seq_len=64), **sections)


def test_a_dense_model_by_hand() -> None:
    attention = 8 * 4 * (4 + 2 + 2) + 4 * 4 * 8
    weights = 2 * (attention + 3 * 8 * 12)
    pairs_a_token = (64 + 1) / 2
    expected = 6 * (weights + 8 * 100) + 2 * 12 * 4 * 4 * pairs_a_token
    assert train_flops_per_token(config(), 64, pattern_aware=False) == pytest.approx(expected, rel=1e-12)
    assert train_flops_per_token(config(), 64, pattern_aware=True) == pytest.approx(expected, rel=1e-12)


def test_a_tied_head_is_multiplied_all_the_same() -> None:
    tied = config(replace(GPT, tied=True))
    assert train_flops_per_token(tied, 64, True) == train_flops_per_token(config(), 64, True)


def test_experts_count_where_a_token_passes() -> None:
    mixture = config(moe=MoeConfig(experts=8, top_k=2, layers=[1], ffn_width=6, shared_width=10))
    dense, dense_mlp = config(), 3 * 8 * 12
    router, shared, expert = 8 * 8, 3 * 8 * 10, 3 * 8 * 6
    more = train_flops_per_token(mixture, 64, True) - train_flops_per_token(dense, 64, True)
    assert more == pytest.approx(6 * (router + shared + 2 * expert - dense_mlp))


S2 = AttentionConfig(kind="s2", block_size=16, local_blocks=1, stride=2, dense_layers=[1])


@pytest.mark.parametrize("seq_len", [64, 128, 100, 7])
def test_the_pattern_is_counted_pair_by_pair(seq_len: int) -> None:
    sparse = config(replace(GPT, layers=3), attention=S2)
    pattern = attention_pattern(sparse)
    for layer, got in enumerate(attention_pairs(sparse, seq_len, pattern_aware=True)):
        view = pattern.for_layer(layer)
        pairs = sum(view.attends(head, q // 16, k // 16) for head in range(4) for q in range(seq_len) for k in range(q + 1))
        assert got == pytest.approx(pairs / 4)
    assert attention_pairs(sparse, seq_len, pattern_aware=False).tolist() == [seq_len * (seq_len + 1) / 2] * 3


def test_only_attention_depends_on_the_pattern() -> None:
    sparse = config(replace(GPT, layers=3), attention=S2)
    aware, dense = (train_flops_per_token(sparse, 128, aware) for aware in (True, False))
    density = [attention_pattern(sparse).for_layer(layer).density(128) for layer in range(3)]
    assert dense - aware == pytest.approx(12 * 4 * 4 * (129 / 2) * sum(1 - part for part in density))
    assert aware < dense and density[1] == 1


@pytest.mark.parametrize("size", ["vocab_size", "kv_heads", "head_dim", "ffn_width"])
def test_an_unchecked_configuration_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{size}=null: .*train\.config\.check"):
        train_flops_per_token(config(replace(GPT, **{size: None})), 64, True)
    with pytest.raises(ValueError, match=r"moe\.ffn_width=null: .*train\.config\.check"):
        train_flops_per_token(config(moe=MoeConfig(experts=4)), 64, True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 of tomorrow", None),
        ("NVIDIA GeForce RTX 9090", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_or_absent(name: str, peak: float | None) -> None:
    assert device_peak_flops(name, "bf16") == peak
    assert device_peak_flops(name, "fp32") is None


def test_mfu_is_a_share_of_all_devices_or_absent() -> None:
    run = config(replace(GPT, layers=3), attention=replace(S2, dense_layers=[]))
    got = UtilisationMeter(run, world_size=4, device_name="NVIDIA H200").figures(1e6)
    assert got["mfu"] == pytest.approx(1e6 * train_flops_per_token(run, 64, True) / (4 * 989.5e12))
    assert got["mfu_dense"] == pytest.approx(1e6 * train_flops_per_token(run, 64, False) / (4 * 989.5e12))
    assert got["mfu"] < got["mfu_dense"]
    assert UtilisationMeter(run, world_size=4, device_name="an unknown device").figures(1e6) == {}
    assert UtilisationMeter(run, world_size=4, device_name=None).figures(1e6) == {}
