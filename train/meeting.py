"""Where the sites of a run find each other: a small server of its own process, started beside site 0 and started again when it dies.

The server is `python -m moe.lighthouse <host>:<port>`. On one host the launcher starts it on 127.0.0.1; of sites on several hosts the first
one serves the given address, unless something serves there already, and the others wait for it. Free of torch.
"""

import atexit
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe.lighthouse import split_address
from train.config.errors import ConfigError
from train.config.place import read_status
from train.config.schema import Config
from train.federation.config import FederationConfig

SERVER = ("-m", "moe.lighthouse")
WAIT_SECONDS = 90.0
"""How long a site waits at its start for somebody to answer where the sites meet."""
START_SECONDS = 300.0
"""How long the server may take until it answers for the first time; a busy machine imports slowly."""
STARTS = 5
"""How often it may die before it has answered for the first time."""
PAUSE_SECONDS = 2.0
"""Between two starts of the server."""
_WITH_PARENT = """
import os, sys
from train.worker import die_with_parent
die_with_parent(parent=int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
"""
_HEARTBEATS = re.compile(rb"\[(\d+) heartbeating\]")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def sites_there(endpoint: str, seconds: float = 2.0) -> int | None:
    """Sites that were heard of at `endpoint` in the last seconds, None when nobody answers. ValueError when it is no server of ours."""
    host, port = split_address(endpoint)
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request("GET", "/status")
        page = connection.getresponse().read()
    except (http.client.HTTPException, ConnectionResetError, BrokenPipeError) as error:
        raise ValueError(f"something else answers there ({type(error).__name__})") from error
    except OSError:
        return None
    finally:
        connection.close()
    found = _HEARTBEATS.search(page)
    if found is None:
        raise ValueError("something else answers there")
    return int(found[1])


def check_endpoint(config: Config, wait: float | None = None) -> bool:
    """Before anything starts: whether this site has to serve the address where the sites of `config` meet.

    Site 0 has to unless it is served already; another site waits, at most `wait` seconds (`WAIT_SECONDS`), until it is. Raises
    ConfigError when nobody answers, something else does, or the address is not of this host.
    """
    endpoint, site = config.federation.endpoint, config.federation.site
    assert endpoint is not None and site is not None
    _check_host(endpoint)
    end = time.monotonic() + (WAIT_SECONDS if wait is None else wait)
    said = False
    while True:
        try:
            there = sites_there(endpoint)
        except ValueError as error:
            raise ConfigError("federation.endpoint", endpoint, str(error), "choose a free port") from error
        if there is not None:
            return False
        if site == 0:
            _check_bind(endpoint)
            return True
        if time.monotonic() > end:
            rule = f"nobody answered there within {WAIT_SECONDS if wait is None else wait:.0f} s"
            raise ConfigError("federation.endpoint", endpoint, rule, "start site 0, which serves it, and let its port through")
        if not said:
            print(f"site {site}: waiting for site 0 at {endpoint}", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.5)


def _check_host(endpoint: str) -> None:
    """Raise ConfigError for what no resolver would take as a host; that nobody has the name shows when somebody looks it up."""
    host, _ = split_address(endpoint)
    try:
        possible = host.isprintable() and " " not in host and bool(host.encode("idna"))
    except UnicodeError:
        possible = False
    if not possible:
        rule = "no host can have such a name"
        raise ConfigError("federation.endpoint", endpoint, rule, "write federation.endpoint=<host of site 0>:<free port>")


def _check_bind(endpoint: str) -> None:
    host, port = split_address(endpoint)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        rule = f"site 0 serves it, and this host cannot ({error.strerror or error})"
        raise ConfigError("federation.endpoint", endpoint, rule, "give an address of site 0's host and a free port") from error


class MeetingPoint:
    """The server, as the process that started it sees it. `keep` starts it, and again when it died; it ends with this process.

    `wait_for_others`: whether sites that this process does not know of need it, too.
    """

    def __init__(
        self,
        endpoint: str,
        federation: FederationConfig,
        log: Path,
        server: Sequence[str] = SERVER,
        environment: Mapping[str, str] = os.environ,
        wait_for_others: bool = False,
    ) -> None:
        self.endpoint, self.log = endpoint, log
        quorum = federation.quorum or federation.sites
        self._command = [*server, endpoint, "--quorum", str(quorum), "--deadline", str(federation.deadline)]
        self._environment, self._wait_for_others = environment, wait_for_others
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._first = self._started = 0.0
        self._starts = 0

    def keep(self) -> None:
        """Look after it. Raises OSError, in words, when it does not come to answer, in `START_SECONDS` or `STARTS` starts."""
        now = time.monotonic()
        if self._process is None or (self._process.poll() is not None and now - self._started > PAUSE_SECONDS):
            if self._starts == STARTS and not self._answered:
                raise OSError(f"where the sites meet, {self.endpoint}: it ends as soon as it starts; its log: {self.log}")
            if self._process is not None and self._answered:
                print(f"where the sites meet, {self.endpoint}: started again; its log: {self.log}", file=sys.stderr, flush=True)
            self._begin(now)
        if not self._answered and self._process is not None:
            try:
                self._answered = self._process.poll() is None and sites_there(self.endpoint, 1.0) is not None
            except ValueError:
                self._answered = False
            if not self._answered and now - self._first > START_SECONDS:
                raise OSError(f"where the sites meet, {self.endpoint}: nothing answers after {START_SECONDS:.0f} s; its log: {self.log}")

    def _begin(self, now: float) -> None:
        self._first, self._started, self._starts = self._first or now, now, self._starts + 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WITH_PARENT, str(os.getpid()), *self._command],
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def needed(self) -> bool:
        """Whether sites of other hosts are still heard of."""
        if not self._wait_for_others or not self._answered:
            return False
        try:
            return bool(sites_there(self.endpoint))
        except ValueError:
            return False

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def serve_by_hand(federation: FederationConfig, run_dir: Path) -> None:
    """Serve for the life of this process, the first rank of a site 0 that was started without the launcher.

    A run that is completed waits at its end until the other sites have left.
    """
    assert federation.endpoint is not None
    point = MeetingPoint(federation.endpoint, federation, run_dir / "logs" / "meeting.log", SERVER, wait_for_others=True)
    point.keep()
    stop = threading.Event()

    def look_after() -> None:
        while not stop.wait(1.0):
            try:
                point.keep()
            except OSError as error:
                print(error, file=sys.stderr, flush=True)
                return

    threading.Thread(target=look_after, name="meeting", daemon=True).start()

    def leave() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while read_status(run_dir).get("state") == "completed" and point.needed():
            time.sleep(1.0)
        stop.set()
        point.close()

    atexit.register(leave)
