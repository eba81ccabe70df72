"""The counts against the model itself: its weights, and the matrix multiplications that torch sees in a forward pass."""

from dataclasses import replace
from typing import Any

import pytest

from moe.config import MoeConfig
from train.config.plan import count_parameters
from train.config.schema import Config
from train.model.config import AttentionConfig, ModelConfig
from train.tracking.flops import BACKWARD_AND_FORWARD, attention_pairs, train_flops_per_token

SEQ_LEN = 64
MIXTURE = MoeConfig(experts=4, top_k=2, layers=[1], ffn_width=48)


def config(tied: bool, moe: MoeConfig) -> Config:
    base = Config()
    return replace(
        base,
        model=ModelConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=16, ffn_width=96, vocab_size=320, tied=tied),
        attention=AttentionConfig(kind="dense"),
        moe=moe,
        train=replace(base.train, seq_len=SEQ_LEN, precision="fp32", micro_batch=1, global_batch=1),
    )


def measure(run: Config) -> dict[str, Any]:
    """On a rank: the model's weights by name, and the operations of one forward pass of one row, by kind."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from train.engine.build import build_model
    from train.engine.parallel import build_ranks, init_process_group

    (model,) = build_model(run, build_ranks(run, init_process_group(60.0)), trainable=False)
    tokens = torch.arange(run.train.seq_len)[None] % 257
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(tokens, torch.arange(run.train.seq_len)[None])
    kinds = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    return {"weights": {name: weight.numel() for name, weight in model.named_parameters()}, "flops": kinds}


@pytest.mark.parametrize(
    ("tied", "moe"), [(False, MoeConfig()), (True, MoeConfig()), (False, MIXTURE), (False, replace(MIXTURE, shared_width=40))]
)
def test_weights_and_forward_operations_are_the_models(ranks: Any, tied: bool, moe: MoeConfig) -> None:
    run = config(tied, moe)
    (measured,) = ranks(1).run(measure, run)
    assert sum(measured["weights"].values()) == count_parameters(run)["total"], measured["weights"]

    # torch's counter leaves the CPU's attention kernel out; its pairs are counted one by one in test_flops.py.
    assert not [kind for kind in measured["flops"] if "attention" in kind or "bmm" in kind]
    attention = 4 * 4 * 16 * float(attention_pairs(run, SEQ_LEN, pattern_aware=False).sum())
    forward = train_flops_per_token(run, SEQ_LEN, False) / BACKWARD_AND_FORWARD * SEQ_LEN
    assert sum(measured["flops"].values()) == pytest.approx(forward - attention, rel=1e-12), measured["flops"]
