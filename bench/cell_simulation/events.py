"""Virtual time: calls in the order of their times, those of one time in the order in which they were asked for."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Events:
    """A queue of calls. `now` is in seconds from the start of the run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        """Make a call at `when`, which is not in the past."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        """Make a call so many seconds from now."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float) -> None:
        """Make all calls up to `until`, in seconds."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self._queue)
            self.done += 1
            call(*arguments)
        self.now = max(self.now, until)
