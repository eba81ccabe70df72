"""The largest model that fits where the optimiser's states lie: as many layers of the configured width as each mode leaves room for.

A model, as the plan's memory is: nothing is built or measured. For each mode the share of the states on the host is the smallest, in steps
of 5 %, that makes a number of layers fit; the host's memory bounds it from the other side.
"""

from dataclasses import dataclass, replace

from train.config.check_offload import DEVICE_SHARE, HOST_SHARE
from train.config.plan import GIB, count_parameters, memory_model, optimizer_parts
from train.config.schema import Config
from train.engine.layout import ParallelLayout
from train.offload.config import OffloadConfig
from train.offload.layout import MODES
from train.offload.plan import Placement, place

MOST_LAYERS = 4096
_STEPS = 20


@dataclass(frozen=True)
class Largest:
    """What fits with the states in one place. `layers` is 0 where not even one layer for each stage does."""

    mode: str
    fraction: float
    layers: int
    parameters: int
    device_gib: float
    host_gib: float


def largest_models(config: Config, layout: ParallelLayout, device_bytes: float, host_bytes: float) -> list[Largest]:
    """For each mode the most layers of a checked `config`, all else equal; bytes of one GPU, and of the host for each process."""
    unit = layout.pp * layout.vpp
    return [_largest(config, layout, mode, unit, DEVICE_SHARE * device_bytes, HOST_SHARE * host_bytes) for mode in MODES]


def _largest(config: Config, layout: ParallelLayout, mode: str, unit: int, device_room: float, host_room: float) -> Largest:
    fits: dict[int, Placement | None] = {0: None}

    def at(count: int) -> bool:
        fits[count] = _fitting(_with_layers(config, count * unit), layout, mode, device_room, host_room)
        return fits[count] is not None

    low, high = 0, 1
    while high * unit <= MOST_LAYERS and at(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    found = fits[low]
    if found is None:
        return Largest(mode, 0.0, 0, 0, 0.0, 0.0)
    fitting = _with_layers(config, low * unit)
    device = _others(fitting, layout) + found.device_bytes
    parameters = count_parameters(fitting)["total"]
    return Largest(mode, found.fraction, low * unit, parameters, device / GIB, found.host_bytes / GIB)


def _with_layers(config: Config, layers: int) -> Config:
    return replace(config, model=replace(config.model, layers=layers), offload=OffloadConfig())


def _others(config: Config, layout: ParallelLayout) -> float:
    """Bytes of a process on the device without the optimiser's states, by the plan's model."""
    memory = memory_model(config, layout)
    return (memory["total"] - memory["optimizer"]) * GIB


def _fitting(config: Config, layout: ParallelLayout, mode: str, device_room: float, host_room: float) -> Placement | None:
    """The least share of the states on the host with which they fit, or None."""
    room = device_room - _others(config, layout)
    parts, low = optimizer_parts(config, layout), config.train.precision == "bf16"
    for step in range(1, _STEPS + 1) if mode != "none" else (0,):
        placed = place(parts, low, mode, step / _STEPS, 1)
        if placed.host_bytes > host_room:
            return None  # a larger share takes only more
        if placed.device_bytes <= room:
            return placed
    return None
