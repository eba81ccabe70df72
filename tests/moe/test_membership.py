"""Meetings and votes of sites that are threads of this process, at a lighthouse of their own."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moe.exchange import MeetingExchange
from moe.lighthouse import serve, split_address
from moe.membership import Meeting, Membership, NoMeeting


@pytest.fixture
def lighthouse() -> Iterator[Callable[..., str]]:
    servers = []

    def start(**settings: Any) -> str:
        server, address = serve("127.0.0.1:0", **{"deadline": 20.0, **settings})
        servers.append(server)
        return address

    yield start
    for server in servers:
        server.shutdown()


@pytest.fixture
def join() -> Iterator[Callable[..., Membership]]:
    joined = []

    def start(endpoint: str, site: int, sites: int, **settings: Any) -> Membership:
        joined.append(Membership(endpoint, site, sites, **{"quorum": None, "deadline": 20.0, "run_id": "r", "start": 60.0, **settings}))
        return joined[-1]

    yield start
    for membership in joined:
        membership.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [answer.result() for answer in [pool.submit(call) for call in calls]]


def wait_until_heard(endpoint: str, sites: int) -> None:
    end = time.monotonic() + 60
    while f"[{sites} heartbeating]" not in urllib.request.urlopen(f"http://{endpoint}/status").read().decode():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_all_meet_and_agree(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=3)
    sites = [join(endpoint, site, 3) for site in range(3)]
    exchanges = [MeetingExchange(site, limit=30.0) for site in range(3)]

    def round_of(site: int, step: int, ok: bool) -> tuple[Meeting, list[float], bool]:
        meeting = sites[site].meet(step, {"line": "x", "site": site})
        again = Meeting.from_dict(json.loads(json.dumps(meeting.to_dict())))
        assert again == meeting
        exchanges[site].use(again)
        value = torch.tensor([float(site + 1)])
        exchanges[site].sum(meeting.members, [value])
        exchanges[site].copy(1, meeting.members, [extra := torch.tensor([float(site)])])
        return meeting, [*value.tolist(), *extra.tolist()], sites[site].vote(meeting, ok)

    seen = []
    for step, bad in enumerate((None, 1, None, None)):
        answers = together(*(lambda s=site, n=step, b=bad: round_of(s, n, s != b) for site in range(3)))  # type: ignore[misc]
        assert all(answer == answers[0] for answer in answers)
        meeting, value, agreed = answers[0]
        assert meeting.members == meeting.current == (0, 1, 2) and meeting.number == step and value == [6.0, 1.0]
        assert meeting.data[2] == {"line": "x", "site": 2} and agreed == (bad is None)
        seen.append((meeting.prefix, meeting.group))
    assert len({prefix for prefix, _ in seen}) == 4
    # Connections stay, save after the round that failed.
    assert [group for _, group in seen] == [seen[0][0], seen[0][0], seen[2][0], seen[2][0]]
    for exchange in exchanges:
        exchange.close()


def test_only_those_with_the_newest_line_are_current() -> None:
    def meeting(steps: list[int], lines: list[str]) -> Meeting:
        members = tuple(range(len(steps)))
        data = {site: {"line": line} for site, line in enumerate(lines)}
        return Meeting(members=members, number=max(steps), prefix="p", group="g", store="", steps=dict(enumerate(steps)), data=data)

    assert meeting([3, 4, 4], ["a", "b", "b"]).current == (1, 2)
    assert meeting([4, 4, 4], ["a", "b", "b"]).current == (0,)
    assert meeting([0, 0], ["", ""]).current == (0, 1)


def test_a_vote_ends_when_a_member_does_not_come_and_the_first_decision_stands(
    lighthouse: Callable[..., str], join: Callable[..., Membership]
) -> None:
    endpoint = lighthouse(quorum=2)
    one, other = (join(endpoint, site, 2) for site in range(2))
    meeting, _ = together(lambda: one.meet(0, {}), lambda: other.meet(0, {}))
    assert one.vote(meeting, True, timeout=0.5) is False
    assert other.vote(meeting, True) is False  # though both votes are ok by now


def test_too_few_is_an_error_after_the_limit(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    membership = join(lighthouse(quorum=2), 0, 2)
    with pytest.raises(NoMeeting, match=r"no meeting of 2 of 2 sites within 0\.1 s .* too few came"):
        membership.meet(0, {}, timeout=0.1)


def test_who_gave_up_is_not_taken_for_one_who_waits(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=2, silence=2.0)
    gone, other = (join(endpoint, site, 2, quorum=2) for site in range(2))
    for membership in (gone, other):
        with pytest.raises(NoMeeting):
            membership.meet(0, {}, timeout=1.0)
        time.sleep(5)  # its heartbeats go on, but not for the name under which it waited
    assert [m.members for m in together(lambda: gone.meet(0, {}), lambda: other.meet(0, {}))] == [(0, 1)] * 2


def test_without_a_lighthouse_there_is_no_meeting(join: Callable[..., Membership]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(NoMeeting, match="no meeting"):
        join(f"127.0.0.1:{port}", 0, 2).meet(0, {}, timeout=0.1)


def test_one_of_two_goes_on_alone_when_the_quorum_lets_it(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=1, deadline=2.0)
    # Torchft alone would wait for ever here: the late site's heartbeats go on.
    one, late = (join(endpoint, site, 2, quorum=1, deadline=2.0) for site in range(2))
    wait_until_heard(endpoint, 2)
    meetings = together(lambda: one.meet(0, {}), lambda: late.meet(0, {}))
    assert [meeting.members for meeting in meetings] == [(0, 1)] * 2
    assert one.meet(1, {}, timeout=60).members == (0,)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(lambda: late.meet(1, {}, timeout=60))
        step = 1
        while (meeting := one.meet(step := step + 1, {}, timeout=60)).members == (0,):
            time.sleep(0.1)
        assert meeting == back.result() and meeting.members == (0, 1) and meeting.current == (0,)


def test_a_late_site_that_is_needed_stays_among_the_living(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=2, deadline=0.5)
    one, late = (join(endpoint, site, 2, deadline=0.5) for site in range(2))
    wait_until_heard(endpoint, 2)
    together(lambda: one.meet(0, {}), lambda: late.meet(0, {}))
    with pytest.raises(NoMeeting, match="too few came"):
        one.meet(1, {}, timeout=4.0)  # long enough to ask again after the deadline
    time.sleep(1.0)  # whoever was asked to be silent is by now
    assert not late._silent.is_set()
    wait_until_heard(endpoint, 2)


def test_a_name_changes_before_a_meeting_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, asked = threading.Event(), []

    class Watched(Membership):
        @property
        def _gave_up(self) -> float | None:
            """The heartbeats have seen it: a meeting now begins in between."""
            seen = self.__dict__.get("since")
            if seen is not None and threading.current_thread() is self._thread:
                waiting.set()
                asking.join(1.0)
            return seen

        @_gave_up.setter
        def _gave_up(self, since: float | None) -> None:
            self.__dict__["since"] = since

        def _ask(self, replica: str, *rest: Any) -> Any:
            asked.append((replica, self._replica()))
            raise ValueError("asked once")

    def meet() -> None:
        assert waiting.wait(60)
        with pytest.raises(ValueError, match="asked once"):
            membership.meet(0, {}, timeout=60.0)

    monkeypatch.setattr("moe.membership._client", lambda endpoint: Mock())
    membership = Watched("127.0.0.1:1", 0, 2, quorum=None, deadline=1.0, run_id="r")
    asking = threading.Thread(target=meet)
    asking.start()
    membership._gave_up = time.monotonic() - 60.0
    asking.join(60)
    assert membership._thread.is_alive() and membership._attempt == 1
    assert asked == [(membership._replica(), membership._replica())]
    membership.close()


def test_those_who_left_are_not_waited_for(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=2, deadline=100.0)
    sites = [join(endpoint, site, 3, quorum=2, deadline=100.0) for site in range(3)]
    wait_until_heard(endpoint, 3)
    first = together(*(lambda s=site: s.meet(0, {}) for site in sites))  # type: ignore[misc]
    assert first[0].members == (0, 1, 2)
    sites[2].leave()
    start = time.monotonic()
    meetings = together(*(lambda s=site: s.meet(1, {}) for site in sites[:2]))  # type: ignore[misc]
    assert meetings[0].members == (0, 1) and time.monotonic() - start < 60


def test_strangers_are_refused(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=2)
    mine, other = join(endpoint, 0, 2), join(endpoint, 1, 2, run_id="other")

    def fails(membership: Membership) -> str:
        with pytest.raises(ValueError) as caught:
            membership.meet(0, {})
        return str(caught.value)

    messages = together(lambda: fails(mine), lambda: fails(other))
    assert "serves run other of 2 sites, not r of 2; use one for each run" in messages[0] and "not other of 2" in messages[1]


def told_by(number: int, /, **changes: Any) -> SimpleNamespace:
    """A participant as the lighthouse names it."""
    said = {"run": "r", "site": number, "sites": 2, "name": f"n{number}", "time": 5.0, "group": None, "data": {}}
    said |= {key: value for key, value in changes.items() if key in said}
    fields = {"replica_id": f"r/{number}/n.0", "step": 3, "store_address": "127.0.0.1:9", "data": {"json": json.dumps(said)}}
    return SimpleNamespace(**fields | {key: value for key, value in changes.items() if key in fields and key != "data"})


@pytest.fixture(scope="module")
def reader() -> Callable[..., Meeting]:
    """Reads participants as site 0 of run r."""
    membership = Membership("127.0.0.1:1", 0, 2, quorum=None, deadline=1.0, run_id="r")
    membership.leave()
    membership._name = "n0"

    def read(*participants: SimpleNamespace, met: bool = False) -> Meeting:
        membership._met = met
        created = SimpleNamespace(seconds=1, nanos=2)
        return membership._read(SimpleNamespace(quorum_id=7, created=created, participants=list(participants)))

    return read


def test_participants_of_another_run_do_not_count_once_a_run_has_met(reader: Callable[..., Meeting]) -> None:
    stranger = told_by(1, run="other", site="?", store_address="?", step=99)
    for met, others in ((True, []), (False, [told_by(1)]), (True, [told_by(1)])):
        meeting = reader(stranger, told_by(0), *others, met=met)
        assert meeting.members == tuple(range(1 + len(others))) and meeting.number == 3
    for strange in (stranger, told_by(1, sites=3)):
        with pytest.raises(ValueError, match=r"endpoint=.*: serves run (other of 2|r of 3) sites, not r of 2; use one for each run"):
            reader(strange, told_by(0))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        *(({"site": site}, "its site must be a number from 0 to 1") for site in (2, -1, "1", True, None, [0])),
        *(({"run": run}, "told no run and number of sites") for run in (None, 3, ["r"])),
        ({"sites": "2"}, "told no run and number of sites"),
        *(({"time": moment}, "its time must be seconds since 1970") for moment in ("now", None, float("nan"), -1, 10**400)),
        *(({"name": name}, "its name must be text") for name in (None, 3)),
        *(({"group": group}, "its group must have a name and members") for group in ("g", {}, {"name": "g"}, {"name": 1, "members": []})),
        ({"step": -1}, "its steps must be a number from 0"),
        *(({"store_address": address}, "its store must be host:port") for address in ("", "here", None)),
    ],
)
def test_words_without_sense_are_refused_in_one_line(reader: Callable[..., Meeting], changes: dict[str, Any], fault: str) -> None:
    for met in (False, True):
        with pytest.raises(ValueError) as caught:
            reader(told_by(0), told_by(1, **changes), met=met)
        assert f"participant 'r/1/n.0': {fault}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [None, {}, {"json": None}, {"json": ""}, {"json": "{"}, {"json": "[]"}, {"json": "3"}, {"json": "[" * 10**5}]
)
def test_what_is_no_word_at_all_is_refused_in_one_line(reader: Callable[..., Meeting], data: Any) -> None:
    nonsense = told_by(1)
    nonsense.data, nonsense.replica_id = data, "two\nlines"
    with pytest.raises(ValueError, match=r"participant 'two\\nlines': told nothing that a site tells; let only sites of r reach") as caught:
        reader(told_by(0), nonsense)
    assert "\n" not in str(caught.value)


def test_two_processes_of_one_site_are_noticed(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=2)
    first, second = join(endpoint, 0, 2, quorum=1), join(endpoint, 0, 2, quorum=1)

    def meet(membership: Membership) -> str:
        try:
            return str(membership.meet(0, {}).members)
        except ValueError as error:
            return str(error)

    answers = sorted(together(lambda: meet(first), lambda: meet(second)))
    assert answers[0] == "(0,)" and "site=0: another process has joined r as this site" in answers[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"site": 2}, "site=2: sites are numbered from 0 to 1"),
        ({"quorum": 3}, "quorum=3: there are 2 sites"),
        ({"deadline": 0.0}, "deadline=0.0"),
        ({"endpoint": "here"}, "address=here: must be host:port"),
    ],
)
def test_arguments_without_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    arguments = {"endpoint": "127.0.0.1:1", "site": 0, "sites": 2, "quorum": None, "deadline": 1.0, "run_id": "r", **settings}
    with pytest.raises(ValueError, match=message):
        Membership(**arguments)


def test_addresses() -> None:
    assert split_address("host:1") == ("host", 1) and split_address("[::1]:2") == ("::1", 2) and split_address("3") == ("127.0.0.1", 3)
    for address in ("host", "host:", "host:70000", ""):
        with pytest.raises(ValueError, match="must be host:port"):
            split_address(address)


def test_only_loopback_listens(lighthouse: Callable[..., str], join: Callable[..., Membership]) -> None:
    endpoint = lighthouse(quorum=1)
    membership = join(endpoint, 0, 1)
    assert membership.meet(0, {}).members == (0,) and membership.address == "127.0.0.1"
    ports = {int(endpoint.rpartition(":")[2]), int(membership._store_address.rpartition(":")[2])}
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(port, 16) in ports:
                listening[int(port, 16)] = address
    assert listening == dict.fromkeys(ports, "0100007F")


def test_the_command_serves_until_its_parent_ends() -> None:
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "moe.lighthouse", "0"], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    *words, pid = done.stdout.split()
    assert words[:2] == ["lighthouse", "at"] and words[2].startswith("127.0.0.1:")
    end = time.monotonic() + 60
    while subprocess.run(["kill", "-0", pid], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < end, "it outlives its parent"
        time.sleep(0.1)
    for arguments, message in ((["here"], "address=here: must be host:port"), (["0", "--quorum", "0"], "quorum=0")):
        bad = subprocess.run([sys.executable, "-m", "moe.lighthouse", *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert bad.returncode == 1 and message in bad.stderr and bad.stderr.count("\n") == 1
