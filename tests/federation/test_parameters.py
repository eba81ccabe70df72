"""Named parameters of a site: the same names and bits whatever its layout, and what is pushed is what the optimiser steps from."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import RankPools
from small_engine import MOE, Engine, Piece, assemble, build, pieces, small_config, take_step
from torch import Tensor

SP = {"parallel.tp": 2, "parallel.sp": True}
BF16 = {"train.precision": "bf16"}
PLAIN = {"parallel.distributed_optimizer": False}
STREAM = {"offload.mode": "stream", "offload.fraction": 0.6}
ON_HOST = {"offload.mode": "cpu_step", "offload.fraction": 0.6}
TIED = {"model.tied": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, PLAIN),
    (2, {"parallel.ep": 2}),
    (2, SP),
    (2, {"parallel.pp": 2}),
    (4, {**SP, "parallel.pp": 2}),
    (4, {**SP, "parallel.ep": 2, "moe.bias_rate": 1e-2, "moe.aux_coef": 0.0}),
]


def parameters_of(engine: Engine) -> Any:
    from train.engine.masters import masters, publish
    from train.federation.parameters import SiteParameters

    return SiteParameters(masters(engine.chunks, engine.optimizer), lambda: publish(engine.chunks, engine.optimizer), engine.ranks)


class Stored:
    """The named parameters in the place of an outer step's state."""

    def __init__(self, parameters: Any) -> None:
        self._named = parameters.named

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"value": {name: entry.tensor for name, entry in self._named.items()}}


def outer_pieces(engine: Engine, parameters: Any) -> list[Piece]:
    """What this rank would store of the named parameters."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    from train.engine.checkpoint import sharded_state

    state = sharded_state(engine.chunks, None, Stored(parameters), loading=False)["outer"]  # type: ignore[arg-type]
    apply_factories(state)
    found = []
    for each in nested_values(state):
        data = each.data.clone().reshape((1,) * each.prepend_axis_num + tuple(each.local_shape))
        found.append(Piece(each.key, tuple(each.global_shape), tuple(each.global_offset), data))
    return found


def moved(tensor: Tensor) -> Tensor:
    """A value far from what the weights are, of which bf16 rounds much away."""
    return tensor * 0.73 + 0.0123


def round_trip(changes: dict[str, Any]) -> tuple[list[Piece], list[Piece], list[Piece], list[Piece], list[Piece]]:
    """The state after two steps, after a pull and push, the names then; state and names after other values were pushed."""
    engine = build(small_config({**MOE, **changes}))
    take_step(engine, 0)
    take_step(engine, 1)
    parameters = parameters_of(engine)
    before = pieces(engine)
    parameters.pull()
    parameters.push()
    after, names = pieces(engine), outer_pieces(engine, parameters)
    for entry in parameters.named.values():
        entry.tensor.copy_(moved(entry.tensor))
    parameters.push()
    changed = pieces(engine)
    for entry in parameters.named.values():
        entry.tensor.zero_()
    parameters.pull()
    return before, after, names, changed, outer_pieces(engine, parameters)


def joined(whole: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Experts and router rows put together again, by the name of their parameter."""
    found: dict[str, Tensor] = {}
    rows: dict[str, dict[int, Tensor]] = {}
    for key, tensor in whole.items():
        name = key.removeprefix(prefix)
        words = name.split(".")
        number = next((i for i, word in enumerate(words) if word.isdigit() and i > 2), None)
        if number is None:
            found[name] = tensor
        else:
            parameter = ".".join(words[:number] + words[number + 1 :])
            rows.setdefault(parameter, {})[int(words[number])] = tensor
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in rows.items()}


def masters_in(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 weights of a whole state and the routers' biases, by parameter name."""
    biases = {key: value for key, value in whole.items() if key.endswith(".expert_bias")}
    for prefix in ("optimizer.state.fp32_param.", "optimizer.state.param."):
        found = {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
        if found:
            return joined(found, "") | biases
    return joined({key: value for key, value in whole.items() if not key.startswith("optimizer.")}, "")


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_a_pull_and_push_changes_no_bit_and_new_values_reach_every_copy(ranks: RankPools, world: int, layout: dict[str, Any]) -> None:
    check(ranks, world, {**BF16, **TIED, **layout})


@pytest.mark.parametrize("layout", [{"parallel.pp": 2, **TIED}, PLAIN, ON_HOST], ids=str)
def test_weights_without_masters(ranks: RankPools, layout: dict[str, Any]) -> None:
    check(ranks, 2, layout)


@pytest.mark.parametrize("offload", [STREAM, ON_HOST], ids=str)
def test_states_on_the_host_follow(ranks: RankPools, offload: dict[str, Any]) -> None:
    check(ranks, 2, {**BF16, **offload, "parallel.ep": 2})


def check(ranks: RankPools, world: int, changes: dict[str, Any]) -> None:
    before, after, names, changed, again = (assemble(parts) for parts in zip(*ranks(world).run(round_trip, changes), strict=True))
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    mains, named = masters_in(before), joined(names, "outer.value.")
    assert named.keys() == mains.keys() and len(named) > 15
    for name, value in named.items():
        assert torch.equal(value, mains[name].view(value.shape)), name
    # Other values: masters are those, bf16 weights their rounding, moments what they were.
    new_mains, weights = masters_in(changed), joined({key: value for key, value in changed.items() if "optimizer." not in key}, "")
    for name, value in joined(again, "outer.value.").items():
        assert torch.equal(value, moved(named[name])), name
        assert torch.equal(value, new_mains[name].view(value.shape)), name
        assert torch.equal(weights[name], value.view(weights[name].shape).to(weights[name].dtype)), name
    for key, value in before.items():
        if ".exp_avg" in key:
            assert torch.equal(value, changed[key]), key


def names_at_start(changes: dict[str, Any]) -> list[Piece]:
    engine = build(small_config({**MOE, **BF16, **TIED, "moe.bias_rate": 1e-2, **changes}))
    parameters = parameters_of(engine)
    parameters.pull()
    return outer_pieces(engine, parameters)


def test_names_and_values_do_not_depend_on_the_layout(ranks: RankPools) -> None:
    want = assemble(ranks(1).run(names_at_start, {}))
    assert "outer.value.decoder.layers.1.mlp.experts.3.w_in" in want and "outer.value.decoder.layers.3.mlp.router.weight.0" in want
    for world, layout in LAYOUTS[3:]:
        got = assemble(ranks(world).run(names_at_start, layout))
        assert got.keys() == want.keys()
        for name, value in want.items():
            rows = min(value.shape[0], got[name].shape[0]) if "embedding" in name else value.shape[0]
            assert torch.equal(got[name][:rows], value[:rows]), (layout, name)


def next_step(changes: dict[str, Any]) -> tuple[list[Piece], list[Piece]]:
    """Names before a step at lr=0 and at a tiny one, both after other values were pushed."""
    engine = build(small_config({**MOE, **changes, "optim.weight_decay": 0.0}))
    take_step(engine, 0)
    parameters = parameters_of(engine)
    parameters.pull()
    for entry in parameters.named.values():
        entry.tensor.copy_(moved(entry.tensor))
    parameters.push()
    pushed = outer_pieces(engine, parameters)
    take_step(engine, 1, lr=1e-6)
    parameters.pull()
    return pushed, outer_pieces(engine, parameters)


@pytest.mark.parametrize("layout", [{}, PLAIN, STREAM, ON_HOST], ids=str)
def test_the_next_step_starts_from_what_was_pushed(ranks: RankPools, layout: dict[str, Any]) -> None:
    pushed, stepped = (assemble(parts) for parts in zip(*ranks(2).run(next_step, {**layout, **BF16}), strict=True))
    for name, value in pushed.items():
        change = (stepped[name] - value).abs().max()
        # Adam moves a weight by about lr; a stale master would lie 0.01 away.
        assert change < 1e-5, (name, float(change))
    assert any(not torch.equal(stepped[name], value) for name, value in pushed.items())


def learning_nothing(changes: dict[str, Any]) -> tuple[list[Piece], list[Piece]]:
    engine = build(small_config({**MOE, **changes}))
    take_step(engine, 0)
    parameters = parameters_of(engine)
    parameters.pull()
    for entry in parameters.named.values():
        entry.tensor.copy_(moved(entry.tensor))
    parameters.push()
    pushed = pieces(engine, optimizer=False)
    take_step(engine, 1, lr=0.0)
    return pushed, pieces(engine, optimizer=False)


@pytest.mark.parametrize("changes", [BF16, {**BF16, **ON_HOST}, {"parallel.pp": 2, **TIED}], ids=str)
def test_a_step_at_learning_rate_0_leaves_the_pushed_weights(ranks: RankPools, changes: dict[str, Any]) -> None:
    pushed, stepped = (assemble(parts) for parts in zip(*ranks(2).run(learning_nothing, changes), strict=True))
    for name, value in pushed.items():
        assert torch.equal(stepped[name], value), name


def pushed_with(overlap: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """This rank's weights after a push, and after a further step; that step's loss."""
    from small_engine import names

    import train.engine.build as engine_build

    settings = engine_build.DistributedDataParallelConfig

    def with_overlap(**keywords: Any) -> Any:
        return settings(**{**keywords, "overlap_param_gather": overlap})

    engine_build.DistributedDataParallelConfig = with_overlap  # type: ignore[assignment,misc]
    try:
        engine = build(small_config(BF16))
    finally:
        engine_build.DistributedDataParallelConfig = settings  # type: ignore[misc]
    for step in range(2):
        take_step(engine, step)
    parameters = parameters_of(engine)
    parameters.pull()
    for entry in parameters.named.values():
        entry.tensor.copy_(moved(entry.tensor))
    parameters.push()
    pushed = {name: weight.detach().clone() for name, weight in names(engine)}
    loss = take_step(engine, 2).loss
    take_step(engine, 3, lr=0.0)  # gathers what the step before it left in shards
    return pushed, {name: weight.detach().clone() for name, weight in names(engine)}, loss


def test_overlapped_gathering_of_parameters_sees_what_was_pushed(ranks: RankPools) -> None:
    plain, overlapped = ranks(2).run(pushed_with, False), ranks(2).run(pushed_with, True)
    for (want, after, loss), (got, later, same) in zip(plain, overlapped, strict=True):
        assert loss == same
        for name, value in want.items():
            assert torch.equal(got[name], value), name
            assert torch.equal(later[name], after[name]), name
