"""Who takes part in an outer step: meetings of sites, called by torchft's lighthouse, and a vote on each step's outcome.

    membership = Membership("127.0.0.1:29510", site=0, sites=4, quorum=3, deadline=60, run_id="demo")
    meeting = membership.meet(step.round, {"line": step.line})          # on rank 0 of a site; the rest get meeting.to_dict()
    exchange.use(meeting)
    step.step(meeting.members, current=meeting.current, exchange=exchange, commit=lambda ok: membership.vote(meeting, ok))

A meeting waits `deadline` seconds for sites that are alive and not there, and then goes on without them if `quorum` sites have
come. A late site is admitted at a later meeting and gets the weights of the others. A site whose heartbeats stop (it died, was
stopped, or left) is not waited for. The lighthouse may restart at any time; a meeting is then only delayed.

What torchft's rule forbids: its lighthouse never calls a meeting of half or fewer of the sites it hears from, so two late sites of
four, or one of two, would block the rest for ever. Past the deadline a waiting site therefore asks the late ones (through the
stores of the last meeting) to stop their heartbeats until they come, which makes the waiting ones all that are alive. This needs a
`quorum` that allows so few (under any other nobody is asked), a lighthouse started with one, and late sites that can be reached.
With a quorum of half the sites or fewer, parts of a federation can go on apart; when they meet again, `Meeting.current` names one
part, and the others take over its weights and lose what they did meanwhile.

Everything is in the clear, and whoever reaches the lighthouse can push a site out: a private network or a tunnel is needed.
"""

import atexit
import json
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from .lighthouse import SILENCE, join_address, quiet_torchft, split_address

_BEAT = 0.5
_SLACK = 2.0  # what a call may take beyond the time it waits for
_CONTACT = 15.0
_HUSH = "hush"
_LATEST = 1e12


class NoMeeting(TimeoutError):
    """Too few sites came in time."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Sites that take one outer step together. The same at all of them."""

    members: tuple[int, ...]
    """Site numbers, ascending."""
    number: int
    """The round that it ends: the most outer steps that a member has done."""
    prefix: str
    """A name that no other meeting has."""
    group: str
    """Name of the connections between the members: that of an earlier meeting while the same sites come and no round fails."""
    store: str
    """`host:port` of the store of the first member."""
    steps: Mapping[int, int]
    """Outer steps done, by member."""
    data: Mapping[int, Mapping[str, Any]]
    """What each member told the others."""

    @property
    def current(self) -> tuple[int, ...]:
        """Members that are up to date: with the most outer steps, and with the `line` (see `OuterStep`) of the first such one."""
        newest = [site for site in self.members if self.steps[site] == self.number]
        line = self.data[newest[0]].get("line")
        return tuple(site for site in newest if self.data[site].get("line") == line)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that survives JSON."""
        fields = asdict(self)
        return {**fields, "members": list(self.members), **{key: {str(s): v for s, v in fields[key].items()} for key in ("steps", "data")}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Meeting":
        """The meeting of `to_dict`."""
        by_site = {key: {int(site): value for site, value in data[key].items()} for key in ("steps", "data")}
        return Meeting(**{**data, "members": tuple(data["members"]), **by_site})


class Membership:
    """One site's part in a federation; for rank 0 of the site. `close` it in the end."""

    def __init__(
        self,
        endpoint: str,
        site: int,
        sites: int,
        *,
        quorum: int | None,
        deadline: float,
        run_id: str,
        start: float = 600.0,
        address: str | None = None,
    ) -> None:
        """Heartbeats begin at once; nothing waits here.

        `endpoint` is the lighthouse's `host:port`. `quorum` is the fewest sites that a meeting may have; None: all `sites`, in
        every meeting. `start` bounds the wait for the first meeting, when others may still be building their models, `deadline` that
        for each later one. `address` is this host's address that others reach; by default the one from which the endpoint is
        reached, so loopback for a lighthouse there. Raises ValueError on arguments without sense.
        """
        from . import store

        if not 0 <= site < sites:
            raise ValueError(f"site={site}: sites are numbered from 0 to {sites - 1}; choose one")
        if quorum is not None and not 1 <= quorum <= sites:
            raise ValueError(f"quorum={quorum}: there are {sites} sites; give 1 to {sites}, or none for all")
        if deadline <= 0 or start <= 0:
            raise ValueError(f"deadline={deadline}, start={start}: seconds to wait; give more than 0")
        self.site, self.sites, self.run_id = site, sites, run_id
        self.needed = sites if quorum is None else quorum
        self.deadline = deadline
        self._start = start
        host, port = split_address(endpoint)
        self._endpoint = f"http://{join_address(host, port)}"
        self.address = address or store.address_towards(host, port)
        self._store: Any
        self._store, self._store_address = store.listen(self.address)
        self._clients = store.Clients()
        self._name, self._attempt = uuid.uuid4().hex[:12], 0
        self._group: dict[str, Any] | None = None
        self._stores: dict[int, str] = {}
        self._hosted: Meeting | None = None
        self._client: Any = None
        self._met = False
        self._lock = threading.Lock()
        """Around what `meet` and the heartbeats both decide: the name this site has, and whether it is silent."""
        self._gave_up: float | None = None
        self._silent = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()
        # A heartbeat must not be under way when the interpreter ends: the process would end with a signal.
        atexit.register(self.leave)

    def meet(self, step: int, data: Mapping[str, Any], *, timeout: float | None = None) -> Meeting:
        """Wait for the others and return the meeting; `step` is the number of outer steps done, `data` is JSON for the others.

        Raises NoMeeting when fewer sites than the quorum came within `timeout` seconds (by default 9 more than `start` for the first
        meeting, and than `deadline` after that), and ValueError when the lighthouse serves another run (which a site that has met its
        own ignores), when another process joined as this site, and when what another said makes no sense. A site that was late is
        admitted at the others' next meeting, so it should wait about a round for it.
        """
        limit = timeout
        if limit is None:
            # Those who are there at the deadline still need the silence of the late ones, or of the dead.
            limit = (self.deadline if self._met else self._start) + SILENCE + 2 * _SLACK
        end = time.monotonic() + limit
        told = {
            "run": self.run_id,
            "site": self.site,
            "sites": self.sites,
            "name": self._name,
            "time": time.time(),
            "group": self._group,
            "data": dict(data),
        }
        with self._lock:
            self._gave_up, replica = None, self._replica()
            self._store.delete_key(_HUSH)
            self._silent.clear()
        problem = "it was not reached"
        while (left := end - time.monotonic()) > 0:
            try:
                quorum = self._ask(replica, step, told, min(left, self.deadline + _SLACK))
            except TimeoutError:
                problem = "too few came"
                if 2 * self.needed <= self.sites:  # else torchft's majority rule stops nobody, and the late ones must count as alive
                    self._hush_others()
                continue
            except (RuntimeError, ConnectionError) as error:  # the lighthouse is away, or not up yet
                problem = str(error)
                self._client = None
                time.sleep(0.2)
                continue
            meeting = self._read(quorum)
            if self.site in meeting.members and len(meeting.members) >= self.needed:
                self._met = True
                return meeting
            problem = f"only {list(meeting.members)} came"
            time.sleep(0.2)
        with self._lock:
            self._gave_up = time.monotonic()
        raise NoMeeting(f"federation: no meeting of {self.needed} of {self.sites} sites within {limit:g} s at {self._endpoint}: {problem}")

    def vote(self, meeting: Meeting, ok: bool, *, timeout: float | None = None) -> bool:
        """Whether all members of `meeting` voted ok; the answer is the same at all that reach the meeting's store.

        Waits at most `timeout` seconds, by default the deadline; a member that has not voted by then makes it False, and so does
        a store that cannot be reached. A site that got False though others got True is behind at the next meeting.
        """
        limit = self.deadline if timeout is None else timeout
        agreed = ok
        if len(meeting.members) > 1:
            from .store import within

            # The first contact with a store may take seconds (see `moe/store.py`).
            answer = within(limit + _CONTACT, lambda: self._decide(meeting, ok, limit))
            if answer is None:
                self._clients.drop(meeting.store)
            agreed = bool(answer)
        self._group = {"name": meeting.group, "members": list(meeting.members)} if agreed else None
        self._hosted = meeting if meeting.members[0] == self.site and len(meeting.members) > 1 else None
        return agreed

    def leave(self) -> None:
        """Take no more part: no heartbeats, so that the others do not wait for this site."""
        self._ended.set()
        self._thread.join(2 * _SLACK)

    def close(self) -> None:
        """Leave, and close the store once the others have read the outcome of the last vote held in it."""
        self.leave()
        atexit.unregister(self.leave)
        if self._hosted is not None:
            seen = [f"{self._hosted.prefix}/seen/{site}" for site in self._hosted.members if site != self.site]
            end = time.monotonic() + min(self.deadline, 10.0)
            while time.monotonic() < end and not self._store.check(seen):
                time.sleep(0.02)
            self._hosted = None
        self._store = None

    def _ask(self, replica: str, step: int, told: Mapping[str, Any], limit: float) -> Any:
        if self._client is None:
            self._client = _client(self._endpoint)
        return self._client.quorum(
            replica,
            timeout=timedelta(seconds=limit),
            address="",
            store_address=self._store_address,
            step=step,
            world_size=1,
            shrink_only=False,
            data={"json": json.dumps(told)},
        )

    def _replica(self) -> str:
        return f"{self.run_id}/{self.site}/{self._name}.{self._attempt}"

    def _read(self, quorum: Any) -> Meeting:
        told: dict[int, dict[str, Any]] = {}
        steps: dict[int, int] = {}
        everybody = [(self._said(participant), participant) for participant in quorum.participants]
        ours = [(said, p) for said, p in everybody if self._is_ours(said)]
        if not self._met and len(ours) < len(everybody) and all(said["name"] == self._name for said, _ in ours):
            strange = next(said for said, _ in everybody if not self._is_ours(said))
            other = f"{strange['run']} of {strange['sites']} sites"
            raise ValueError(f"endpoint={self._endpoint}: serves run {other}, not {self.run_id} of {self.sites}; use one for each run")
        # A site that was killed while it waited and has come back is there twice: its later word counts.
        for said, participant in sorted(ours, key=lambda pair: pair[0]["time"]):
            told[said["site"]], steps[said["site"]] = said, participant.step
            self._stores[said["site"]] = participant.store_address
        members = tuple(sorted(told))
        if self.site in told and told[self.site]["name"] != self._name:
            raise ValueError(f"site={self.site}: another process has joined {self.run_id} as this site; give each site its own number")
        prefix = f"{self.run_id}/{quorum.quorum_id}.{quorum.created.seconds}.{quorum.created.nanos}"
        group = told[members[0]]["group"]
        kept = group is not None and group["members"] == list(members) and all(said["group"] == group for said in told.values())
        return Meeting(
            members=members,
            number=max(steps.values()),
            prefix=prefix,
            group=group["name"] if kept else prefix,
            store=self._stores[members[0]],
            steps=steps,
            data={site: told[site]["data"] for site in members},
        )

    def _is_ours(self, said: Mapping[str, Any]) -> bool:
        return bool(said["run"] == self.run_id and said["sites"] == self.sites)

    def _said(self, participant: Any) -> dict[str, Any]:
        """What a participant told. Raises ValueError on one whose words make no sense; of another run, no more than its name counts."""
        try:
            said = json.loads(participant.data["json"])
        except (TypeError, KeyError, ValueError, RecursionError):
            said = None
        fault = _fault(said)
        if fault is None and self._is_ours(said):
            fault = _fault_of_ours(said, participant, self.sites)
        if fault is not None:
            who = repr(str(participant.replica_id)[:100])
            raise ValueError(f"endpoint={self._endpoint}: participant {who}: {fault}; let only sites of {self.run_id} reach the lighthouse")
        return dict(said)

    def _decide(self, meeting: Meeting, ok: bool, limit: float) -> bool:
        store = self._clients.get(meeting.store)
        end = time.monotonic() + limit
        votes = {site: f"{meeting.prefix}/vote/{site}" for site in meeting.members}
        decision = f"{meeting.prefix}/decision"
        store.set(votes[self.site], "ok" if ok else "no")
        while ok and time.monotonic() < end and not store.check([decision]) and not store.check(list(votes.values())):
            time.sleep(0.01)
        ok = ok and store.check(list(votes.values())) and all(store.get(key) == b"ok" for key in votes.values())
        # The first decision stands: a site that gave up waiting and one that saw the last vote come agree all the same.
        agreed = store.compare_set(decision, "", "commit" if ok else "abort") == b"commit"
        store.set(f"{meeting.prefix}/seen/{self.site}", "")
        return agreed

    def _hush_others(self) -> None:
        from .store import within

        for site, address in self._stores.items():
            if site != self.site:
                within(_SLACK, lambda address=address: self._clients.get(address).set(_HUSH, ""))  # type: ignore[misc]

    def _beat(self) -> None:
        client: Any = None
        while True:
            with self._lock:
                if self._gave_up is not None and time.monotonic() - self._gave_up > 2 * _BEAT:
                    # Nobody asked again: under its old name the lighthouse would go on counting this site among those who wait.
                    self._attempt, self._gave_up = self._attempt + 1, None
                if not self._silent.is_set() and self._store.check([_HUSH]):
                    self._silent.set()
            if not self._silent.is_set():
                try:
                    client = client or _client(self._endpoint)
                    client.heartbeat(self._replica(), timeout=timedelta(seconds=_SLACK))
                except (RuntimeError, TimeoutError, ConnectionError):
                    client = None
            if self._ended.wait(_BEAT):
                return


def _fault(said: Any) -> str | None:
    """What is wrong with a participant's words, whatever its run."""
    if not isinstance(said, dict):
        return "told nothing that a site tells"
    if not isinstance(said.get("run"), str) or not _is_count(said.get("sites")):
        return "told no run and number of sites"
    return None


def _fault_of_ours(said: Mapping[str, Any], participant: Any, sites: int) -> str | None:
    """What is wrong with the words of a participant of this run."""
    group, moment = said.get("group"), said.get("time")
    try:
        split_address(participant.store_address)
    except (ValueError, AttributeError):
        return "its store must be host:port"
    if not _is_count(said.get("site")) or said["site"] >= sites:
        return f"its site must be a number from 0 to {sites - 1}"
    if not _is_count(participant.step):
        return "its steps must be a number from 0"
    if not isinstance(said.get("name"), str) or not isinstance(said.get("data"), dict):
        return "its name must be text and its data a mapping"
    if isinstance(moment, bool) or not isinstance(moment, int | float) or not 0 <= moment < _LATEST:
        return "its time must be seconds since 1970"
    if group is not None and not (
        isinstance(group, dict) and isinstance(group.get("name"), str) and isinstance(group.get("members"), list)
    ):
        return "its group must have a name and members"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _client(endpoint: str) -> Any:
    quiet_torchft()
    from torchft.coordination import LighthouseClient

    return LighthouseClient(endpoint, timedelta(seconds=_SLACK))
