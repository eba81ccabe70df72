"""Where each element of the optimiser's states lies: a flat space over all parameters, split between device and host, cut into buckets.

Every parameter starts at a multiple of `ALIGN` elements, so that vectorised kernels and copies find aligned addresses whatever the
sizes before it. Parameters with fp32 masters (those of bf16) come first: masters are then one range too. The first elements stay on
the device, the rest go to the host; the cut falls where the bytes say, also in the middle of a parameter. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MODES = ("none", "stream", "cpu_step")
ALIGN = 64
BUFFERS = 3
"""Bucket buffers in rotation: one arrives, one is updated, one leaves."""
MOMENTS = 8
MASTER = 4


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat space."""

    index: int
    group: int
    start: int
    numel: int
    low: bool
    """The parameter is bf16 and has an fp32 master."""


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one bucket updates: elements `begin` to `end` of it, from `at` of the flat space on."""

    slot: Slot
    begin: int
    end: int

    @property
    def at(self) -> int:
        """Its first element in the flat space."""
        return self.slot.start + self.begin


@dataclass(frozen=True)
class Bucket:
    """A range of the flat space that moves and is updated at once."""

    start: int
    end: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StateLayout:
    """The whole arrangement. `cut`: elements before it are resident on the device, those after it are on the host."""

    mode: str
    slots: tuple[Slot, ...]
    size: int
    low_end: int
    cut: int
    bucket_elements: int
    resident: tuple[Bucket, ...]
    offloaded: tuple[Bucket, ...]

    @property
    def host_masters_end(self) -> int:
        """Host masters cover the flat space from `cut` to here; Adam on the host needs them for fp32 parameters too."""
        return max(self.cut, self.size if self.mode == "cpu_step" else self.low_end)

    @property
    def resident_masters_end(self) -> int:
        """Masters on the device cover the flat space from 0 to here."""
        return min(self.cut, self.low_end)

    @property
    def widest(self) -> int:
        """Elements of the widest bucket that moves."""
        return max((bucket.end - bucket.start for bucket in self.offloaded), default=0)


def arrange(
    sizes: Sequence[tuple[int, int, bool]], mode: str = "stream", fraction: float = 1.0, bucket_elements: int = 16 * 2**20
) -> StateLayout:
    """Arrange parameters given as (group, elements, is bf16) for a mode of `MODES`.

    `fraction` is the share of the states' bytes on the host. Raises ValueError naming the argument that is out of range.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode}: there is no such choice; choose one of {', '.join(MODES)}")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction={fraction}: it is a share of the states' bytes; use a number from 0 to 1")
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements={bucket_elements}: must be 1 or more; use a positive number")
    bucket_elements = _aligned(bucket_elements)
    slots: list[Slot] = []
    at = low_end = 0
    for low in (True, False):
        for index, (group, numel, is_low) in enumerate(sizes):
            if is_low is low:
                slots.append(Slot(index, group, at, numel, low))
                at = _aligned(at + numel)
        low_end = at if low else low_end
    cut = at if mode == "none" else _cut(at, low_end, fraction, MOMENTS + MASTER if mode == "cpu_step" else MOMENTS)
    return StateLayout(
        mode=mode,
        slots=tuple(sorted(slots, key=lambda slot: slot.index)),
        size=at,
        low_end=low_end,
        cut=cut,
        bucket_elements=bucket_elements,
        resident=_buckets(slots, 0, cut, bucket_elements),
        offloaded=_buckets(slots, cut, at, bucket_elements),
    )


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def _cut(size: int, low_end: int, fraction: float, full_bytes: int) -> int:
    """The flat position from which on the host holds `fraction` of the bytes: 12 an element before `low_end`, `full_bytes` after it."""
    low_bytes = MOMENTS + MASTER
    full_total = full_bytes * (size - low_end)
    wanted = fraction * (low_bytes * low_end + full_total)
    cut = size - wanted / full_bytes if wanted <= full_total else low_end - (wanted - full_total) / low_bytes
    return max(0, int(cut) // ALIGN * ALIGN)


def _buckets(slots: Sequence[Slot], start: int, end: int, width: int) -> tuple[Bucket, ...]:
    """Cut `start` to `end` into buckets of `width`; `slots` in flat order. Buckets without any parameter are left out."""
    buckets = []
    first = 0
    for low in range(start, end, width):
        high = min(low + width, end)
        pieces = []
        while first < len(slots) and slots[first].start + slots[first].numel <= low:
            first += 1
        for slot in slots[first:]:
            if slot.start >= high:
                break
            begin, stop = max(low, slot.start) - slot.start, min(high, slot.start + slot.numel) - slot.start
            if stop > begin:
                pieces.append(Piece(slot, begin, stop))
        if pieces:
            buckets.append(Bucket(low, high, tuple(pieces)))
    return tuple(buckets)


def planned_bytes(layout: StateLayout) -> dict[str, int]:
    """Bytes that an optimiser of this layout holds beside weights and gradients: `device` and `host`, buffers included."""
    device = MOMENTS * layout.cut + MASTER * layout.resident_masters_end
    host = MOMENTS * (layout.size - layout.cut) + MASTER * (layout.host_masters_end - layout.cut)
    buffers = min(BUFFERS, len(layout.offloaded)) * layout.widest
    if layout.mode == "stream":
        masters = layout.host_masters_end > layout.cut
        device += buffers * (MOMENTS + (MASTER if masters else 0))
    elif layout.mode == "cpu_step":  # weights come up in fp32, gradients go down in fp32
        device += buffers * MASTER
        host += buffers * MASTER
    return {"device": device, "host": host}
