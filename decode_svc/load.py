"""How busy a decode member is: a value. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the member is, for Watch and for gauges. free_pages: of the shortest group, not promised and not waited for.

    running: with pages; waiting: before the first token; preempted: without pages; moving: standing still to be moved.
    expected_output_tokens: output that a new seat is promised; None: all of its max_output_tokens.
    """

    free_pages: int
    promised_pages: int
    running: int
    paused: int
    waiting: int
    waiting_tokens: int
    preempted: int
    moving: int
    expected_output_tokens: int | None
    grants_open: int
    draining: bool
    steps: int
