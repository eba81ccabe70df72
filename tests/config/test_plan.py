"""The plan's closed forms against the model that the engine builds."""

import pytest
import torch
from ranks import RankPools

from train.config.check import check
from train.config.compose import compose
from train.config.plan import make_plan
from train.model.vocabulary import padded_vocab_size

MODELS = {
    "demo": ["experiment=demo", "parallel.processes=1", "parallel.ep=1"],
    "grouped": ["model.kv_heads=2", "model.tied=true", "model.head_dim=64", "model.layers=2"],
    "shared": ["moe=mixtral", "moe.shared_width=96", "moe.layers=[0,2]", "moe.ffn_width=80"],
}


def built_parameters(overrides: list[str]) -> int:
    from train.engine import cpu, parallel
    from train.engine.build import build_model

    config = check(compose(overrides), 1)
    cpu.install()
    ranks = parallel.build_ranks(config, torch.device("cpu"))
    (chunk,) = build_model(config, ranks, trainable=False)
    return sum(parameter.numel() for parameter in chunk.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_model(ranks: RankPools, model: str) -> None:
    overrides = [*MODELS[model], "train.precision=fp32"]
    (built,) = ranks(1).run(built_parameters, overrides)
    config = check(compose(overrides), 1)
    rows = padded_vocab_size(257, 1) - 257
    padding = rows * config.model.width * (1 if config.model.tied else 2)
    assert make_plan(config, 1)["parameters"]["total"] + padding == built


def test_memory_model_has_the_states_of_a_bf16_run() -> None:
    """bf16 weights 2 bytes, fp32 gradients 4, masters and two moments 12, the last ones shared out by the distributed optimiser."""
    config = check(compose(["model=gpt_1b", "data=demo"]), 4)
    plan = make_plan(config, 4)
    count, memory = plan["parameters"]["total"], plan["memory_model"]
    assert memory["weights"] * 2**30 == pytest.approx(2 * count)
    assert memory["gradients"] * 2**30 == pytest.approx(4 * count)
    assert memory["optimizer"] * 2**30 == pytest.approx(12 * count / 4)
    assert memory["total"] == pytest.approx(sum(value for name, value in memory.items() if name != "total"))


def test_full_recomputation_and_more_ranks_need_less() -> None:
    def memory(*overrides: str, world: int = 1) -> float:
        return make_plan(check(compose(["model=gpt_1b", *overrides]), world), world)["memory_model"]["total"]

    assert memory("train.recompute=full") < memory()
    assert memory("parallel.tp=2", world=2) < memory()
    assert memory("parallel.pp=2", world=2) < memory()
