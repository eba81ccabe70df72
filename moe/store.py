"""Key-value stores between sites: torch's `TCPStore`, bound to one address, with clients that are kept and calls that end.

Torch's client looks up the name of every address that it connects to. Where nobody answers such reverse look-ups the first one of a
process takes 5 seconds or more, after which torch looks up no more (2.13). A store that listens is its own first client, so a process
that begins with `listen` has that behind it; a line for its address in /etc/hosts avoids the wait altogether.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from .lighthouse import join_address, split_address

CONNECT_SECONDS = 30.0


def address_towards(host: str, port: int) -> str:
    """This host's address on the interface that reaches `host`; no packet is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen(address: str) -> tuple[TCPStore, str]:
    """A store of this process and its `host:port`. As such torch's store listens on every interface; it takes a bound socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=CONNECT_SECONDS)
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno(), timeout=timeout)
    listener.detach()
    return store, join_address(address, port)


class Clients:
    """Clients of other processes' stores by `host:port`; not for several threads at once."""

    def __init__(self) -> None:
        self._clients: dict[str, TCPStore] = {}

    def get(self, address: str) -> TCPStore:
        """A client of the store at `address`. Raises OSError or RuntimeError when it is not there."""
        client = self._clients.get(address)
        if client is None:
            host, port = split_address(address)
            # Torch's client tries a dead address for its whole time limit and fills the log meanwhile.
            socket.create_connection((host, port), timeout=2.0).close()
            client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS))
            self._clients[address] = client
        return client

    def drop(self, address: str) -> None:
        """Forget the client of a store that failed."""
        self._clients.pop(address, None)


def within(limit: float, call: Callable[[], Any]) -> Any:
    """The answer of `call`, or None when it fails or takes longer: a store's calls wait for a stopped host without end."""
    answer: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            answer.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    return answer[0] if answer else None
