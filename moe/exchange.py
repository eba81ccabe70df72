"""How sites add up tensors: the `Exchange` protocol, over gloo and between threads of one process.

A sum is taken in site order: each site owns a part of the tensors, gets that part from the others, adds the parts up in the order
of the site numbers, and hands the sum back. The result does not depend on how tensors are put into buckets, and all sites end
with the same bits. A site sends 2 (n - 1)/n of the bytes of what n sites sum, which is the least possible.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 16 * 2**20  # elements in flight at once


class Exchange(Protocol):
    """Sums between the sites of a federation, seen from one of them."""

    site: int
    """This site's number."""

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """Replace each tensor by its sum over the sites of `group`, in place, added in site order.

        `group` is ascending and holds this site; all its sites call with tensors of the same shapes in the same order. fp32, on
        the host. `exact`: travel in fp32 whatever the transfer type (counts and weights).
        """
        ...


class GlooExchange:
    """Sites as ranks of a gloo process group; site number = rank in it. `bytes_sent` counts what this site put on the wire.

    `transfer` is the type on the wire: `fp32`, or `bf16`, which halves the bytes and rounds every site's part and the sum (the
    addition itself is in fp32). Sites of one group always agree on the result to the bit.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, transfer: str = "fp32", bucket: int = _BUCKET) -> None:
        if transfer not in ("fp32", "bf16"):
            raise ValueError(f"transfer={transfer}: must be fp32 or bf16; choose one")
        if bucket < 1:
            raise ValueError(f"bucket={bucket}: a bucket holds at least one element; give 1 or more")
        self.site = dist.get_rank(group)
        self.bytes_sent = 0
        self._group = group
        self._dtype = torch.float32 if transfer == "fp32" else torch.bfloat16
        self._bucket = bucket

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """See `Exchange.sum`."""
        _check(self.site, group, tensors)
        if len(group) == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for bucket in flat.split(self._bucket):
            self._sum_bucket(group, bucket, torch.float32 if exact else self._dtype)
        _scatter(flat, tensors)

    def _sum_bucket(self, group: tuple[int, ...], bucket: Tensor, dtype: torch.dtype) -> None:
        mine = group.index(self.site)
        parts = [part.to(dtype) for part in bucket.tensor_split(len(group))]
        arrived = [torch.empty_like(parts[mine]) for _ in group]
        arrived[mine] = parts[mine]
        self._swap(group, send=parts, receive=arrived)
        # Rounded like the copies that travel, so that the owner of a part does not see another sum than the rest.
        parts[mine] = _ordered_sum(arrived).to(dtype)
        self._swap(group, send=[parts[mine]] * len(group), receive=parts)
        bucket.copy_(torch.cat(parts))

    def _swap(self, group: tuple[int, ...], send: Sequence[Tensor], receive: Sequence[Tensor]) -> None:
        """Send `send[i]` to site group[i] and fill `receive[i]` from it; empty parts do not travel."""
        work = []
        for site, outgoing, incoming in zip(group, send, receive, strict=True):
            if site == self.site:
                continue
            if outgoing.numel():
                work.append(dist.isend(outgoing, group=self._group, group_dst=site))
                self.bytes_sent += outgoing.numel() * outgoing.element_size()
            if incoming.numel():
                work.append(dist.irecv(incoming, group=self._group, group_src=site))
        for item in work:
            if item is not None:
                item.wait()


class Hub:
    """Where the sites of one process meet: `hub.exchange(site)` for the thread of each site."""

    def __init__(self, sites: int, timeout: float = 60.0) -> None:
        if sites < 1:
            raise ValueError(f"sites={sites}: somebody must train; give 1 or more")
        self.sites = sites
        self.timeout = timeout
        self._lock = threading.Lock()
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._parts: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}

    def exchange(self, site: int) -> "ThreadExchange":
        """The exchange of `site`."""
        if not 0 <= site < self.sites:
            raise ValueError(f"site={site}: the hub has {self.sites}; give a number from 0 to {self.sites - 1}")
        return ThreadExchange(self, site)

    def meet(self, group: tuple[int, ...], site: int, tensors: list[Tensor]) -> list[Tensor]:
        """Wait for all of `group`; returns the sums. Raises threading.BrokenBarrierError when one does not come in time."""
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
            self._parts.setdefault(group, {})[site] = tensors
        barrier.wait(self.timeout)
        parts = self._parts[group]
        sums = [_ordered_sum(copies) for copies in zip(*(parts[member] for member in group), strict=True)]
        # Nobody may write its tensors before everybody has read them.
        barrier.wait(self.timeout)
        return sums


class ThreadExchange:
    """A site as a thread of this process, for benchmarks and tests; see `Hub`."""

    def __init__(self, hub: Hub, site: int) -> None:
        self.site = site
        self._hub = hub

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """See `Exchange.sum`; nothing is rounded on the way here."""
        _check(self.site, group, tensors)
        if len(group) == 1 or not tensors:
            return
        for tensor, total in zip(tensors, self._hub.meet(group, self.site, tensors), strict=True):
            tensor.copy_(total)


def _ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in fp32 in the order given; a reduction over a stacked dim would leave the order to torch."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


def _scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _check(site: int, group: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    if site not in group or list(group) != sorted(set(group)):
        raise ValueError(f"group={group}: must be ascending site numbers with this site, {site}, among them; correct the group")
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"tensor of {tensor.dtype} on {tensor.device}: sites exchange fp32 on the host; convert it first")
