"""Which GPUs and cores the processes of this host get, found without importing torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.config.errors import ConfigError
from train.config.schema import Config
from train.engine.layout import processes_of_host, processes_of_site

NEED_A_GPU = ("triton", "flex")
"""Attention back ends that train on a GPU only."""


def gpu_names(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """Return the NVIDIA GPUs that a process here sees, as CUDA_VISIBLE_DEVICES names them; [] means that the run takes the CPU."""
    present = [entry.name for entry in devices.glob("nvidia[0-9]*") if entry.name.removeprefix("nvidia").isdigit()]
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return [str(number) for number in range(len(present))]
    return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]


def visible_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs that a process here sees."""
    return len(gpu_names(env, devices))


def check_devices(config: Config, gpus: int) -> None:
    """Raise ConfigError when processes would share a GPU, or when the attention back end asked for needs one and there is none.

    Any number of processes may share the CPU; sites may share GPUs with federation.share_gpus.
    """
    backend, processes, sites = config.attention.backend, processes_of_host(config), sites_here(config)
    if gpus == 0 and backend in NEED_A_GPU:
        rule = "this host shows no GPU, and the back end has no backward pass on the CPU"
        raise ConfigError("attention.backend", backend, rule, "use attention.backend=auto")
    shown = f"this host shows {gpus} GPU{'s' if gpus > 1 else ''}"
    if sites > 1 and config.federation.share_gpus:
        if 0 < gpus < processes_of_site(config):
            rule = f"{shown}, and sites may share them, but the {processes_of_site(config)} processes of a site may not"
            raise ConfigError("parallel.processes", processes, rule, f"use {sites * gpus} or fewer, or CUDA_VISIBLE_DEVICES= for the CPU")
    elif 0 < gpus < processes:
        fewer = f"use {gpus} or fewer" if gpus >= sites else "use fewer sites"
        shared = ", federation.share_gpus=true" if sites > 1 else ""
        rule = f"{shown}, and each process needs its own"
        raise ConfigError("parallel.processes", processes, rule, f"{fewer}{shared}, or CUDA_VISIBLE_DEVICES= to run on the CPU")


def sites_here(config: Config) -> int:
    """Sites that the launcher starts on this host."""
    return config.federation.sites if config.federation.site is None else 1


def share_gpus(names: Sequence[str], sites: int, processes: int) -> list[list[str]]:
    """The GPUs of each of `sites` sites of `processes` processes, each its own as far as they go, then from the first again.

    Needs at least one site's worth of GPUs, or none: then every site has none.

    >>> share_gpus(["0", "1", "2", "3"], 2, 2)
    [['0', '1'], ['2', '3']]
    >>> share_gpus(["0"], 2, 1)
    [['0'], ['0']]
    """
    slots = len(names) // processes
    return [list(names[site % slots * processes :][:processes]) if slots else [] for site in range(sites)]


def share_cores(cores: Sequence[int], sites: int) -> list[list[int]]:
    """The cores of each site: neighbouring ones, as even as can be; all of them for everyone where there are fewer than sites.

    >>> share_cores([0, 1, 4, 5, 6], 2)
    [[0, 1], [4, 5, 6]]
    """
    if len(cores) < sites:
        return [list(cores)] * sites
    return [list(cores[site * len(cores) // sites : (site + 1) * len(cores) // sites]) for site in range(sites)]
