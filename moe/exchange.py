"""How sites add up tensors: the `Exchange` protocol, over gloo and between threads of one process.

A sum is taken in site order: each site owns a part of the tensors, gets that part from the others, adds the parts up in the order
of the site numbers, and hands the sum back. The result does not depend on how tensors are put into buckets, and all sites end
with the same bits. A site sends 2 (n - 1)/n of the bytes of what n sites sum, which is the least possible. No more than a bucket
is staged: packing, encoding and the copies of the other sites take a few times its size, whatever the size of the model.

Values may travel in bf16 or int8 (`moe/transfer.py`); additions are in fp32 in every case.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .store import Clients, listen
from .transfer import CHUNK, TRANSFERS, buckets, chunks, decode, encode, unpack

if TYPE_CHECKING:
    from .membership import Meeting

_BUCKET = 2**22  # elements in flight at once: a small bucket lets a lost peer be noticed early, a large one pays for fewer round trips

_PIECE = 2**20
"""Bytes of a message: a peer on a slow link must finish one within the limit, not a whole part of a bucket."""

_NOT_CONNECTED = "not connected; call use() with the meeting first"


class Exchange(Protocol):
    """Sums and copies between the sites of a federation, seen from one of them."""

    site: int
    """This site's number."""
    bytes_sent: int
    """Bytes this site put on the wire."""
    bytes_received: int
    """Bytes that came from the wire."""
    payload_bytes: int
    """Bytes handed over and got back as they are encoded, int8's scales included: 2 b P for a sum, b P for a copy; what `comm_bytes`
    calls payload."""

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """Replace each tensor by its sum over the sites of `group`, in place, added in site order.

        `group` is ascending and holds this site; all its sites call with tensors of the same shapes in the same order. fp32, on
        the host. `exact`: travel in fp32 whatever the transfer type (counts and weights).
        """
        ...

    def copy(self, source: int, group: tuple[int, ...], tensors: list[Tensor]) -> None:
        """Overwrite the tensors of the other sites of `group` by those of `source`, bit for bit; terms as for `sum`."""
        ...


class _Counted:
    """Site number and byte counters."""

    def __init__(self, site: int) -> None:
        self.site = site
        self.bytes_sent = 0
        self.bytes_received = 0
        self.payload_bytes = 0


class PairwiseExchange(_Counted):
    """An exchange by messages between pairs of sites; a subclass says how a message travels."""

    def __init__(self, site: int, transfer: str, bucket: int) -> None:
        if transfer not in TRANSFERS:
            raise ValueError(f"transfer={transfer}: must be fp32, bf16 or int8; choose one")
        if bucket < 1:
            raise ValueError(f"bucket={bucket}: a bucket holds at least one element; give 1 or more")
        super().__init__(site)
        self.transfer = transfer
        self._bucket = bucket

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """See `Exchange.sum`."""
        _check(self.site, group, tensors)
        if len(group) == 1:
            return
        transfer = "fp32" if exact else self.transfer
        with _contiguous(tensors) as dense:
            for views in buckets(dense, self._bucket, CHUNK if transfer == "int8" else 1):
                self._sum_bucket(group, views, transfer)

    def copy(self, source: int, group: tuple[int, ...], tensors: list[Tensor]) -> None:
        """See `Exchange.copy`."""
        _check(self.site, group, tensors)
        _check_source(source, group)
        if len(group) == 1:
            return
        with _contiguous(tensors) as dense:
            for views in buckets(dense, self._bucket, 1):
                flat = torch.cat(views)
                raw = flat.view(torch.uint8)
                self.payload_bytes += raw.numel()
                if self.site == source:
                    self._swap([(site, raw) for site in group if site != source], [])
                else:
                    self._swap([], [(source, raw)])
                    unpack(flat, views)

    def _sum_bucket(self, group: tuple[int, ...], views: list[Tensor], transfer: str) -> None:
        mine = group.index(self.site)
        flat = torch.cat(views)
        runs = chunks(views, len(group), transfer)
        parts = flat.split([sum(lengths) for lengths in runs])
        out = [encode(part, lengths, transfer) for part, lengths in zip(parts, runs, strict=True)]
        self.payload_bytes += 2 * sum(raw.numel() for raw in out)
        arrived = [torch.empty_like(out[mine]) for _ in group]
        # Its own part is rounded like those that travel: else the sum would depend on who owns the part, and so on the buckets.
        arrived[mine] = out[mine]
        self._swap(list(zip(group, out, strict=True)), list(zip(group, arrived, strict=True)))
        total = decode(arrived[0], runs[mine], transfer)
        for raw in arrived[1:]:
            total += decode(raw, runs[mine], transfer)
        out[mine] = encode(total, runs[mine], transfer)
        self._swap([(site, out[mine]) for site in group], list(zip(group, out, strict=True)))
        for part, raw, lengths in zip(parts, out, runs, strict=True):
            part.copy_(decode(raw, lengths, transfer))
        unpack(flat, views)

    def _swap(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Send bytes to sites and fill buffers from sites, all at once; nothing goes to this site, and empty parts do not travel."""
        # gloo sends no tensor before the other side has announced where it goes. With a tensor under way that word would come after
        # it, and a link of two directions would carry one at a time: so the receives come first.
        work = [self._receive(site, piece) for site, piece in self._pieces(incoming)]
        self.bytes_received += self._bytes(incoming)
        work += [self._send(site, piece) for site, piece in self._pieces(outgoing)]
        self.bytes_sent += self._bytes(outgoing)
        for item in work:
            self._wait(item)

    def _bytes(self, parts: Sequence[tuple[int, Tensor]]) -> int:
        return sum(raw.numel() for site, raw in parts if site != self.site)

    def _pieces(self, parts: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Messages of at most `_PIECE` bytes: the first of every other site, then the second ones, and so on."""
        rows = [[(site, piece) for piece in raw.split(_PIECE)] for site, raw in parts if site != self.site and raw.numel()]
        return (message for row in zip_longest(*rows) for message in row if message is not None)

    def _send(self, site: int, raw: Tensor) -> Any:
        raise NotImplementedError

    def _receive(self, site: int, raw: Tensor) -> Any:
        raise NotImplementedError

    def _wait(self, work: Any) -> None:
        work.wait()


class GlooExchange(PairwiseExchange):
    """Sites as ranks of a gloo process group of a fixed world; site number = rank in it.

    For a federation that loses and regains sites see `MeetingExchange`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, transfer: str = "fp32", bucket: int = _BUCKET) -> None:
        super().__init__(dist.get_rank(group), transfer, bucket)
        self._group = group

    def _send(self, site: int, raw: Tensor) -> Any:
        return dist.isend(raw, group=self._group, group_dst=site)

    def _receive(self, site: int, raw: Tensor) -> Any:
        return dist.irecv(raw, group=self._group, group_src=site)


class MeetingExchange(PairwiseExchange):
    """Sites of a `Meeting` over torchft's reconfigurable gloo process group, one for each coordinate of a site.

    A coordinate is a tensor- and pipeline-parallel one: `coordinate` (any text) keeps the groups of different ones apart. Every
    member calls `use(meeting)` before the round's first sum; connections are kept from meeting to meeting while the same sites come
    and no round fails. When a peer is lost, sums and copies raise RuntimeError at once or after `limit` seconds without a message
    from it. Traffic is in the clear.
    """

    def __init__(
        self,
        site: int,
        coordinate: str = "0",
        *,
        transfer: str = "fp32",
        bucket: int = _BUCKET,
        limit: float = 10.0,
        address: str = "127.0.0.1",
    ) -> None:
        """`address` is this host's address that connections are bound to; `Membership.address` is the one that reaches the endpoint."""
        super().__init__(site, transfer, bucket)
        if limit <= 0:
            raise ValueError(f"limit={limit}: seconds a peer may keep silent; give more than 0")
        self._coordinate = coordinate
        self._limit = timedelta(seconds=limit)
        self._address = address
        listen(address)  # the process's first contact may take seconds (`moe/store.py`): now, while nobody waits for it
        self._clients = Clients()
        self._ranks: Mapping[int, int] = {}
        self._pg: Any = None
        self._name = ""
        self._problem = _NOT_CONNECTED

    def use(self, meeting: "Meeting") -> None:
        """Be connected with the members of `meeting`.

        A member that cannot be reached within the limit is no error here, so that the step which then fails is the one place where a
        round ends: the next sum or copy raises RuntimeError. Raises ValueError when this site is no member.
        """
        if self.site not in meeting.members:
            raise ValueError(f"site={self.site}: is no member of the meeting of {list(meeting.members)}; call with its own meeting")
        if self._name == meeting.group:
            return
        self.close()
        self._ranks = {site: rank for rank, site in enumerate(meeting.members)}
        self._name = meeting.group
        if len(meeting.members) == 1:
            return
        from .gloo import BoundGloo

        pg = BoundGloo(self._address, self._limit)
        try:
            store = dist.PrefixStore(f"{meeting.group}/{self._coordinate}", self._clients.get(meeting.store))
            pg.join(store, self._ranks[self.site], len(meeting.members))
        except (RuntimeError, OSError) as error:
            self._clients.drop(meeting.store)
            self._problem = f"sites {list(meeting.members)} did not connect: {error}"
        else:
            self._pg = pg

    def close(self) -> None:
        """Drop the connections; peers that wait for this site then fail at once."""
        pg, self._pg, self._name, self._problem = self._pg, None, "", _NOT_CONNECTED
        if pg is not None:
            pg.abort(errored=False)

    def _swap(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        if self._pg is None:
            raise RuntimeError(f"exchange: {self._problem}")
        try:
            super()._swap(outgoing, incoming)
        except Exception:
            # Messages of the failed call may still be under way: the connections cannot be used again.
            self.close()
            raise

    def _send(self, site: int, raw: Tensor) -> Any:
        return self._pg.send([raw], self._ranks[site], 0)

    def _receive(self, site: int, raw: Tensor) -> Any:
        return self._pg.recv([raw], self._ranks[site], 0)

    def _wait(self, work: Any) -> None:
        work.wait(self._limit)


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

    def meet(self, group: tuple[int, ...], site: int, tensors: list[Tensor], source: int | None = None) -> list[Tensor]:
        """Wait for all of `group`; returns the sums, or `source`'s tensors. Raises threading.BrokenBarrierError when one does not come."""
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
            self._parts.setdefault(group, {})[site] = tensors
        barrier.wait(self.timeout)
        parts = self._parts[group]
        givers = group if source is None else (source,)
        results = [_ordered_sum(copies) for copies in zip(*(parts[member] for member in givers), strict=True)]
        # Nobody may write its tensors before everybody has read them.
        barrier.wait(self.timeout)
        return results


class ThreadExchange(_Counted):
    """A site as a thread of this process, for benchmarks and tests; see `Hub`. Nothing is rounded, and no byte is on a wire."""

    def __init__(self, hub: Hub, site: int) -> None:
        super().__init__(site)
        self._hub = hub

    def sum(self, group: tuple[int, ...], tensors: list[Tensor], *, exact: bool = False) -> None:
        """See `Exchange.sum`."""
        self._meet(group, tensors, None)

    def copy(self, source: int, group: tuple[int, ...], tensors: list[Tensor]) -> None:
        """See `Exchange.copy`."""
        _check_source(source, group)
        self._meet(group, tensors, source)

    def _meet(self, group: tuple[int, ...], tensors: list[Tensor], source: int | None) -> None:
        _check(self.site, group, tensors)
        if len(group) == 1 or not tensors:
            return
        self.payload_bytes += (2 if source is None else 1) * 4 * sum(tensor.numel() for tensor in tensors)
        for tensor, result in zip(tensors, self._hub.meet(group, self.site, tensors, source), strict=True):
            tensor.copy_(result)


def _ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in fp32 in the order given; a reduction over a stacked dim would leave the order to torch."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


@contextmanager
def _contiguous(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` with contiguous copies for those that are not, which are written back."""
    dense = [tensor.contiguous() for tensor in tensors]
    yield dense
    for tensor, copy in zip(tensors, dense, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def _check(site: int, group: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
    if site not in group or list(group) != sorted(set(group)):
        raise ValueError(f"group={group}: must be ascending site numbers with this site, {site}, among them; correct the group")
    for tensor in tensors:
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"tensor of {tensor.dtype} on {tensor.device}: sites exchange fp32 on the host; convert it first")


def _check_source(source: int, group: tuple[int, ...]) -> None:
    if source not in group:
        raise ValueError(f"source={source}: must be one of the group {group}; correct it")
