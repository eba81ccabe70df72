"""The output of rank 0: live to the user's terminal, and as plain lines to `logs/rank_0.log`. Of several sites the first one speaks.

When our own output is a terminal, rank 0 gets a pseudo-terminal of the same size, so that its progress line is drawn as if it had the
real one; otherwise it gets a pipe. The log keeps finished lines only: what a carriage return or an erased line overwrites is left out.
"""

import contextlib
import errno
import fcntl
import os
import re
import select
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import BinaryIO

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_])")
_ERASE = re.compile(rb"\x1b\[[0-2]?K|\r(?!\n)")
_BLOCK = 65536


class PlainLines:
    """Turn a terminal's byte stream into plain lines: colours removed, redrawn lines dropped."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._line = b""

    def feed(self, data: bytes) -> None:
        """Take more bytes; finished lines are written at once."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._write(line)
        if len(self._line) > _BLOCK:  # a redrawn line never ends: keep what is visible of it
            self._line = _ERASE.split(self._line)[-1]

    def close(self) -> None:
        """Write the last, unfinished line."""
        if self._line:
            self._write(self._line)
            self._line = b""

    def _write(self, line: bytes) -> None:
        visible = _ERASE.split(line.rstrip(b"\r"))[-1]
        text = _ESCAPE.sub(b"", visible).rstrip()
        if text or visible == line.rstrip(b"\r"):
            # A full disk costs lines of the log. If it ended the copying, rank 0 would wait for ever for somebody to read its output.
            with contextlib.suppress(OSError):
                self._stream.write(text + b"\n")
                self._stream.flush()


class Terminal:
    """The two ends that the workers write to (`stdout`, `stderr`), and the thread that copies them on."""

    def __init__(self, log: Path) -> None:
        self._stop = threading.Event()
        self._log = log.open("ab")
        self._tty = sys.stdout.isatty()
        out_read, self.stdout = os.openpty() if self._tty else os.pipe()
        error_read, self.stderr = os.pipe()
        if self._tty:
            attributes = termios.tcgetattr(self.stdout)
            attributes[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n
            termios.tcsetattr(self.stdout, termios.TCSANOW, attributes)
            self.resize()
        self._sources = {
            out_read: (sys.stdout, PlainLines(self._log)),
            error_read: (sys.stderr, PlainLines(self._log)),
        }
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def resize(self) -> None:
        """Give the pseudo-terminal the size of the real one."""
        if self._tty:
            size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, size)

    def handed_over(self) -> None:
        """Close our copies of the ends that the child has by now."""
        os.close(self.stderr)
        if not self._tty:
            os.close(self.stdout)

    def close(self, wait: float = 2.0) -> None:
        """Copy what is left, at most `wait` seconds while a stray process still holds an end, and close the log."""
        if self._tty:
            os.close(self.stdout)
        self._thread.join(timeout=wait)
        self._stop.set()
        self._thread.join()
        for _, lines in self._sources.values():
            lines.close()
        with contextlib.suppress(OSError):
            self._log.close()

    def _copy(self) -> None:
        open_ends = set(self._sources)
        while open_ends and not self._stop.is_set():
            ready, _, _ = select.select(list(open_ends), [], [], 0.2)
            for end in ready:
                data = self._read(end)
                if not data:
                    open_ends.discard(end)
                    continue
                target, lines = self._sources[end]
                lines.feed(data)
                _forward(target.fileno(), data)
        for end in self._sources:
            os.close(end)

    @staticmethod
    def _read(end: int) -> bytes:
        try:
            return os.read(end, _BLOCK)
        except OSError as error:
            if error.errno == errno.EIO:  # Linux: the last holder of a pseudo-terminal has closed it
                return b""
            raise


class LogOnly:
    """The ends of a site whose output goes to its log alone; the same methods as `Terminal`."""

    def __init__(self, log: Path) -> None:
        self.stdout = self.stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def resize(self) -> None:
        """A log has no size."""

    def handed_over(self) -> None:
        """Close our copy of the end that the child has by now."""
        os.close(self.stdout)

    def close(self, wait: float = 2.0) -> None:
        """Nothing is left to copy."""


def _forward(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BrokenPipeError:  # `leantron pretrain | head`: the run goes on, the log has the rest
            return
