"""The two clocks that everything above reads: one for durations, one for what is written down.

They are the system's. A simulator that runs whole processes in virtual time puts its own in their place, for as long as its
world lasts; nothing else does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

#: Seconds by which a wait ends late when the process stood still rather than being busy: nothing was heard meanwhile, whoever
#: came or answered.
STOOD_STILL_S = 0.5


class Clocks(Protocol):
    """A source of time, in seconds."""

    def monotonic(self) -> float:
        """Never goes back; its zero means nothing."""

    def wall(self) -> float:
        """Since the epoch; may jump."""


class SystemClocks:
    """The clocks of this machine."""

    def monotonic(self) -> float:
        """See Clocks."""
        return time.monotonic()

    def wall(self) -> float:
        """See Clocks."""
        return time.time()


_source: Clocks = SystemClocks()


def monotonic() -> float:
    """Reading of the clock for durations, in seconds."""
    return _source.monotonic()


def wall() -> float:
    """Reading of the clock on the wall, in seconds since the epoch."""
    return _source.wall()


@contextmanager
def replaced_by(source: Clocks) -> Iterator[None]:
    """Inside, `source` tells the time in this process."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
