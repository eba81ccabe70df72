"""What offloading takes and costs, before anything is allocated: bytes on the device and the host of one process, and a model of the time.

The bytes are those that the optimiser will take. The seconds are a model, to be compared with each other rather than with a clock: at
assumed rates, or at those of this machine where they were measured. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from train.offload.layout import MASTER, MODES, MOMENTS, StateLayout, arrange, planned_bytes
from train.offload.rates import ASSUMED, Rates


@dataclass(frozen=True)
class Placement:
    """One mode at one fraction, for one process. `seconds`: added to each step, a model."""

    mode: str
    fraction: float
    device_bytes: int
    host_bytes: int
    seconds: float


def place(parts: Sequence[int], low: bool, mode: str, fraction: float, threads: int, rates: Rates = ASSUMED) -> Placement:
    """The placement of optimisers with `parts` parameters each (`low`: in bf16), whose host Adam has `threads` threads."""
    layouts = [arrange([(0, count, low)], mode, fraction) for count in parts]
    taken = [planned_bytes(layout) for layout in layouts]
    return Placement(
        mode=mode,
        fraction=0.0 if mode == "none" else fraction,
        device_bytes=sum(each["device"] for each in taken),
        host_bytes=sum(each["host"] for each in taken),
        seconds=sum(_seconds(layout, threads, rates) for layout in layouts),
    )


def _seconds(layout: StateLayout, threads: int, rates: Rates) -> float:
    elements = layout.size - layout.cut
    if layout.mode == "stream":
        return (MOMENTS * elements + MASTER * (layout.host_masters_end - layout.cut)) / rates.both_ways
    if layout.mode == "cpu_step":
        return elements / (rates.host_adam * threads) + MASTER * layout.widest / rates.one_way
    return 0.0


def every_mode(parts: Sequence[int], low: bool, fraction: float, threads: int, rates: Rates = ASSUMED) -> list[Placement]:
    """All modes beside each other at one fraction."""
    return [place(parts, low, mode, fraction, threads, rates) for mode in MODES]


def choose(parts: Sequence[int], low: bool, device_room: float, host_room: float, threads: int, rates: Rates = ASSUMED) -> Placement | None:
    """The least offload that fits into so many bytes, in whole percent, then the quicker mode; None when nothing fits."""
    candidates = [place(parts, low, "none", 0.0, threads, rates)]
    for mode in ("stream", "cpu_step"):
        fitting = (place(parts, low, mode, percent / 100, threads, rates) for percent in range(1, 101))
        candidates += [next((each for each in fitting if each.device_bytes <= device_room and each.host_bytes <= host_room), candidates[0])]
    fit = [each for each in candidates if each.device_bytes <= device_room and each.host_bytes <= host_room]
    return min(fit, key=lambda each: (each.mode != "none", each.seconds), default=None)
