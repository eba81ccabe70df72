"""Two sites as on two hosts, joined by a slow link: what an outer step of a whole run takes, beside bytes over rate.

    python -m benchmarks.throttled_link --out link.json --figure link.png
    python -m benchmarks.throttled_link --rates 20 --replications 1        # one rate, one arrangement

Each host is a network namespace of its own with loopback and one end of a veth pair, shaped in both directions by the kernel's token
bucket (`tc tbf`). Site 0 (two processes) and site 1 (one) are started as a user starts them, `leantron pretrain federation.site=k
federation.endpoint=<address of site 0>:<port>`, each in a folder of its own. Nothing else is in these namespaces, and none of their
traffic leaves them. Needs Linux, `ip` and `tc`, and the right to make namespaces (root).

The formula takes the parameters from the checkpoint's index. By ring, seconds of an outer step = bytes that a site sends / rate + a
constant: the link carries both directions at once. By payload, bytes sent and received / rate: what a link would take that carries
one at a time. The constant is what the same run's outer step takes when nothing is shaped: meeting, votes, copies in and out, round
trips. Measured seconds are `outer_seconds` of the metrics; of the two sites the one that came later counts, since the other one's
time is also its wait, and of the steps the median without the first, which makes connections. Headers of packets, about 5 %, are in
no formula. Fails unless every shaped run is within `BAND` of the ring's seconds.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.record import provenance

ROOT = Path(__file__).resolve().parents[1]
_PREFIX = "leantron-link"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29510
EVERY, ROUNDS = 4, 4
"""Local steps between outer steps, and outer steps of a run."""
PROCESSES = (2, 1)
BAND = (1.0, 1.5)
"""Measured seconds are at least the first times bytes over rate, and at most the second times (bytes over rate + constant)."""
LEAST_CONSTANT = 0.5
"""Seconds that the constant counts at least: an idle machine's outer step takes a tenth, which any other load multiplies."""
RUN_SECONDS = 600.0
MODEL = (
    *("model=tiny", "model.layers=2", "model.width=256", "model.ffn_width=1024", "attention=dense", "optim=constant", "tracking=none"),
    *("moe=fomoe", "moe.experts=4", "moe.layers=[1]", "moe.ffn_width=512", "train.precision=fp32", "train.seq_len=64"),
    *("train.micro_batch=1", "train.global_batch=4", "train.eval_steps=0", "checkpoint=end", "data=custom", "data.validation=0.2"),
    *("federation.sites=2", f"federation.sync_every={EVERY}", f"train.steps={EVERY * ROUNDS}", "run.name=link"),
)


class Link:
    """Two namespaces and the veth pair between them; `close` leaves nothing of it. One that was killed is cleared away by the next."""

    def __init__(self) -> None:
        """Make them. Raises OSError with the reason where that cannot be."""
        self.names = [f"{_PREFIX}-{os.getpid()}-{site}" for site in range(2)]
        for left in Path("/run/netns").glob(f"{_PREFIX}-*-*"):
            if not Path("/proc", left.name.split("-")[-2]).exists():
                _remove(left.name)
        try:
            for name in self.names:
                _call("ip", "netns", "add", name)
            _call("ip", "-n", self.names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", self.names[1])
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _call("ip", "-n", name, "address", "add", f"{address}/30", "dev", "veth0")
                for device in ("lo", "veth0"):
                    _call("ip", "-n", name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def shape(self, rate: float | None) -> None:
        """Let each end send `rate` Mbit/s, headers included; None: as fast as the machine can. Counts begin anew."""
        for name in self.names:
            _call("tc", "-n", name, "qdisc", "replace", "dev", "veth0", "root", "pfifo", "limit", "1000")
            if rate is not None:
                shape = ("tbf", "rate", f"{rate:g}mbit", "burst", "32kb", "latency", "400ms")
                _call("tc", "-n", name, "qdisc", "replace", "dev", "veth0", "root", *shape)

    def carried(self) -> list[int]:
        """Bytes that each end has sent since it was shaped, headers included."""
        told = [json.loads(_call("tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "veth0")) for name in self.names]
        return [int(queues[0]["bytes"]) for queues in told]

    def start(self, site: int, arguments: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
        """Start Python with `arguments` on the host of `site`, in `folder`; its output goes to `folder/output`."""
        folder.mkdir(parents=True)
        threads = str(max(1, (os.cpu_count() or 1) // sum(PROCESSES)))
        kept = {key: value for key, value in os.environ.items() if key not in ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE")}
        with (folder / "output").open("wb") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[site], sys.executable, *arguments],
                cwd=folder,
                env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def close(self) -> None:
        """End whatever still runs in the namespaces and remove them."""
        for name in self.names:
            if Path("/run/netns", name).exists():
                _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace and all that runs in it."""
    end = time.monotonic() + 30.0
    while (left := _call("ip", "netns", "pids", name).split()) and time.monotonic() < end:
        for pid in left:
            _end(int(pid))
        time.sleep(0.1)
    _call("ip", "netns", "delete", name)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise OSError(f"there is no program `{command[0]}`") from error
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout


def unavailable() -> str | None:
    """Why such a link cannot be made here; None when it can."""
    try:
        link = Link()
    except OSError as error:
        return str(error)
    try:
        link.shape(100)
    except OSError as error:
        return str(error)
    finally:
        link.close()
    return None


@contextmanager
def hosts() -> Iterator[Link]:
    """The link, gone at the end, also when a signal ends this process."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        link = Link()
        try:
            yield link
        finally:
            link.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def corpus(folder: Path) -> str:
    """A small data set of made-up bytes; returns its prefix."""
    import numpy as np

    from train.data.indexed import IndexedWriter

    rng, prefix = np.random.default_rng(0), str(folder / "letters")
    with IndexedWriter(f"{prefix}.bin", 257) as writer:
        for _ in range(60):
            writer.add_document(np.append(np.resize(rng.integers(97, 123, size=5), 200), 256))
        writer.finish(f"{prefix}.idx")
    return prefix


def run(link: Link, folder: Path, data: str, replication: int, rate: float | None) -> dict[str, Any]:
    """A whole run of both sites over the link at `rate`: what was sent and what its outer steps took."""
    link.shape(rate)
    common = [*MODEL, f"data.paths=[{data}]", f"federation.replication={replication}", f"federation.endpoint={ADDRESSES[0]}:{PORT}"]
    places = [folder / f"host_{site}" for site in range(2)]
    sites = []
    for site, place in enumerate(places):
        own = [f"federation.site={site}", f"parallel.processes={PROCESSES[site]}"]
        sites.append(link.start(site, ["-P", "-m", "launch", "pretrain", *common, *own], place))
    end = time.monotonic() + RUN_SECONDS
    while any(site.poll() is None for site in sites):
        if time.monotonic() > end or any(site.poll() for site in sites):
            break
        time.sleep(0.1)
    for site, (process, place) in enumerate(zip(sites, places, strict=True)):
        if process.poll() != 0:
            said = (place / "output").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"site {site} ended with {process.poll()}:\n{said[-3000:]}")
    return read(places, replication, rate, link.carried())


def read(places: Sequence[Path], replication: int, rate: float | None, carried: Sequence[int]) -> dict[str, Any]:
    """The figures of a finished run from the plans and metrics of its sites."""
    from train.federation.accounting import account_of
    from train.tracking import read_metrics

    own = [place / "runs" / "link" / "sites" / str(site) for site, place in enumerate(places)]
    lines = [[line for line in read_metrics(place / "metrics.jsonl").training if "outer_bytes" in line] for place in own]
    for site, of_site in enumerate(lines):
        if [line["outer_round"] for line in of_site] != list(range(1, ROUNDS + 1)) or of_site[-1]["outer_failed"]:
            raise RuntimeError(f"site {site}: its outer steps were {[line['outer_round'] for line in of_site]}, not 1 to {ROUNDS}")
    seconds = [min(line["outer_seconds"] for line in both) for both in zip(*lines, strict=True)]
    accounts = [account for place in own if (account := account_of(place)) is not None]
    busiest = max(accounts, key=lambda account: account.formula_ring)
    return {
        "rate_mbit": rate,
        "replication": replication,
        "steps": ROUNDS,
        "sent": busiest.sent / ROUNDS,
        "formula_ring": busiest.formula_ring / ROUNDS,
        "formula_payload": busiest.formula_payload / ROUNDS,
        "link_over_sent": max(carried) / busiest.sent,
        "seconds": seconds,
        "measured": statistics.median(seconds[1:]),
    }


def judge(row: dict[str, Any], constant: float) -> dict[str, Any]:
    """The row with the formula's seconds, and whether it is within the band."""
    ring, payload = (8 * row[f"formula_{kind}"] / (1e6 * row["rate_mbit"]) for kind in ("ring", "payload"))
    least, most = BAND[0] * ring, BAND[1] * (ring + max(constant, LEAST_CONSTANT))
    found = {"ring_seconds": ring, "payload_seconds": payload, "constant": constant, "least": least, "most": most}
    return {**row, **found, "ratio": row["measured"] / (ring + constant), "within": least <= row["measured"] <= most}


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    shaped = row["rate_mbit"] is not None
    sizes = "".join(f"{row[key] / 2**20:9.3f}" for key in ("sent", "formula_ring", "formula_payload"))
    formula = "".join(f"{row[key]:9.2f}" if shaped else f"{'-':>9}" for key in ("payload_seconds", "ring_seconds", "constant"))
    ends = f"{row['measured']:9.2f} {row['ratio']:7.2f}" if shaped else f"{row['measured']:9.2f} {'-':>7}"
    rate = f"{row['rate_mbit']:g}" if shaped else "none"
    print(f"r={row['replication']} {rate:>7}{sizes}{row['link_over_sent']:10.3f}{formula}{ends}", flush=True)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds of an outer step over the link's rate: measured as points, both formulas as lines; both axes logarithmic."""
    from train.report.style import BLUE, ORANGE, figure, save, tidy

    drawn = figure(6.5, 4.2)
    axes = drawn.add_subplot()
    shaped = sorted((row for row in rows if row["rate_mbit"] is not None), key=lambda row: float(row["rate_mbit"]))
    for replication, colour in ((2, BLUE), (1, ORANGE)):
        of_one = [row for row in shaped if row["replication"] == replication]
        if not of_one:
            continue
        rates, name = [row["rate_mbit"] for row in of_one], f"r = {replication}"
        axes.plot(rates, [row["measured"] for row in of_one], "o", color=colour, label=f"{name}, measured")
        ring = [row["ring_seconds"] + row["constant"] for row in of_one]
        axes.plot(rates, ring, "-", color=colour, label=f"{name}, ring / rate + constant")
        payload = [row["payload_seconds"] + row["constant"] for row in of_one]
        axes.plot(rates, payload, ":", color=colour, label=f"{name}, payload / rate + constant")
    axes.set_xscale("log")
    axes.set_yscale("log")
    tidy(axes, "An outer step of two sites over a shaped link", x="Mbit/s", y="seconds")
    axes.legend(fontsize=8.5, frameon=False)
    save(drawn, path)


def main() -> None:
    """Measure and print; fails when an outer step's seconds are not the formula's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 100.0], help="Mbit/s of each end of the link (20 100)")
    parser.add_argument("--replications", type=int, nargs="+", default=[2, 1], choices=(1, 2), help="sites that hold each expert (2 1)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if min(arguments.rates) <= 0:
        parser.error("--rates: Mbit/s; give more than 0")
    rows: list[dict[str, Any]] = []
    print(f"{ROUNDS} outer steps a run, every {EVERY} steps; MiB of a site in one, and seconds that it takes")
    columns = (("sent", 9), ("ring", 9), ("payload", 9), ("link/sent", 10), ("payload", 9), ("ring", 9), ("constant", 9), ("measured", 9))
    print(f"{'':3} {'Mbit/s':>7}{''.join(f'{name:>{width}}' for name, width in columns)} {'ratio':>7}")
    try:
        with tempfile.TemporaryDirectory() as temporary, hosts() as link:
            folder = Path(temporary)
            data = corpus(folder)
            for replication in arguments.replications:
                free = run(link, folder / f"{replication}_free", data, replication, None)
                rows.append(free)
                show(free)
                for rate in arguments.rates:
                    shaped = run(link, folder / f"{replication}_{rate:g}", data, replication, rate)
                    rows.append(judge(shaped, free["measured"]))
                    show(rows[-1])
    except OSError as error:
        raise SystemExit(f"throttled_link: no link between network namespaces here: {error}") from error
    if arguments.figure is not None:
        draw(rows, arguments.figure)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**provenance(), "sync_every": EVERY, "band": BAND, "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if not row.get("within", True)]
    for row in wrong:
        where = f"r={row['replication']}, {row['rate_mbit']:g} Mbit/s"
        print(f"{where}: {row['measured']:.2f} s is not within {row['least']:.2f} to {row['most']:.2f} s")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
