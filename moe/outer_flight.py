"""One outer step on its way: what it stages, the sums and copies it needs, and whether all sites had them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .exchange import Exchange
from .outer_names import Named, Sharing

Groups = list[tuple[tuple[int, ...], list[str]]]
_WORDS = 8  # of 16 bits, exact in fp32: round (2), residency round (2), line (4)


class RoundFailed(RuntimeError):
    """An outer step that did not happen: a site was lost or did not agree. Nothing has changed; a later round may succeed."""


def host_copy(tensor: Tensor) -> Tensor:
    """An fp32 copy on the host."""
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()


@dataclass(kw_only=True)
class Flight:
    """Made by `prepare`, sent by `travel`, decided by `settle`; the outer step then applies it."""

    members: tuple[int, ...]
    current: tuple[int, ...]
    fragment: int | None
    token: str
    """Tells this step from one like it in another past; see `OuterStep.step`."""
    behind: bool
    """Whether this site is a member that is not up to date."""
    groups: Groups
    """What the step moves."""
    means: dict[str, Tensor]
    """How far the contributors moved on average; before travelling, how far this site did. Not for what it alone holds."""
    starts: dict[str, Tensor]
    """theta at begin, in a delayed step."""
    anchors: dict[str, Tensor] = field(default_factory=dict)
    """Anchors that came from a site that is ahead."""
    velocities: dict[str, Tensor] = field(default_factory=dict)
    origin: tuple[int, str] | None = None
    """Round and line that came with them."""
    settled: bool = False
    _send: Callable[[], None] | None = None
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    @staticmethod
    @torch.no_grad()
    def prepare(
        exchange: Exchange,
        members: tuple[int, ...],
        current: tuple[int, ...],
        fragment: int | None,
        token: str,
        *,
        groups: Groups,
        every_group: Groups,
        anchor: Mapping[str, Tensor],
        velocity: Mapping[str, Tensor],
        thetas: Mapping[str, Tensor],
        weights: Mapping[str, float] | None,
        origin: tuple[int, str, int],
        delayed: bool,
    ) -> "Flight":
        """Stage this site's part of a step; nothing is sent."""
        site = exchange.site
        starts: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        for group, names in groups:
            for name in names:
                if delayed:
                    starts[name] = host_copy(thetas[name])
                if len(group) > 1:
                    start = starts[name] if delayed else host_copy(thetas[name])
                    # A site that is behind has nothing to say: its way began at another anchor.
                    means[name] = anchor[name] - start if site in contributors(group, current) else torch.zeros_like(start)
        flight = Flight(
            members=members,
            current=current,
            fragment=fragment,
            token=token,
            behind=site not in current,
            groups=groups,
            means=means,
            starts=starts,
        )

        def send() -> None:
            if current != members:
                flight._pass_on(exchange, every_group, anchor, velocity, origin)
            for group, names in groups:
                if len(group) > 1:
                    flight._average(exchange, group, names, weights)

        flight._send = send
        return flight

    def travel(self) -> None:
        """Exchange with the other members; a failure is kept for `settle`."""
        assert self._send is not None
        try:
            self._send()
        except Exception as error:
            self._error = error
        self._send = None

    def start_travel(self) -> None:
        """The same in a thread."""
        self._thread = threading.Thread(target=self.travel, name="outer step", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the sending thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def settle(self, round: int, commit: Callable[[bool], bool] | None) -> None:
        """Wait, and ask `commit` once whether all sites had their tensors. Raises RoundFailed when not."""
        if self.settled:
            return
        self.wait()
        decide(self._error, f"round {round}", self.members, commit)
        self.settled = True

    def _pass_on(
        self,
        exchange: Exchange,
        groups: Groups,
        anchor: Mapping[str, Tensor],
        velocity: Mapping[str, Tensor],
        origin: tuple[int, str, int],
    ) -> None:
        """Bring anchor and momentum of everything shared to members that are behind."""
        late = tuple(site for site in self.members if site not in self.current)
        source = self.current[0]
        if exchange.site == source or exchange.site in late:
            words = _pack(*origin)
            exchange.copy(source, tuple(sorted((source, *late))), [words])
            if exchange.site in late:
                round, line, residency = _unpack(words)
                if residency != origin[2]:
                    raise ValueError(
                        f"site {exchange.site}: holds the experts of round {origin[2]}, the others of {residency}; start it anew"
                    )
                self.origin = round, line
        for group, names in groups:
            givers = contributors(group, self.current)
            takers = tuple(site for site in group if site not in givers)
            if not takers or exchange.site not in (givers[0], *takers):
                continue
            mine = exchange.site in takers
            anchors = {name: torch.empty_like(anchor[name]) if mine else anchor[name] for name in names}
            velocities = {name: torch.empty_like(velocity[name]) if mine else velocity[name] for name in names if velocity}
            exchange.copy(givers[0], tuple(sorted((givers[0], *takers))), [*anchors.values(), *velocities.values()])
            if mine:
                self.anchors.update(anchors)
                self.velocities.update(velocities)

    def _average(self, exchange: Exchange, group: tuple[int, ...], names: list[str], weights: Mapping[str, float] | None) -> None:
        """Turn this site's ways into the mean over the contributors."""
        ways = [self.means[name] for name in names]
        givers = contributors(group, self.current)
        totals = torch.full((len(names),), float(len(givers)))
        if weights is not None:
            totals = torch.tensor([weights[name] if exchange.site in givers else 0.0 for name in names], dtype=torch.float32)
            for way, weight in zip(ways, totals.tolist(), strict=True):
                way *= weight
            exchange.sum(group, [totals], exact=True)
        exchange.sum(group, ways)
        for way, total in zip(ways, totals.tolist(), strict=True):
            if total > 0:
                way /= total
            else:
                # Without weight nobody saw a token of it, so nobody has anything to say about it.
                way.zero_()

    def state_dict(self) -> dict[str, Any]:
        """A settled step as plain data. Raises ValueError when it is not settled."""
        if not self.settled:
            raise ValueError("outer step: one is in flight and not settled; settle() or finish() it before saving")
        return {
            "members": list(self.members),
            "current": list(self.current),
            "fragment": self.fragment,
            "token": self.token,
            "behind": self.behind,
            "origin": None if self.origin is None else list(self.origin),
            "means": copies(self.means),
            "starts": copies(self.starts),
            "anchors": copies(self.anchors),
            "velocities": copies(self.velocities),
        }

    @staticmethod
    def restore(state: Mapping[str, Any], sharing: Sharing, named: Mapping[str, Named], part_of: Mapping[str, int]) -> "Flight":
        """The step of a `state_dict`, settled."""
        members, fragment = tuple(state["members"]), state["fragment"]
        names = [name for name in named if fragment is None or part_of[name] == fragment]
        return Flight(
            members=members,
            current=tuple(state["current"]),
            fragment=fragment,
            token=str(state["token"]),
            behind=state["behind"],
            groups=sharing.groups(named, names, members),
            origin=None if state["origin"] is None else (int(state["origin"][0]), str(state["origin"][1])),
            settled=True,
            means=copies(state["means"]),
            starts=copies(state["starts"]),
            anchors=copies(state["anchors"]),
            velocities=copies(state["velocities"]),
        )


def decide(error: Exception | None, what: str, members: Sequence[int], commit: Callable[[bool], bool] | None) -> None:
    """Ask `commit` once whether all sites had their tensors. Raises RoundFailed when not; a ValueError of this site as it is."""
    agreed = commit(error is None) if commit is not None else error is None
    if isinstance(error, ValueError):
        raise error
    if error is not None:
        raise RoundFailed(f"{what}: the exchange failed ({' '.join(str(error).split())}); nothing has changed") from error
    if not agreed:
        raise RoundFailed(f"{what}: not all of sites {list(members)} had their tensors; nothing has changed")


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def contributors(group: tuple[int, ...], current: Sequence[int]) -> tuple[int, ...]:
    """Sites of `group` whose way counts: the current ones, or its first where none is."""
    return tuple(site for site in group if site in current) or group[:1]


def _pack(round: int, line: str, residency: int) -> Tensor:
    words = [round >> 16, round & 0xFFFF, residency >> 16, residency & 0xFFFF]
    words += [int(line[i : i + 4], 16) for i in range(0, 16, 4)] if line else [0] * 4
    assert len(words) == _WORDS
    return torch.tensor(words, dtype=torch.float32)


def _unpack(words: Tensor) -> tuple[int, str, int]:
    high, low, over, under, *line = (int(word) for word in words.tolist())
    text = "".join(f"{word:04x}" for word in line) if any(line) else ""
    return (high << 16) + low, text, (over << 16) + under
