"""Calls timed in turns: a burst of each, round by round, so that what disturbs one burst disturbs its neighbours too."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bench.disturbance import Disturbance, between, read_cpu_times

#: A burst is at least as long, in seconds, and at least so many calls: its median is of several calls, and its ticks count.
BURST_S = 0.25
BURST_CALLS = 3


@dataclass(slots=True)
class Bursts:
    """What one thing took, in seconds: the least and the median of each burst, and whether the burst was disturbed."""

    least_s: list[float] = field(default_factory=list)
    median_s: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)

    @property
    def least(self) -> float:
        """The best call of all."""
        return min(self.least_s)

    @property
    def median(self) -> float:
        """The median over the bursts' medians."""
        return statistics.median(self.median_s)

    def add(self, calls_s: list[float], disturbed: bool) -> None:
        """One more burst."""
        self.least_s.append(min(calls_s))
        self.median_s.append(statistics.median(calls_s))
        self.disturbed.append(disturbed)


def ratio(upper: Bursts, lower: Bursts) -> float:
    """How much longer one thing takes than another: the median over the rounds, each round's bursts compared with one another.

    Rounds in which one of the two was disturbed are left out while there are others.
    """
    pairs = list(zip(upper.median_s, lower.median_s, upper.disturbed, lower.disturbed, strict=True))
    quiet = [above / below for above, below, *disturbed in pairs if not any(disturbed)]
    return statistics.median(quiet or [above / below for above, below, *_ in pairs])


def doubts(*kept: Bursts) -> str:
    """Of how many bursts how many were disturbed, in words."""
    return f"{sum(sum(one.disturbed) for one in kept)} of {sum(len(one.disturbed) for one in kept)}"


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int, burst_s: float = BURST_S) -> dict[str, Bursts]:
    """Measure all of them. Each is called once before."""
    for call in calls.values():
        call()
    kept = {name: Bursts() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before = read_cpu_times()
            calls_s = list(_burst(call, burst_s))
            disturbance: Disturbance = between(before, read_cpu_times(), (os.getpid(),))
            kept[name].add(calls_s, disturbance.disturbed)
    return kept


def _burst(call: Callable[[], object], burst_s: float) -> Iterator[float]:
    end, left = time.perf_counter() + burst_s, BURST_CALLS
    while left > 0 or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        yield time.perf_counter() - began
        left -= 1
