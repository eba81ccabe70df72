"""Memory and traffic between host and device: exactly sized pinned slabs, and one CUDA stream a direction.

Where the device is the CPU there are neither: a slab is plain memory, a lane does its work at once, and an event is None. The same code
above runs in both places.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

RESERVE = 0.05
"""Share of the GPU's memory that states which come ahead of the step leave free, for whatever backward has yet to allocate."""


def free_room(device: torch.device) -> int:
    """Bytes that states may take ahead of the step: what the driver and torch's allocator have free, less a reserve; 0 on the CPU.

    On the CPU host and device are one memory, and a copy ahead of time hides nothing.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + cached - int(RESERVE * total))


@contextmanager
def span(name: str, device: torch.device) -> Iterator[None]:
    """Name the work of the block in torch's profiler and, on a GPU, as an NVTX range."""
    with record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


class Slabs:
    """The host memory of one optimiser; pinned when it serves a GPU. Unpinned and freed by `release`, at the latest when collected."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._pinned_tensors: list[Tensor] = []
        weakref.finalize(self, _unregister, self._pinned_tensors).atexit = False  # the driver may be gone by then

    def allocate(self, elements: int) -> Tensor:
        """fp32 zeros. Raises MemoryError in one line when the memory cannot be page-locked."""
        slab = torch.zeros(elements)
        if not self.pinned or not elements:
            return slab
        # torch's own pinned allocator rounds each block up to a power of two and keeps it.
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
        except RuntimeError as error:
            raise MemoryError(
                f"offload: {slab.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked ({error}); "
                "lower the fraction, or raise the limit on locked memory"
            ) from error
        self._pinned_tensors.append(slab)
        return slab

    def release(self) -> None:
        """Unlock the memory; it is freed with the last tensor that views it. No copy may be under way."""
        _unregister(self._pinned_tensors)


def _unregister(tensors: list[Tensor]) -> None:
    while tensors:
        torch.cuda.cudart().cudaHostUnregister(tensors.pop().data_ptr())


class Lane:
    """One direction of traffic, or the computation: work in order, on a stream of its own on a GPU, at once on the CPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    @classmethod
    def new(cls, device: torch.device) -> "Lane":
        """A lane of its own on `device`."""
        return cls(torch.cuda.Stream(device) if device.type == "cuda" else None)

    @classmethod
    def current(cls, device: torch.device) -> "Lane":
        """The caller's stream on `device`."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    @contextmanager
    def after(self, *events: torch.cuda.Event | None) -> Iterator[None]:
        """Work of the block runs in this lane, once all `events` have happened (None: nothing to wait for)."""
        if self.stream is None:
            yield
            return
        self.wait(*events)
        with torch.cuda.stream(self.stream):
            yield

    def wait(self, *events: torch.cuda.Event | None) -> None:
        """Later work of this lane waits for `events`; the host does not."""
        if self.stream is not None:
            for event in events:
                if event is not None:
                    self.stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        """The event that all work of this lane so far has been done."""
        return None if self.stream is None else self.stream.record_event()

    def synchronize(self) -> None:
        """Have the host wait for all work of this lane."""
        if self.stream is not None:
            self.stream.synchronize()
