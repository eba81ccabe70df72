"""Directories of a run of several sites: who makes what, in what they must agree, what going on finds. Free of torch."""

import json
import multiprocessing
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from train.config.compose import compose, load_config
from train.config.errors import ConfigError
from train.config.place import check_place, claim, claim_sites, named, read_status, run_of, site_dirs, write_status
from train.config.resume import compose_run
from train.config.schema import Config
from train.config.sites import check_agreement, run_config, site_config, with_shared
from train.meeting import MeetingPoint, check_endpoint, sites_there

SITES = ("federation.sites=3", "federation.endpoint=127.0.0.1:29511", "parallel.processes=2")
HOLDER = "import sys, pathlib; from train.config.place import hold; hold(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def site(number: int, *overrides: str) -> Config:
    return named(compose([*SITES, f"federation.site={number}", "run.name=x", *overrides]))


def test_each_site_has_its_place_in_one_run() -> None:
    for number in (1, 0):
        check_place(site(number))
        assert claim(site(number), {"planned": number}) == (Path(f"runs/x/sites/{number}"), 1)
    run = Path("runs/x")
    assert site_dirs(run) == [run / "sites/0", run / "sites/1"] and site_dirs(run / "sites/1") == [run / "sites/1"]
    assert (run_of(run / "sites/1"), run_of(run)) == (run, run)
    whole = load_config(run / "config.yaml")
    assert (whole.federation.site, whole.federation.endpoint, whole.parallel.processes) == (None, None, 6)
    assert json.loads((run / "plan.json").read_text()) == {"planned": 1}
    write_status(run / "sites/0", state="failed", attempt=1, exit_code=3, reason="why", failures=["long"])
    status = read_status(run)
    assert (status["state"], "exit_code" in status) == ("running", False)
    write_status(run / "sites/1", state="preempted", attempt=1, exit_code=0, step=5)
    status = read_status(run)
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert status["sites"] == {
        "0": {"state": "failed", "attempt": 1, "exit_code": 3, "reason": "why"},
        "1": {"state": "preempted", "attempt": 1, "exit_code": 0, "step": 5},
    }


def test_a_site_comes_while_another_one_is_making_the_run() -> None:
    run = Path("runs/x")
    run.mkdir(parents=True)
    for name in (".lock", ".turn", "plan.json"):
        (run / name).touch()
    check_place(site(1))
    with pytest.raises(ConfigError, match="the folder is not empty and holds no run"):
        check_place(named(compose([*SITES[:1], "run.name=x"])))
    (run / "letters.txt").touch()
    with pytest.raises(ConfigError, match="the folder is not empty and holds no run"):
        check_place(site(1))


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            lambda: site(1, "train.steps=7"),
            "train.steps=7: runs/x was made with train.steps=100, and the sites of a run agree in it; "
            "use train.steps=100, or another run.name",
        ),
        (
            lambda: site(0),
            "federation.site=0: runs/x has had this site before; "
            "go on with it: resume=runs/x federation.site=0; or choose another run.name",
        ),
        (
            lambda: named(compose([*SITES[:1], "run.name=x"])),
            "run.name=x: runs/x is used by another run; choose another run.name, or go on with it: resume=runs/x",
        ),
        (
            lambda: named(compose([*SITES, "federation.site=1"])),
            "run.name=null: sites that are started one by one belong to one run by its name; give every site the same run.name",
        ),
        (
            lambda: compose_run(["resume=runs/x/sites/0"]),
            "resume=runs/x/sites/0: this is site 0 of the run in runs/x; "
            "write resume=runs/x, for this site alone with federation.site=0",
        ),
    ],
)  # fmt: skip
def test_a_site_that_does_not_belong_is_refused(config: Callable[[], Config], line: str) -> None:
    claim(site(0), {})
    (Path("runs/x/sites/0/.lock")).unlink()  # as if its process had ended
    with pytest.raises(ConfigError) as caught:
        check_place(config())
    assert str(caught.value) == line


def test_a_run_of_one_site_has_no_room_for_others() -> None:
    claim(named(compose(["run.name=x"])), {})
    with pytest.raises(ConfigError, match=r"^federation\.sites=3: runs/x was made with federation\.sites=1, "):
        claim(site(0), {})


def test_machines_may_differ() -> None:
    claim(site(0), {})
    claim(site(1, "parallel.processes=4", "parallel.ep=2", "train.micro_batch=2", "offload=stream", "tracking=none"), {})
    assert load_config("runs/x/sites/1/config.yaml").parallel.processes == 4


def _claim_at_once(number: int, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        results.put((number, str(claim(site(number), {})[0])))
    except BaseException as error:
        results.put((number, repr(error)))


def test_sites_that_start_at_the_same_moment_make_one_run() -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        barrier, results = context.Barrier(3), context.Queue()
        processes = [context.Process(target=_claim_at_once, args=(number, barrier, results)) for number in range(3)]
        for process in processes:
            process.start()
        assert sorted(results.get(timeout=60) for _ in processes) == [(number, f"runs/x/sites/{number}") for number in range(3)]
        for process in processes:
            process.join(60)
        assert not list(Path("runs/x").glob(".config.*")) and set(read_status(Path("runs/x"))["sites"]) == {"0", "1", "2"}
        Path("runs").rename(f"before_{_}")


def test_a_site_that_goes_on_agrees_with_those_that_are_there() -> None:
    for number in (0, 1):
        claim(site(number), {})
    command = [sys.executable, "-c", HOLDER, "runs/x/sites/0"]
    (Path("runs/x/sites/0/.lock")).unlink()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"^federation\.site=0: this site of runs/x is going on in another process; "):
            check_place(site(0))
        longer = compose_run(["resume=runs/x", "federation.site=1", "train.steps=200"])
        with pytest.raises(ConfigError, match=r"^train\.steps=200: site 0 is going on with train\.steps=100, .*; use train\.steps=100$"):
            claim(longer, {})
        assert claim(compose_run(["resume=runs/x", "federation.site=1"]), {}) == (Path("runs/x/sites/1"), 2)
        other.kill()
    assert claim(longer, {}) == (Path("runs/x/sites/1"), 3)
    assert load_config("runs/x/config.yaml").train.steps == 200 and load_config("runs/x/config.yaml").parallel.processes == 6


def test_all_sites_of_one_host_and_then_one_alone() -> None:
    config = named(compose(["federation.sites=2", "parallel.processes=4", "run.name=x"]))
    run, _ = claim(config, {})
    assert claim_sites(config, run, "127.0.0.1:5", {}) == [(run / "sites/0", 1), (run / "sites/1", 1)]
    alone = compose_run(["resume=runs/x", "federation.site=1", "federation.endpoint=h:7"])
    assert (alone.federation.endpoint, alone.parallel.processes, alone.federation.site) == ("h:7", 2, 1)
    everyone = compose_run(["resume=runs/x", "train.steps=9", "attention.backend=reference"])
    assert claim(everyone, {}) == (run, 2)
    assert claim_sites(everyone, run, "127.0.0.1:6", {}) == [(run / "sites/0", 2), (run / "sites/1", 2)]
    own = load_config(run / "sites/1/config.yaml")
    assert (own.train.steps, own.federation.endpoint, own.attention.backend) == (9, "127.0.0.1:6", "reference")


def test_the_number_of_sites_stays() -> None:
    claim(site(0), {})
    with pytest.raises(ConfigError) as caught:
        compose_run(["resume=runs/x", "federation.sites=4"])
    assert str(caught.value) == (
        "federation.sites=4: the run was made with federation.sites=3, and this cannot change on the way; leave it out, or start a new run"
    )


def test_configurations_of_runs_and_sites() -> None:
    config = compose([*SITES[:1], "parallel.processes=6"])
    one = site_config(config, 2, "h:1")
    assert (one.federation.site, one.federation.endpoint, one.parallel.processes) == (2, "h:1", 2)
    assert run_config(one) == config
    check_agreement(one, config, "it has")
    other = compose([*SITES[:1], "train.steps=3", "parallel.processes=3"])
    assert with_shared(other, one).train.steps == 100 and with_shared(other, one).parallel.processes == 3


@pytest.fixture
def answering() -> Iterator[Callable[[str], str]]:
    """`answering(text)` serves a page with that text; returns `host:port`."""
    servers = []

    def serve(text: str) -> str:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        servers.append(HTTPServer(("127.0.0.1", 0), Page))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_who_serves_and_who_waits(answering: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    free = f"federation.endpoint=127.0.0.1:{port}"
    assert check_endpoint(site(0, free)) is True
    with pytest.raises(ConfigError) as caught:
        check_endpoint(site(1, free), wait=0.6)
    assert str(caught.value) == (f"{free}: nobody answered there within 1 s; start site 0, which serves it, and let its port through")
    assert capsys.readouterr().err == f"site 1: waiting for site 0 at 127.0.0.1:{port}\n"
    there = answering("[2/2 participants healthy][2 heartbeating]")
    assert sites_there(there) == 2
    assert [check_endpoint(site(number, f"federation.endpoint={there}")) for number in (0, 1)] == [False, False]
    with pytest.raises(ConfigError, match=r"something else answers there; choose a free port$"):
        check_endpoint(site(1, f"federation.endpoint={answering('hello')}"))
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.1:9: site 0 serves it, and this host cannot \(.*\); give an address of site 0's host"
    ):
        check_endpoint(site(0, "federation.endpoint=192.0.2.1:9"))


@pytest.mark.parametrize("name", ["two words", "a..b", "x" * 64])
def test_what_is_no_host_is_refused_before_anything_is_looked_up(name: str) -> None:
    for number in (0, 1):
        with pytest.raises(ConfigError) as caught:
            check_endpoint(site(number, f'federation.endpoint="{name}:1"'))
        assert str(caught.value) == (
            f"federation.endpoint={name}:1: no host can have such a name; write federation.endpoint=<host of site 0>:<free port>"
        )


def test_a_server_that_only_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.meeting.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("train.meeting.STARTS", 2)
    point = MeetingPoint("127.0.0.1:9", site(0).federation, tmp_path / "logs/meeting.log", ("-c", "raise SystemExit('no room')"))
    with pytest.raises(OSError, match=r"^where the sites meet, 127\.0\.0\.1:9: it ends as soon as it starts; its log: .*meeting\.log$"):
        while True:
            point.keep()
    assert (tmp_path / "logs/meeting.log").read_text() == "no room\n" * 2
    assert not point.needed()
    point.close()


def test_runs_that_start_in_one_second_get_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20261206-092110")
    drawn = iter(["00aa", "00aa", "00ab", "00ab", "00ac"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(drawn))
    first, second = (named(compose([])) for _ in range(2))
    assert first.run.dir == second.run.dir == "runs/run-20261206-092110-00aa"  # chance may repeat: then the directory is another's
    claim(first, {})
    with pytest.raises(ConfigError, match="is used by another run"):
        claim(second, {})
    third = named(compose([]))
    claim(third, {})
    assert third.run.name == "run-20261206-092110-00ab"
    assert named(compose([])).run.name == "run-20261206-092110-00ac"


def test_names_made_up_at_once_differ() -> None:
    assert len({named(compose([])).run.name for _ in range(20)}) > 15
