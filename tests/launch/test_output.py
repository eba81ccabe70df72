"""What a terminal's byte stream leaves in a log, and how packages and devices are found."""

import io
from pathlib import Path

import pytest

from launch.output import PlainLines
from launch.packages import ROOT, shadowed
from launch.plan import layer_lines
from launch.torchrun import child_environment, command


def plain(*pieces: bytes) -> bytes:
    stream = io.BytesIO()
    lines = PlainLines(stream)
    for piece in pieces:
        lines.feed(piece)
    lines.close()
    return stream.getvalue()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], b"one\ntwo\n"),
        ([b"one\r\ntwo"], b"one\ntwo\n"),
        ([b"o", b"n", b"e\n\nnext\n"], b"one\n\nnext\n"),
        ([b"\x1b[1;31mred\x1b[0m text\n"], b"red text\n"),
        ([b"step 1\rstep 2\rstep 3\n"], b"step 3\n"),
        ([b"step 1", b"\r\x1b[2Kstep 2", b"\r\x1b[2K", b"done\n"], b"done\n"),
        ([b"\x1b[?25lstep 1\r\x1b[2K\n"], b""),
        ([b"\x1b]0;title\x07text\n"], b"text\n"),
        ([b"half \xc3", b"\xa9 done\n"], "half é done\n".encode()),
    ],
)
def test_plain_lines(pieces: list[bytes], expected: bytes) -> None:
    assert plain(*pieces) == expected


def test_an_endless_line_does_not_grow() -> None:
    stream = io.BytesIO()
    lines = PlainLines(stream)
    for step in range(20000):
        lines.feed(b"\r\x1b[2Kstep %d" % step)
    assert len(lines._line) < 2 * 65536
    lines.feed(b"\n")
    assert stream.getvalue() == b"step 19999\n"


def test_our_packages_are_ours() -> None:
    assert shadowed() == {}


def test_the_childs_command_stays_on_loopback() -> None:
    line = command(Path("runs/x"), 4)
    assert "--rdzv-endpoint=127.0.0.1:0" in line and "--local-addr=127.0.0.1" in line and "--nproc-per-node=4" in line
    assert line[-4:] == ["-m", "train.pretrain", "--config", "runs/x/config.yaml"]


def test_the_childs_environment_leaves_what_the_user_set() -> None:
    ours = child_environment(2, {})
    assert (ours["PYTHONSAFEPATH"], ours["PYTHONPATH"]) == ("1", str(ROOT))
    assert int(ours["OMP_NUM_THREADS"]) >= 1
    theirs = child_environment(2, {"OMP_NUM_THREADS": "7", "PYTHONPATH": "/mine", "GLOO_SOCKET_IFNAME": "eth0"})
    assert (theirs["OMP_NUM_THREADS"], theirs["PYTHONPATH"], theirs["GLOO_SOCKET_IFNAME"]) == ("7", f"{ROOT}:/mine", "eth0")


def test_equal_layers_share_a_line() -> None:
    s2 = {"attention": "s2", "density": 0.25, "mlp": "dense"}
    dense = {"attention": "dense", "density": 1.0, "mlp": "moe"}
    assert layer_lines([dense, s2, s2, s2]) == [
        "0: dense attention; Mixture of Experts",
        "1 to 3: s2 attention, 25.0% of the causal pairs; dense MLP",
    ]


def test_a_full_disk_costs_lines_of_the_log_and_nothing_else(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full to write to")
    with open("/dev/full", "ab", buffering=0) as full:
        lines = PlainLines(full)
        lines.feed(b"one\ntwo\nthree")
        lines.close()
