"""Flow control between a sequence and the writer of its stream, counted in bytes. Pure.

The engine counts what it produced and what the writer told it was taken; so the bound holds even while the event loop
does not run at all. The writer tells it in lumps of half a window, not for each delta.
"""

from dataclasses import dataclass, field

#: Counted for each piece of text beside its bytes, so that many tiny pieces are bounded too, in bytes.
PIECE_BYTES = 16


def cost(text: bytes) -> int:
    """What a piece of text takes from a window, in bytes. A token without text costs nothing: it can not be sent alone."""
    return len(text) + PIECE_BYTES if text else 0


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
