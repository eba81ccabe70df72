"""GPUs and cores of this host, shared out over processes and sites; refusals where they do not reach."""

from pathlib import Path

import pytest

from launch.devices import check_devices, gpu_names, share_cores, share_gpus, visible_gpus
from launch.sites import placement
from train.config.compose import compose
from train.config.errors import ConfigError
from train.config.schema import Config


def config(processes: int, sites: int = 1, *overrides: str) -> Config:
    return compose([f"parallel.processes={processes}", f"federation.sites={sites}", *overrides])


def test_visible_gpus(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2 and gpu_names({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert gpu_names({"CUDA_VISIBLE_DEVICES": "GPU-7, 3"}, tmp_path) == ["GPU-7", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


@pytest.mark.parametrize(
    ("made", "gpus", "line"),
    [
        (
            config(2),
            1,
            "parallel.processes=2: this host shows 1 GPU, and each process needs its own; "
            "use 1 or fewer, or CUDA_VISIBLE_DEVICES= to run on the CPU",
        ),
        (
            config(2, 2),
            1,
            "parallel.processes=2: this host shows 1 GPU, and each process needs its own; "
            "use fewer sites, federation.share_gpus=true, or CUDA_VISIBLE_DEVICES= to run on the CPU",
        ),
        (
            config(4, 2, "federation.share_gpus=true"),
            1,
            "parallel.processes=4: this host shows 1 GPU, and sites may share them, but the 2 processes of a site may not; "
            "use 2 or fewer, or CUDA_VISIBLE_DEVICES= for the CPU",
        ),
    ],
)
def test_too_few_gpus_are_refused(made: Config, gpus: int, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_devices(made, gpus)
    assert str(caught.value) == line


def test_enough_gpus_or_none_are_not() -> None:
    check_devices(config(4), 0)
    check_devices(config(2), 2)
    check_devices(config(4, 2), 4)
    check_devices(config(2, 2, "federation.share_gpus=true"), 1)
    check_devices(config(1, 2, "federation.site=1"), 1)


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_a_back_end_that_needs_a_gpu_is_refused_on_a_cpu(backend: str) -> None:
    check_devices(config(1, 1, f"attention.backend={backend}"), 1)
    with pytest.raises(ConfigError, match=f"attention.backend={backend}: this host shows no GPU.*; use attention.backend=auto"):
        check_devices(config(1, 1, f"attention.backend={backend}"), 0)


def test_gpus_are_shared_out() -> None:
    assert share_gpus(["4", "5", "6", "7", "8"], 2, 2) == [["4", "5"], ["6", "7"]]
    assert share_gpus(["4", "5", "6"], 3, 2) == [["4", "5"]] * 3
    assert share_gpus(["a", "b"], 3, 1) == [["a"], ["b"], ["a"]]
    assert share_gpus([], 2, 3) == [[], []]


@pytest.mark.parametrize(("count", "sites"), [(7, 2), (8, 3), (4, 4), (13, 5)])
def test_cores_are_shared_out(count: int, sites: int) -> None:
    cores = list(range(10, 10 + count))
    shares = share_cores(cores, sites)
    assert [core for share in shares for core in share] == cores and len(shares) == sites
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert share_cores(cores[:1], 2) == [[10], [10]]


def test_the_plan_says_who_is_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placement(config(2)) is None
    monkeypatch.setattr("launch.sites.gpu_names", lambda: ["0"])
    line = placement(config(2, 2, "federation.share_gpus=true"))
    assert line is not None and line.startswith("2 sites on this host, 1 process each: site 0 on GPU 0, site 1 on GPU 0; sites share GPUs")
    monkeypatch.setattr("launch.sites.gpu_names", lambda: ["0", "1", "2", "3"])
    assert placement(config(4, 2)) == "2 sites on this host, 2 processes each: site 0 on GPU 0 1, site 1 on GPU 2 3"
