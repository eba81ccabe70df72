"""What offloading takes and costs, before anything is allocated: bytes on the device and the host of one process, and a model of the time.

The bytes are those that the optimiser will take. The seconds are a model: rates of one host with an H200, to be compared with each
other rather than with a clock. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from train.offload.layout import MASTER, MODES, MOMENTS, StateLayout, arrange, planned_bytes

BOTH_WAYS = 47.8e9
"""Bytes a second in each direction between host and GPU while both are busy."""
ONE_WAY = 55.4e9
"""The same in one direction alone."""
HOST_ADAM = 4.1e9 / 16
"""Parameters a second that one core of the host updates with torch's fused AdamW."""
ASSUMPTIONS = {
    "host_link_both_ways_gb_s": BOTH_WAYS / 1e9,
    "host_link_one_way_gb_s": ONE_WAY / 1e9,
    "host_adam_gparams_s_per_core": HOST_ADAM / 1e9,
    "measured_on": "one host with an H200 (PCIe 5), 16 cores",
    "overlap": "none with forward and backward: seconds are upper bounds at these rates",
}
"""The rates behind `seconds`, for plan.json."""


@dataclass(frozen=True)
class Placement:
    """One mode at one fraction, for one process. `seconds`: added to each step, a model."""

    mode: str
    fraction: float
    device_bytes: int
    host_bytes: int
    seconds: float


def place(parts: Sequence[int], low: bool, mode: str, fraction: float, threads: int) -> Placement:
    """The placement of optimisers with `parts` parameters each (`low`: in bf16), whose host Adam has `threads` threads."""
    layouts = [arrange([(0, count, low)], mode, fraction) for count in parts]
    taken = [planned_bytes(layout) for layout in layouts]
    return Placement(
        mode=mode,
        fraction=0.0 if mode == "none" else fraction,
        device_bytes=sum(each["device"] for each in taken),
        host_bytes=sum(each["host"] for each in taken),
        seconds=sum(_seconds(layout, threads) for layout in layouts),
    )


def _seconds(layout: StateLayout, threads: int) -> float:
    elements = layout.size - layout.cut
    if layout.mode == "stream":
        return (MOMENTS * elements + MASTER * (layout.host_masters_end - layout.cut)) / BOTH_WAYS
    if layout.mode == "cpu_step":
        return elements / (HOST_ADAM * threads) + MASTER * layout.widest / ONE_WAY
    return 0.0


def every_mode(parts: Sequence[int], low: bool, fraction: float, threads: int) -> list[Placement]:
    """All modes beside each other at one fraction."""
    return [place(parts, low, mode, fraction, threads) for mode in MODES]


def choose(parts: Sequence[int], low: bool, device_room: float, host_room: float, threads: int) -> Placement | None:
    """The least offload that fits into so many bytes, in whole percent, then the quicker mode; None when nothing fits."""
    candidates = [place(parts, low, "none", 0.0, threads)]
    for mode in ("stream", "cpu_step"):
        fitting = (place(parts, low, mode, percent / 100, threads) for percent in range(1, 101))
        candidates += [next((each for each in fitting if each.device_bytes <= device_room and each.host_bytes <= host_room), candidates[0])]
    fit = [each for each in candidates if each.device_bytes <= device_room and each.host_bytes <= host_room]
    return min(fit, key=lambda each: (each.mode != "none", each.seconds), default=None)
