"""The console: the time left, one plain flushed line a log without a terminal, one live line on a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.tracking.console import ConsoleTracker, Pace, format_duration, training_parts

LINE = {"step": 12, "loss": 3.21456, "bits_per_byte": 4.6375, "lr": 3e-4, "grad_norm": 1.25, "tokens_per_second": 12345.6}


def test_the_time_left_is_the_pace_of_the_last_logs() -> None:
    now = iter([0.0, 10.0, 20.0, 50.0])
    pace = Pace(100, clock=lambda: next(now))
    assert pace.remaining(1) is None
    assert pace.remaining(6) == pytest.approx(94 * 10 / 5)
    assert pace.remaining(11) == pytest.approx(89 * 20 / 10)
    assert pace.remaining(11) is None, "a step that does not rise is a rollback: the old pace is forgotten"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (100 * 3600, "100:00:00"), (-1, "0:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_plain_line_has_the_figures() -> None:
    assert training_parts(LINE, 100, 88.0) == (
        "step 12/100 | loss 3.2146 | 4.638 bits/byte | lr 3.00e-04 | grad 1.250 | 12,346 tokens/s | ETA 0:01:28"
    )
    more = training_parts({**LINE, "mfu": 0.4321, "skipped_steps": 2, "loss": float("nan")}, 100, None)
    assert "MFU 43.2%" in more and "skipped 2" in more and "loss nan" in more and "ETA" not in more


def test_without_a_terminal_each_log_is_one_flushed_line() -> None:
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = len(self.getvalue())

    stream = Stream()
    tracker = ConsoleTracker(100, stream)
    for step in (1, 2):
        tracker.log({**LINE, "step": step})
        assert stream.flushed == len(stream.getvalue())
    tracker.log({"step": 2, "val_loss": 2.5, "val_bits_per_byte": 3.25, "bigram_bits_per_byte": 3.5})
    tracker.log({"step": 2, "checkpoint_seconds": 1.0})
    tracker.finish("completed")
    lines = stream.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 1/100", "step 2/100", "validation at step 2", "run completed"]
    assert "3.250 bits/byte | bigram 3.500 bits/byte" in lines[2]
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_there_is_one_live_line(tmp_path: Path) -> None:
    """Under a pseudo-terminal of 80 columns the figures fit on one line, and other output stands above it."""
    body = (
        "from train.tracking.console import ConsoleTracker\n"
        "tracker = ConsoleTracker(5000)\n"
        "for step in range(1, 4):\n"
        "    tracker.log({'step': 1000 + step, 'loss': 3.2, 'bits_per_byte': 4.6, 'tokens_per_second': 1234567.0, 'lr': 1e-3})\n"
        "    print('a line from elsewhere')\n"
        "tracker.log({'step': 1003, 'val_loss': 2.5, 'val_bits_per_byte': 3.25})\n"
        "tracker.finish('completed')\n"
    )
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", body], stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=env)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    drawn = [line for line in re.split(r"[\r\n]+", text) if "1003/5000" in line]
    assert drawn, text
    for part in ("loss 3.200", "4.60 bits/byte", "1,234,567 tokens/s", "ETA 0:"):
        assert part in drawn[-1], drawn[-1]
    assert len(drawn[-1].rstrip()) <= 80
    assert "a line from elsewhere" in text
    assert "validation at step 1003 | loss 2.5000 | 3.250 bits/byte" in text
    assert "run completed" in text
