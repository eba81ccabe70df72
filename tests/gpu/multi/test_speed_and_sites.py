"""What the benchmark measures on two devices, at small size: a step and its communication, and runs of two sites of one device each.

Sites on the CPU are run by the benchmark's own test.
"""

from pathlib import Path

import pytest
from on_devices import on_devices
from ranks import RankPools

from benchmarks import layout_sites
from benchmarks.layout_speed import measure

LAYOUTS = (("DP 2",), ("TP 2 + SP", "parallel.tp=2", "parallel.sp=true"), ("PP 2", "parallel.pp=2"))


@pytest.mark.parametrize(
    ("device", "layout", "experiment"),
    on_devices([(layout, experiment) for experiment in ("gpt_1b", "gpt_1b_s2_32k") for layout in LAYOUTS], [(LAYOUTS[1], "gpt_1b_s2_32k")]),
    indirect=["device"],
)
def test_a_step_is_timed_and_its_communication_seen(pools: RankPools, layout: tuple[str, ...], experiment: str) -> None:
    rows = ["train.micro_batch=1", "train.global_batch=4"]
    for found in pools(2).run(measure, experiment, True, [*rows, *layout[1:]], 2):
        assert found["ranks"] == 2 and found["tokens"] == 4 * 64
        assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["ms"] * 1e3)
        assert 0 <= found["exposed_ms"] <= found["communication_ms"] and found["computing_ms"] > 0
        assert found["communication_ms"] > 0 and found["communication_by_kind_ms"]
        assert found["last_loss"] < found["first_loss"]


@pytest.mark.parametrize(("device", "replication"), on_devices([(2,), (1,)], []), indirect=["device"])
def test_two_sites_count_the_bytes_of_the_formula(device: str, replication: int, tmp_path: Path) -> None:
    found = layout_sites.run(device, "small", 2, replication, tmp_path, 240.0, rounds=2)
    assert found["sites"] == 2 and found["holds"], found
    assert found["tokens_per_second"] > 0 and found["outer_seconds"] > 0
    for site in found["bytes"]:
        assert site["rounds"] == 2 and site["sent"] > 0 and not site["caveats"]
