"""Flow control between a sequence and the writer of its stream, counted in bytes. Pure.

The engine counts what it produced and what the writer told it was taken; so the bound holds even while the event loop
does not run at all. The writer tells it in lumps of half a window, not for each delta.
"""

from dataclasses import dataclass, field
from enum import Enum

#: Counted for each piece of text beside its bytes, so that many tiny pieces are bounded too, in bytes.
PIECE_BYTES = 16
#: Counted for each log-probability: id, value and the token's bytes.
LOG_PROB_BYTES = 16


class SlowReader(Enum):
    """What happens when output is not read in time."""

    PAUSE = "pause"  # the sequence waits
    COALESCE = "coalesce"  # it runs on for a larger window; what waits becomes one delta
    FAIL = "fail"  # the request ends


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Output of a seat that is not taken at which its sequence pauses, in bytes."""

    stream_bytes: int = 64 * 1024
    coalesce_bytes: int = 1024 * 1024

    def of(self, slow_reader: SlowReader) -> int:
        """The window of one seat."""
        return self.coalesce_bytes if slow_reader is SlowReader.COALESCE else self.stream_bytes


def cost(text: bytes, log_probs: int = 0) -> int:
    """What a piece of text takes from a window, in bytes, with so many log-probabilities beside it.

    A token without text costs nothing: it can not be sent alone.
    """
    return len(text) + PIECE_BYTES + LOG_PROB_BYTES * log_probs if text else 0


def log_probs_of(tokens: int, top: int | None) -> int:
    """How many log-probabilities go with so many tokens; `top` as in SequenceSpec.log_probs."""
    return 0 if top is None else tokens * (1 + top)


@dataclass(slots=True)
class FlowWindow:
    """The engine's side: pause at `high_water_bytes` not yet taken, resume at or below half of it.

    Never stuck: when the writer has taken everything, what it has not told yet is less than half a window.
    """

    high_water_bytes: int
    produced_bytes: int = 0
    taken_bytes: int = 0
    paused: bool = field(default=False, init=False)

    @property
    def untaken_bytes(self) -> int:
        """Produced and not yet known to be taken."""
        return self.produced_bytes - self.taken_bytes

    def produce(self, amount_bytes: int) -> None:
        """Count output that was made."""
        self.produced_bytes += amount_bytes
        if self.produced_bytes - self.taken_bytes >= self.high_water_bytes:
            self.paused = True

    def take(self, amount_bytes: int) -> None:
        """Count output that was written to the stream. Raises ValueError for more than there was."""
        if amount_bytes < 0 or amount_bytes > self.untaken_bytes:
            raise ValueError(f"amount_bytes is {amount_bytes}; between 0 and {self.untaken_bytes} bytes can be taken")
        self.taken_bytes += amount_bytes
        if self.paused and self.untaken_bytes <= self.high_water_bytes // 2:
            self.paused = False


@dataclass(slots=True)
class Credit:
    """The writer's side: what it took and has not told the engine yet."""

    high_water_bytes: int
    untold_bytes: int = 0

    def add(self, amount_bytes: int) -> int:
        """Count written output; returns the bytes to tell the engine now, 0 while it is not worth a message."""
        self.untold_bytes += amount_bytes
        if self.untold_bytes * 2 < self.high_water_bytes:
            return 0
        due_bytes, self.untold_bytes = self.untold_bytes, 0
        return due_bytes
