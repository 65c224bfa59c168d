"""Requests of a trace at a rate that changes, and other loads made of it. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench.cell_simulation.trace import Arrival, at_rate


class Variant(Enum):
    """What is made of a trace."""

    TRACE = "trace"
    LATER = "later"
    """From its middle on."""
    SHUFFLED = "shuffled"
    """Its times, and its requests in another order."""
    SHORT = "short"
    """Its times, with short prompts and outputs of all lengths alike."""


#: Prompt and output tokens of Variant.SHORT, least and most.
SHORT_PROMPT, SHORT_OUTPUT = (200, 2000), (50, 600)


def varied(arrivals: Sequence[Arrival], variant: Variant, seed: int) -> list[Arrival]:
    """The load that a variant makes of a trace."""
    dice = random.Random(seed)
    if variant is Variant.LATER:
        return list(arrivals[len(arrivals) // 2 :])
    if variant is Variant.SHORT:
        return [Arrival(one.at, dice.randint(*SHORT_PROMPT), dice.randint(*SHORT_OUTPUT)) for one in arrivals]
    if variant is Variant.SHUFFLED:
        others = dice.sample(arrivals, len(arrivals))
        return [replace(other, at=one.at) for one, other in zip(arrivals, others, strict=True)]
    return list(arrivals)


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
