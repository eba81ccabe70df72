"""Sites of a federation as processes that meet, exchange and vote for real; `Party` starts them, signals them and reads what they did.

    python forked_sites.py '<settings as JSON>'        # started by `Party` only

Imports torch once and forks a process for each site. A site trains a dense weight and its experts on noise that depends on its number
and the round alone, so that `expected` can say what must come out. It prints a JSON object a line for each thing that happened.
"""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZE, LR, MOMENTUM = 3000, 0.7, 0.9
EXPERTS = 4


class Party:
    """A lighthouse and `sites` processes; `events` grows while `wait_for` reads."""

    def __init__(self, sites: int, **settings: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.settings = {"sites": sites, "deadline": 4.0, "quorum": None, "limit": 3.0, "rounds": 6, "die": [], "pause": [], **settings}
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.endpoint = "127.0.0.1:0"
        self.start_lighthouse()
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({**self.settings, "endpoint": self.endpoint})],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._rest = b""

    def start_lighthouse(self) -> None:
        """Serve where the sites look, on a free port at first."""
        quorum = self.settings["quorum"] or self.settings["sites"]
        command = [sys.executable, "-m", "moe.lighthouse", self.endpoint, "--quorum", str(quorum)]
        self.lighthouse = subprocess.Popen(
            [*command, "--deadline", str(self.settings["deadline"])], env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert self.lighthouse.stdout is not None
        words = self.lighthouse.stdout.readline().split()
        assert words[:2] == ["lighthouse", "at"], words
        self.endpoint = words[2]

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], count: int = 1, seconds: float = 120.0) -> list[dict[str, Any]]:
        """The first `count` events that are `wanted`, past ones included."""
        end = time.monotonic() + seconds
        while len(found := [event for event in self.events if wanted(event)]) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} events in {seconds} s; the last ones: {self.events[-12:]}"
            self._read(0.2)
        return found[:count]

    def _read(self, seconds: float) -> None:
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], seconds)[0]:
            *lines, self._rest = (self._rest + os.read(self._process.stdout.fileno(), 2**16)).split(b"\n")
            self.events += [json.loads(line) for line in lines]

    def of(self, what: str, site: int) -> list[dict[str, Any]]:
        """A site's events of one kind so far."""
        return [event for event in self.events if event["what"] == what and event["site"] == site]

    def close(self) -> None:
        """End everything."""
        for event in [event for event in self.events if event["what"] == "pid"]:
            try:
                os.kill(event["pid"], signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in (self._process, self.lighthouse):
            process.kill()
            process.wait()


def noise_of(site: int, round: int, name: str, size: int) -> Any:
    """How far a site moves a parameter in a round."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{site}/{round}/{name}".encode()).digest()[:6], "big")
    return 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def expected(sites: int, replication: int, rounds: Sequence[tuple[int, Sequence[int]]]) -> dict[str, Any]:
    """Weights of the dense parameter and of every expert after (round, contributing members), by the formula."""
    import torch

    from moe.residency import ResidencyPlan

    plan = ResidencyPlan.build(EXPERTS, sites, replication, "contiguous", 0, 1)
    holders = {"dense": range(sites), **{f"expert.{e}": plan.holders(e, 0) for e in range(EXPERTS)}}
    weights = {}
    for name, who in holders.items():
        theta = torch.zeros(SIZE if name == "dense" else 50)
        velocity = torch.zeros_like(theta)
        for round, members in rounds:
            ways = [-noise_of(site, round, name, theta.numel()) for site in members if site in who]
            if ways:
                mean = sum(ways) / len(ways)
                velocity = MOMENTUM * velocity + mean
                theta = theta - LR * (mean + MOMENTUM * velocity)
        weights[name] = theta
    return weights


def say(site: int, what: str, **more: Any) -> None:
    """One event; short enough to be written at once."""
    os.write(1, (json.dumps({"what": what, "site": site, **more}) + "\n").encode())


def run_site(site: int, settings: dict[str, Any]) -> None:
    """A site's life: rounds until the last two were whole, and at least `rounds` are done."""
    import torch

    from moe.exchange import MeetingExchange
    from moe.membership import Membership, NoMeeting
    from moe.outer import Named, OuterStep, RoundFailed
    from moe.residency import ResidencyPlan

    say(site, "pid", pid=os.getpid())
    sites = settings["sites"]
    plan = ResidencyPlan.build(EXPERTS, sites, settings["replication"], "contiguous", 0, 1)
    named = {"dense": Named(torch.zeros(SIZE), "dense")}
    named |= {f"expert.{e}": Named(torch.zeros(50), "expert", 0, e) for e in plan.resident(site, 0)}

    class Mortal(MeetingExchange):
        swaps, dies = 0, False

        def _swap(self, outgoing: Any, incoming: Any) -> None:
            self.swaps += 1
            if self.dies and self.swaps > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            super()._swap(outgoing, incoming)

    exchange = Mortal(site, bucket=256, limit=settings["limit"])
    outer = OuterStep(named, plan, exchange, lr=LR, momentum=MOMENTUM)
    membership = Membership(
        settings["endpoint"], site, sites, quorum=settings["quorum"], deadline=settings["deadline"], run_id="party", start=120
    )
    whole, trained, paused = 0, -1, False
    while outer.round < settings["rounds"] or whole < 2:
        if [site, outer.round] in settings["pause"] and not paused:
            paused = True
            say(site, "paused")
            os.kill(os.getpid(), signal.SIGSTOP)
        if outer.round > trained:
            trained = outer.round
            for name, entry in named.items():
                entry.tensor.add_(noise_of(site, outer.round, name, entry.tensor.numel()))
            time.sleep(settings.get("train", 0.1))
        try:
            meeting = membership.meet(outer.round, {"line": outer.line})
        except NoMeeting:
            say(site, "no meeting", round=outer.round)
            continue
        exchange.use(meeting)
        exchange.swaps, exchange.dies = 0, [site, outer.round] in settings["die"]
        before = time.monotonic()
        try:
            report = outer.step(meeting.members, current=meeting.current, commit=lambda ok, meeting=meeting: membership.vote(meeting, ok))
        except RoundFailed as error:
            whole = 0
            say(site, "failed", round=outer.round, seconds=time.monotonic() - before, members=meeting.members, why=str(error)[:200])
            continue
        left = settings["sites"] - len({s for s, _ in settings["die"]})
        whole = whole + 1 if meeting.current == meeting.members and len(meeting.members) == left else 0
        say(
            site,
            "step",
            round=report.round,
            members=meeting.members,
            current=meeting.current,
            came=report.came,
            stayed=report.stayed,
            orphans=report.orphans,
            digest=hashlib.sha256(named["dense"].tensor.numpy().tobytes()).hexdigest(),
        )
    torch.save({name: entry.tensor for name, entry in named.items()}, f"{settings['folder']}/site{site}.pt")
    exchange.close()
    membership.close()
    say(site, "end", round=outer.round)


def main() -> None:
    settings = {"replication": 2, **json.loads(sys.argv[1])}
    import torch
    import torchft.process_group

    import moe.outer  # noqa: F401  (what every site needs is imported once)

    torch.set_num_threads(1)
    parent = os.getpid()
    children = []
    for site in range(settings["sites"]):
        child = os.fork()
        if child == 0:
            assert os.getppid() == parent and torchft.process_group
            code = 1
            try:
                run_site(site, settings)
                code = 0
            except BaseException as error:
                say(site, "error", error=f"{type(error).__name__}: {error}"[:500])
            os._exit(code)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
