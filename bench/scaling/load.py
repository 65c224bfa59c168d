"""Requests of a trace at a rate that changes. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.cell_simulation.trace import Arrival, at_rate


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many seconds at a mean rate."""

    seconds: float
    requests_per_s: float


def along(arrivals: Sequence[Arrival], stretches: Sequence[Stretch]) -> Iterator[Arrival]:
    """The requests of a trace, again from its start when it ends, until the last stretch is over. The pattern of arrivals is
    kept: only their mean rate changes."""
    began, done = 0.0, 0.0
    source = _endless(arrivals)
    one = next(source)
    for stretch in stretches:
        size = stretch.seconds * stretch.requests_per_s
        while one.at < done + size:
            yield Arrival(began + (one.at - done) / stretch.requests_per_s, one.prompt_tokens, one.output_tokens)
            one = next(source)
        began, done = began + stretch.seconds, done + size


def _endless(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """One a second in the mean."""
    offset = 0.0
    while True:
        for one in at_rate(arrivals, 1.0):
            yield Arrival(offset + one.at, one.prompt_tokens, one.output_tokens)
        offset += len(arrivals)
