"""The counter of tokens per expert: what it counts, what it leaves out, and its sum over ranks."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools


def layers() -> ModuleType:
    """The module of the layer tests, by path: test files are no package."""
    if "layer_jobs" not in sys.modules:
        spec = importlib.util.spec_from_file_location("layer_jobs", Path(__file__).with_name("test_megatron_layer.py"))
        assert spec is not None and spec.loader is not None
        sys.modules["layer_jobs"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["layer_jobs"])
    return sys.modules["layer_jobs"]


def counts() -> tuple[dict, dict, dict]:
    from moe.load import ExpertLoad

    jobs = layers()
    layer = jobs.build(layer_number=2)
    load = ExpertLoad([layer], num_layers=3, num_experts=jobs.EXPERTS)
    x = jobs.tokens()
    for _ in range(2):
        layer(x)
    twice = load.collect()
    layer.eval()
    layer(x)
    layer.train()
    with torch.no_grad():
        layer(x)
    nothing = load.collect()
    _, chosen = (x.view(-1, jobs.WIDTH) @ layer.router.weight.T).topk(2)
    load.close()
    layer(x)
    assert load.collect() == {}
    return twice, nothing, {2: torch.bincount(chosen.view(-1), minlength=jobs.EXPERTS)}


def recomputed() -> dict:
    from megatron.core import tensor_parallel

    from moe.load import ExpertLoad

    jobs = layers()
    layer = jobs.build()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    load = ExpertLoad([layer], num_layers=1, num_experts=jobs.EXPERTS)
    x = jobs.tokens().requires_grad_()
    tensor_parallel.checkpoint(lambda h: layer(h)[0], False, x).sum().backward()
    total: dict = load.collect()
    return total


def over_ranks() -> tuple[dict, dict]:
    from moe.load import ExpertLoad

    jobs = layers()
    layer = jobs.build(ep=2, layer_number=1 + dist.get_rank())
    load = ExpertLoad([layer], num_layers=2, num_experts=jobs.EXPERTS)
    layer(jobs.tokens(seed=dist.get_rank()))
    load_again = load.collect(dist.group.WORLD)
    return load_again, load.collect(dist.group.WORLD)


def test_counts_training_assignments_since_the_last_collect(ranks: RankPools) -> None:
    twice, nothing, once = ranks(1).run(counts)[0]
    assert twice.keys() == {2} and nothing == {}
    assert torch.equal(twice[2].load, 2 * once[2]) and twice[2].tokens == 24
    assert (twice[2].kept, twice[2].skipped, twice[2].none_resident) == (48, 0, 0)


def test_a_recomputed_layer_counts_once(ranks: RankPools) -> None:
    (total,) = ranks(1).run(recomputed)
    assert int(total[1].load.sum()) == 2 * 12


def test_a_group_sees_the_layers_of_all_its_ranks(ranks: RankPools) -> None:
    (first, empty), (second, _) = ranks(2).run(over_ranks)
    assert first.keys() == {1, 2} and empty == {}
    for layer, count in first.items():
        assert torch.equal(count.load, second[layer].load) and int(count.load.sum()) == 2 * 12


def by_hand() -> dict[str, float]:
    from moe.load import LayerLoad

    return LayerLoad(torch.tensor([6, 2, 0, 0]), kept=5, skipped=3, none_resident=1, tokens=4).figures()


def test_the_figures_of_a_layer_by_hand(ranks: RankPools) -> None:
    (figures,) = ranks(1).run(by_hand)
    entropy = (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4)
    assert figures == pytest.approx({"entropy": entropy, "max_load": 3.0, "skip_rate": 3 / 8, "none_resident": 1 / 4})
