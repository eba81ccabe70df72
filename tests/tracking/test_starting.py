"""A tracker that starts slowly holds nothing up, and gets every line in the end."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from train.tracking.starting import StartingTracker


class Memory:
    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.status: str | None = None

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)

    def finish(self, status: str) -> None:
        self.status = status


def test_a_slow_start_holds_nothing_up_and_no_line_is_lost() -> None:
    gate, memory, told = threading.Event(), Memory(), list[Exception]()

    def start() -> Memory:
        gate.wait(30)
        return memory

    began = time.monotonic()
    tracker = StartingTracker(start, told.append, patience=0.2)
    for step in (1, 2, 3):
        tracker.log({"step": step})
    assert time.monotonic() - began < 5 and memory.lines == []
    gate.set()
    while not memory.lines:
        tracker.log({"step": 4})
        time.sleep(0.01)
    steps = [line["step"] for line in memory.lines]
    assert steps[:3] == [1, 2, 3] and set(steps[3:]) == {4} and told == []
    tracker.finish("completed")
    assert memory.status == "completed"


def test_lines_that_waited_until_the_end_arrive() -> None:
    memory = Memory()

    def start() -> Memory:
        time.sleep(0.3)
        return memory

    tracker = StartingTracker(start, lambda _: None, patience=0.0)
    tracker.log({"step": 1})
    tracker.finish("preempted")
    assert [line["step"] for line in memory.lines] == [1] and memory.status == "preempted"


def test_a_failing_start_is_told_once_and_takes_lines_without_keeping_them() -> None:
    told: list[Exception] = []

    def start() -> Memory:
        raise ConnectionError("away")

    tracker = StartingTracker(start, told.append)
    tracker.log({"step": 1})
    tracker.finish("completed")
    assert [str(error) for error in told] == ["away"] and not tracker._lines
