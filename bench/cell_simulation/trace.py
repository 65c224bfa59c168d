"""Requests of a trace file: when they come, how long prompt and answer are. Lengths stay as they were recorded."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at`: seconds from the first one."""

    at: float
    prompt_tokens: int
    output_tokens: int


def read(path: Path, requests: int | None = None) -> list[Arrival]:
    """The first `requests` of a file of JSON lines with timestamp (ms), input_length and output_length (tokens)."""
    with path.open() as lines:
        return parse(islice(lines, requests))


def parse(lines: Iterable[str]) -> list[Arrival]:
    """The same, of lines. Raises ValueError for a line that is none."""
    found = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            arrival = Arrival(entry["timestamp"] / 1e3, int(entry["input_length"]), int(entry["output_length"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no request of a trace: {error}") from None
        found.append(arrival)
    return found


def at_rate(arrivals: Sequence[Arrival], requests_per_s: float) -> Iterator[Arrival]:
    """The same requests in the same order at a mean rate, with the pattern of their times kept.

    The file counts in whole seconds and more; those of one reading are spread over the time until the next.
    """
    span = arrivals[-1].at - arrivals[0].at
    factor = (len(arrivals) - 1) / requests_per_s / span if span else 0.0
    first, place = arrivals[0].at, 0
    while place < len(arrivals):
        end = place
        while end < len(arrivals) and arrivals[end].at == arrivals[place].at:
            end += 1
        gap = arrivals[end].at - arrivals[place].at if end < len(arrivals) else 0.0
        for number, one in enumerate(arrivals[place:end]):
            at = (one.at - first + gap * number / (end - place)) * factor
            yield Arrival(at, one.prompt_tokens, max(1, one.output_tokens))
        place = end
