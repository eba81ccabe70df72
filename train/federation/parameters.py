"""A site's weights as named parameters of its tensor- and pipeline-parallel coordinates: what an outer step exchanges.

Sites share TP and PP; where fp32 weights lie inside a site (data-parallel shards, expert-parallel ranks, host memory) differs from site
to site and must not matter. So a parameter has a *name*, the checkpoint's (an expert by layer and global number, a router's rows one by
one), and a *home*, the coordinate that sends it, which follows from the name alone:

    a slice of a dense parameter      the coordinate of its tensor-parallel rank
    what all slices have in common    tensor-parallel rank 0 of its stage        (norms, routers)
    the experts of block l            tensor-parallel rank l mod TP of its stage (an expert is never sliced)
    a tied head on the last stage     the embedding's, on the first

The first data-parallel rank of a coordinate is its sender. `pull` brings the fp32 weights to the senders' host memory, `push` takes them
from there into masters and weights of every rank; both are collective in the site.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.outer_names import Named
from train.engine.masters import Master
from train.engine.parallel import Ranks

_ROUTER = ".router.weight"
_MESSAGE = 2**24  # elements in a message; gloo counts bytes in 32 bits in places


@dataclass(frozen=True)
class _Unit:
    """A named parameter as one rank sees it, or the part of it that the rank holds."""

    parameter: str
    """Name of the model's parameter that it is a part of."""
    expert: int | None
    """Expert of a stack, or row of a router."""
    tp_rank: int
    """Tensor-parallel rank of its home."""
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    at: int
    """Where its elements begin in what the rank's master reads."""
    rank: int = 0
    pp_rank: int = 0

    @property
    def name(self) -> str:
        if self.expert is None:
            return self.parameter
        if self.kind == "router_row":
            return f"{self.parameter}.{self.expert}"
        path, _, last = self.parameter.rpartition(".")
        return f"{path}.{self.expert}.{last}"

    @property
    def layer(self) -> int | None:
        """0-based number of the block that it belongs to."""
        words = self.parameter.split(".")
        return int(words[words.index("layers") + 1]) if "layers" in words else None


@dataclass(frozen=True)
class _Transfer:
    """Elements `start` to `end` of a unit between its sender and a rank, whose master has them from `at` on."""

    key: tuple[str, int]
    sender: int
    rank: int
    start: int
    end: int
    at: int


class SiteParameters:
    """The parameters of a site, seen from one rank. Everything but `named` is the same on a sender and on any other rank."""

    def __init__(self, held: Sequence[Master], publish: Callable[[], None], ranks: Ranks, *, experts_at_all: bool = False) -> None:
        """Agree with the other ranks of the site on who holds and who sends what (collective).

        `publish` brings the model's weights up to date after masters were written. `experts_at_all`: every site has every expert, so
        experts travel like dense parameters (mode frozen, where weights of 0 keep out those who do not train them).
        """
        self._publish = publish
        self._held = {master.name: master for master in held}
        tp_rank, pp_rank = ranks.groups.tp.rank(), ranks.groups.pp.rank()
        mine = [unit for master in held for unit in _units(master, tp_rank, ranks.groups.tp.size(), ranks.rank, pp_rank)]
        self.coordinate = (tp_rank, pp_rank)
        """Tensor- and pipeline-parallel rank."""
        gathered: list[Any] = [None] * ranks.world
        dist.all_gather_object(gathered, (self.coordinate, ranks.dp_rank == 0, mine))
        self.senders = {coordinate: rank for rank, (coordinate, sends, _) in enumerate(gathered) if sends}
        """Rank of the sender of each coordinate."""
        self.is_sender = self.senders[self.coordinate] == ranks.rank
        self._rank = ranks.rank
        everything = [unit for _, _, units in gathered for unit in units]
        self._pulls, self._pushes = _transfers(everything, self.senders)
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._part_of: dict[tuple[str, int], int] = {}
        self.named: dict[str, Named] = {}
        """On a sender: the coordinate's parameters in host memory; `pull` fills them, `push` takes them. Empty on other ranks."""
        self.experts: dict[str, tuple[int, int]] = {}
        """Block and expert of those of them that are part of an expert."""
        for key, unit in sorted(_homes(everything).items()):
            if self.senders[(unit.tp_rank, unit.pp_rank)] != ranks.rank:
                continue
            tensor = self._tensors[key] = torch.empty(unit.shape)
            if unit.kind == "expert":
                self.experts[unit.name] = (_number(unit.layer), _number(unit.expert))
            if unit.kind == "dense" or (unit.kind == "expert" and experts_at_all):
                self.named[unit.name] = Named(tensor, "dense", unit.layer)
            else:
                kind: Any = unit.kind
                self.named[unit.name] = Named(tensor, kind, unit.layer, unit.expert)

    def divide(self, parts: Mapping[str, int]) -> None:
        """Take each sender's partition of its names into fragments, so that `pull` and `push` can move one of them (collective)."""
        mine = {key: parts[key[0]] for key in self._tensors}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        self._part_of = {key: part for found in gathered for key, part in found.items()}

    def _of(self, plan: "_Plan", fragment: int | None) -> "Iterator[tuple[str, list[_Transfer]]]":
        for parameter, transfers in plan.items():
            chosen = transfers if fragment is None else [each for each in transfers if self._part_of[each.key] == fragment]
            if chosen:
                yield parameter, chosen

    @torch.no_grad()
    def pull(self, fragment: int | None = None) -> None:
        """Bring the fp32 weights of the site's ranks to the senders, all or those of a fragment (collective)."""
        for parameter, transfers in self._of(self._pulls, fragment):
            needed = any(transfer.rank == self._rank for transfer in transfers)
            flat = self._held[parameter].read().float().cpu() if needed else torch.empty(0)
            works = []
            for tag, transfer in enumerate(transfers):
                if self._rank == transfer.rank == transfer.sender:
                    self._part(transfer).copy_(flat[transfer.at : transfer.at + transfer.end - transfer.start])
                elif self._rank == transfer.rank:
                    part = flat[transfer.at : transfer.at + transfer.end - transfer.start]
                    works.append(dist.isend(part, transfer.sender, tag=tag))
                elif self._rank == transfer.sender:
                    works.append(dist.irecv(self._part(transfer), transfer.rank, tag=tag))
            _wait(works)

    @torch.no_grad()
    def push(self, fragment: int | None = None) -> None:
        """Take the senders' values, all or those of a fragment, into masters and weights of every rank of the site (collective)."""
        for parameter, transfers in self._of(self._pushes, fragment):
            # What a rank holds of a parameter has one home, and so is in one fragment.
            concerned = any(transfer.rank == self._rank for transfer in transfers)
            master = self._held[parameter] if concerned else None
            flat = torch.empty(0 if master is None else master.end - master.start)
            works = []
            for tag, transfer in enumerate(transfers):
                if self._rank == transfer.rank == transfer.sender:
                    flat[transfer.at : transfer.at + transfer.end - transfer.start] = self._part(transfer)
                elif self._rank == transfer.sender:
                    works.append(dist.isend(self._part(transfer), transfer.rank, tag=tag))
                elif self._rank == transfer.rank:
                    part = flat[transfer.at : transfer.at + transfer.end - transfer.start]
                    works.append(dist.irecv(part, transfer.sender, tag=tag))
            _wait(works)
            if master is not None:
                master.write(flat)
        self._publish()

    def _part(self, transfer: _Transfer) -> Tensor:
        return self._tensors[transfer.key].view(-1)[transfer.start : transfer.end]


def _number(value: int | None) -> int:
    assert value is not None
    return value


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _units(master: Master, tp_rank: int, tp: int, rank: int, pp_rank: int) -> Iterator[_Unit]:
    """The named parameters that a rank's part of a model parameter belongs to."""
    shape = tuple(master.weight.shape)
    if master.experts is not None:
        rows, kind = master.experts, "expert"
    elif master.name.endswith(_ROUTER):
        rows, kind = tuple(range(shape[0])), "router_row"
    else:
        home = tp_rank if master.sliced else 0
        yield _Unit(master.name, None, home, "dense", shape, master.start, master.end, 0, rank, pp_rank)
        return
    size = master.weight[0].numel()
    for place, row in enumerate(rows):
        start, end = max(master.start, place * size), min(master.end, (place + 1) * size)
        if start < end:
            begin = start - place * size
            unit = _Unit(master.name, row, 0, kind, shape[1:], begin, begin + end - start, start - master.start, rank, pp_rank)
            yield replace(unit, tp_rank=_number(unit.layer) % tp) if kind == "expert" else unit


def _homes(units: Sequence[_Unit]) -> dict[tuple[str, int], _Unit]:
    """A unit of each named parameter, on its home's stage: by name and tensor-parallel rank of the home."""
    homes: dict[tuple[str, int], _Unit] = {}
    for unit in units:
        key = (unit.name, unit.tp_rank)
        if key not in homes or unit.pp_rank < homes[key].pp_rank:
            homes[key] = unit
    return homes


_Plan = dict[str, list[_Transfer]]


def _transfers(units: Sequence[_Unit], senders: dict[tuple[int, int], int]) -> tuple[_Plan, _Plan]:
    """What moves in a pull, each element once, and in a push, to everybody who holds it: by parameter, in one order on all ranks."""
    holders: dict[tuple[str, int], list[_Unit]] = {}
    for unit in units:
        holders.setdefault((unit.name, unit.tp_rank), []).append(unit)
    pulls: _Plan = {}
    pushes: _Plan = {}
    for key, home in sorted(_homes(units).items(), key=lambda item: (item[1].parameter, item[0])):
        sender = senders[(home.tp_rank, home.pp_rank)]
        pull, push = pulls.setdefault(home.parameter, []), pushes.setdefault(home.parameter, [])
        missing = [(0, torch.Size(home.shape).numel())]
        # What the sender has itself need not travel.
        for unit in sorted(holders[key], key=lambda unit: (unit.rank != sender, unit.pp_rank, unit.rank)):
            push.extend(_messages(key, sender, unit, unit.start, unit.end))
            for low, high in missing:
                pull.extend(_messages(key, sender, unit, max(low, unit.start), min(high, unit.end)))
            cut = [part for low, high in missing for part in ((low, min(high, unit.start)), (max(low, unit.end), high))]
            missing = [(low, high) for low, high in cut if low < high]
        assert not missing, f"{home.name}: no rank of the site holds its elements {missing}"
    return pulls, pushes


def _messages(key: tuple[str, int], sender: int, unit: _Unit, start: int, end: int) -> Iterator[_Transfer]:
    for low in range(start, end, _MESSAGE):
        yield _Transfer(key, sender, unit.rank, low, min(low + _MESSAGE, end), unit.at + low - unit.start)
