"""Measures what the plan of offloading assumes: the link between host and GPU, the host's memory, the host's Adam.

Every rate is the median of a few repetitions after one that does not count. `leantron doctor --bandwidth` shows and keeps them;
`benchmarks/offload.py` sets its bounds with them.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from train.offload.host_adam import Update, torch_adam

ELEMENTS = 16 * 2**20
"""Numbers that move, or parameters that are updated, at once: the optimiser's own bucket."""
_GROUP: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def median_seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median wall time of `work`, device work included, after one call that does not count."""
    times = []
    for _ in range(repeats + 1):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def link_rates(elements: int = 4 * ELEMENTS) -> dict[str, float]:
    """Bytes a second between pinned host memory and the GPU: `h2d` and `d2h` alone, `both_ways` in each direction at once."""
    host = [torch.zeros(elements, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(elements, device="cuda") for _ in range(2)]
    lanes = [torch.cuda.Stream() for _ in range(2)]

    def copy(up: bool, down: bool) -> None:
        if up:
            with torch.cuda.stream(lanes[0]):
                device[0].copy_(host[0], non_blocking=True)
        if down:
            with torch.cuda.stream(lanes[1]):
                host[1].copy_(device[1], non_blocking=True)

    def rate(up: bool, down: bool) -> float:
        return 4 * elements / median_seconds(lambda: copy(up, down))

    return {"h2d": rate(True, False), "d2h": rate(False, True), "both_ways": rate(True, True)}


def host_copy_rate(elements: int = 2 * ELEMENTS) -> float:
    """Bytes a second that torch's threads copy within host memory (each is read once and written once)."""
    source, target = torch.zeros(elements), torch.zeros(elements)
    return 4 * elements / median_seconds(lambda: target.copy_(source))


def host_adam_rate(elements: int = ELEMENTS, update: Update = torch_adam, *, casts: bool = False) -> float:
    """Parameters a second that `update` takes on the host, with torch's threads.

    `casts`: with a bf16 gradient cast to fp32 before and the weight cast to bf16 after, which `cpu_step` leaves to the GPU.
    """
    weight, gradient, first, second = (torch.zeros(elements) for _ in range(4))
    low = torch.zeros(elements, dtype=torch.bfloat16)
    step = torch.ones(())

    def work() -> None:
        if casts:
            gradient.copy_(low)
        update([weight], [gradient], [first], [second], [step], _GROUP)
        if casts:
            low.copy_(weight)

    return elements / median_seconds(work, 3)


def measure(threads: int) -> dict[str, float]:
    """All of them, with `threads` threads on the host; the link's only where there is a GPU.

    Bytes a second, and for `host_adam` and `host_adam_with_casts` parameters a second.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        link = link_rates() if torch.cuda.is_available() else {}
        return {
            **link, "host_copy": host_copy_rate(), "host_adam": host_adam_rate(), "host_adam_with_casts": host_adam_rate(casts=True),
        }  # fmt: skip
    finally:
        torch.set_num_threads(before)
