"""The place where the sites of a federation meet: torchft's lighthouse, on loopback unless another address is given.

    python -m moe.lighthouse 127.0.0.1:29510 --quorum 3 --deadline 60

prints one line, `lighthouse at 127.0.0.1:29510`, serves until its parent process ends, and keeps nothing on disk: after a restart
sites find it again by themselves. Port 0 takes a free one. Whoever reaches the address can join a run or push a site out of it,
and nothing is encrypted: use a private network or a tunnel.
"""

import argparse
import os
import sys
import time
from typing import Any

SILENCE = 5.0
"""Seconds without a heartbeat after which a site counts as gone."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[host]:port` or `port` (loopback). Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ValueError(f"address={address}: must be host:port; write it like 127.0.0.1:29510")
    return host, int(port)


def join_address(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def quiet_torchft() -> None:
    """Keep torchft from writing a line to stderr for every request; to be called before it is first imported."""
    os.environ.setdefault("RUST_LOG", "error")


def serve(address: str, quorum: int = 1, deadline: float = 60.0, silence: float = SILENCE) -> tuple[Any, str]:
    """Start a lighthouse in this process; returns its server, which has `shutdown()`, and its address as `host:port`.

    It calls a meeting when at least `quorum` sites, and more than half of those it hears from, have come, and waits `deadline`
    seconds for the rest. Raises ValueError on a bad address and RuntimeError on one that cannot be bound.
    """
    host, port = split_address(address)
    if quorum < 1:
        raise ValueError(f"quorum={quorum}: a meeting needs somebody; give 1 or more")
    if deadline <= 0 or silence <= 0:
        raise ValueError(f"deadline={deadline}, silence={silence}: seconds to wait; give more than 0")
    quiet_torchft()
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=join_address(host, port),
        min_replicas=quorum,
        join_timeout_ms=int(1000 * deadline),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * silence),
    )
    # The server names this host, which is not the address it is bound to.
    return server, join_address(host, server.address().rpartition(":")[2])


def main() -> int:
    """Serve until the parent process ends."""
    parser = argparse.ArgumentParser(prog="python -m moe.lighthouse", description="Where the sites of a federation meet.")
    parser.add_argument("address", help="host:port to listen on; a port alone is on 127.0.0.1, port 0 takes a free one")
    parser.add_argument("--quorum", type=int, default=1, help="sites that a meeting needs (1)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a meeting waits for late sites (60)")
    parser.add_argument("--silence", type=float, default=SILENCE, help="seconds without a heartbeat after which a site is gone (5)")
    arguments = parser.parse_args()
    parent = os.getppid()
    try:
        server, address = serve(arguments.address, arguments.quorum, arguments.deadline, arguments.silence)
    except (ValueError, RuntimeError) as error:
        print(f"lighthouse: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"lighthouse at {address}", flush=True)
    try:
        while os.getppid() == parent:
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
