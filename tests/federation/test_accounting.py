"""Parameters by class from a real checkpoint's index, and counted bytes beside the formula."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPools
from small_engine import MOE, build, names, small_config

from train.config.plan import class_sizes
from train.federation.accounting import sizes_from_index

CHANGES = {**MOE, "moe.shared_width": 32, "moe.layers": [1, 3]}


def save(folder: str, changes: dict[str, Any]) -> dict[str, int]:
    """Write a checkpoint of the small model; its trained parameters by name."""
    from train.engine import checkpoint

    engine = build(small_config(changes))
    checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {})
    return {name: parameter.numel() for name, parameter in names(engine)}


@pytest.mark.parametrize("changes", [CHANGES, {"model.tied": True}], ids=["experts", "dense, tied"])
def test_the_index_gives_the_closed_forms_and_the_padding(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    (built,) = ranks(1).run(save, str(tmp_path), changes)
    config = small_config(changes)
    sizes, closed = sizes_from_index(tmp_path / "step_00000001"), class_sizes(config)
    padding = (128 - 120) * 64 * (1 if config.model.tied else 2)
    assert (sizes.expert, sizes.router_row) == (closed.expert, closed.router_row)
    assert sizes.dense == closed.dense + padding
    assert sizes.total(config.moe.experts) == sum(built.values())


EXCHANGED = [
    {},
    {"model.tied": True, "moe.shared_width": 32, "moe.bias_rate": 0.01},
    {"federation.router_rows": "all"},
    {"moe.mode": "frozen"},
]


def exchanged(folder: str, changes: dict[str, Any]) -> tuple[int, float]:
    """Payload bytes of what site 1's outer step names and others have, and the formula with the index of its checkpoint."""
    from moe.outer_names import Sharing
    from train.engine import checkpoint
    from train.engine.masters import masters, publish
    from train.federation.parameters import SiteParameters
    from train.federation.planning import round_bytes
    from train.federation.residency import residency_plan

    sites = {"moe.mode": "skip", "federation.sites": 2, "federation.replication": 1, "federation.site": 1, "model.vocab_size": 257}
    config = small_config({**MOE, **sites, **changes})
    engine = build(config)
    held, frozen = masters(engine.chunks, engine.optimizer), config.moe.mode == "frozen"
    named = SiteParameters(held, lambda: publish(engine.chunks, engine.optimizer), engine.ranks, experts_at_all=frozen).named
    sharing = Sharing(residency_plan(config), 1, config.federation.router_rows == "all", 0)
    shared = [name for group, names in sharing.groups(named, named, (0, 1)) for name in names if len(group) > 1]
    checkpoint.save(Path(folder), 1, engine.chunks, engine.optimizer, {})
    formula = round_bytes(config, sizes_from_index(Path(folder) / "step_00000001"), 1, "payload")
    return 2 * 4 * sum(named[name].tensor.numel() for name in shared), formula


@pytest.mark.parametrize("changes", EXCHANGED, ids=["rows to holders", "tied, shared expert, bias", "rows to all", "frozen"])
def test_the_formula_has_every_number_that_an_outer_step_exchanges(ranks: RankPools, tmp_path: Path, changes: dict[str, Any]) -> None:
    ((payload, formula),) = ranks(1).run(exchanged, str(tmp_path), changes)
    assert payload == formula > 0


def test_an_index_without_weights_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    with pytest.raises(ValueError, match=re.escape(f"checkpoint {tmp_path}: its index names no weights of a model")):
        sizes_from_index(tmp_path)
