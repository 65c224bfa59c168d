"""Costs as counts: how many lines of Python one operation runs. The same on every machine and in every run."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

#: Makes the operation at one size: everything that is there before is made by it, only what it returns is counted.
Prepare = Callable[[int], Callable[[], object]]

#: Times that an operation is repeated for its time.
REPEATS = 25


@dataclass(frozen=True, slots=True)
class Case:
    """One operation. `size` says what n counts. `linear`: why it may grow with n; empty when it must not."""

    name: str
    size: str
    prepare: Prepare
    linear: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operation: lines of Python run, and its median time in seconds."""

    lines: int
    seconds: float


def lines_run(operation: Callable[[], object]) -> int:
    """Lines of Python that a call runs, loops and everything it calls included. What C code does inside one is not seen."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count


def cost(case: Case, size: int) -> Cost:
    """Both figures at one size. The operation leaves things as they were, or grows them by little."""
    operation = case.prepare(size)
    operation()
    lines, seconds = lines_run(operation), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - began)
    return Cost(lines, statistics.median(seconds))
