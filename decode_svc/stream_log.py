"""Output of one request between the engine's steps and the writer of its stream: bounded, numbered, ended once. Pure.

Numbers are given when a delta is published, that is when the writer takes it; what waits until then grows as one delta.
The terminal comes last, exactly once, and fixing it closes the log to everything else in the same call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from decode_svc.flow import cost

E = TypeVar("E")

#: A log may hold this many windows before flow control must be broken.
HARD_BOUND_WINDOWS = 2


class LogOverflow(Exception):
    """More output than flow control allows: an error of programming."""

    def __init__(self, held_bytes: int, bound_bytes: int) -> None:
        super().__init__(f"the stream log holds {held_bytes} bytes; flow control must keep it under {bound_bytes} bytes")


class LogEnded(Exception):
    """Output after the terminal: an error of programming. Nothing was added."""


@dataclass(frozen=True, slots=True)
class Published:
    """One numbered delta. `selected_ids` are all tokens chosen since the one before; `cost_bytes` goes back to the window."""

    sequence_no: int
    text: str
    token_ids: tuple[int, ...]
    selected_ids: tuple[int, ...]
    text_bytes: int
    cost_bytes: int


@dataclass(slots=True)
class StreamLog(Generic[E]):
    """`final_only` keeps all text for the terminal and publishes no delta.

    next_sequence_no: number of the next event, a delta or the terminal.
    waiting_since: reading of the caller's clock when the oldest unpublished text came, in seconds; None when there is none.
    """

    next_sequence_no: int
    high_water_bytes: int
    final_only: bool = False
    waiting_since: float | None = field(default=None, init=False)
    held_bytes: int = field(default=0, init=False)
    sent_bytes: int = field(default=0, init=False)
    _text: bytearray = field(default_factory=bytearray, init=False)
    _shown: list[int] = field(default_factory=list, init=False)
    _selected: list[int] = field(default_factory=list, init=False)
    _terminal: E | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)

    def add(self, text: bytes, shown: Sequence[int], selected: Sequence[int], now: float) -> None:
        """Append safe bytes of whole characters, ids whose last byte is in them, ids chosen. Raises LogEnded, LogOverflow."""
        if self._ended:
            raise LogEnded("output after the terminal")
        self._text += text
        self._shown += shown
        self._selected += selected
        if self.final_only or not text:
            return
        self.held_bytes += cost(text)
        if self.waiting_since is None:
            self.waiting_since = now
        if self.held_bytes > HARD_BOUND_WINDOWS * self.high_water_bytes:
            raise LogOverflow(self.held_bytes, HARD_BOUND_WINDOWS * self.high_water_bytes)

    def end(self, terminal: E) -> None:
        """Fix the terminal: from now on nothing can be added. Raises LogEnded when it was fixed before."""
        if self._ended:
            raise LogEnded("a second terminal")
        self._ended = True
        self._terminal = terminal

    def publish(self) -> Published | None:
        """Number everything that waits as one delta; None when there is nothing to show.

        Tokens without text wait for some, or for the end.
        """
        if not self._showable:
            return None
        text_bytes = len(self._text)
        published = Published(
            sequence_no=self.next_sequence_no,
            text=self._text.decode(),
            token_ids=tuple(self._shown),
            selected_ids=tuple(self._selected),
            text_bytes=text_bytes,
            cost_bytes=self.held_bytes,
        )
        self.next_sequence_no += 1
        self.sent_bytes += text_bytes
        self.held_bytes = 0
        self.waiting_since = None
        self._text.clear()
        self._shown.clear()
        self._selected.clear()
        return published

    def terminal(self) -> E | None:
        """The terminal, once, when it is fixed and every delta before it was published."""
        if self._terminal is None or self._showable:
            return None
        terminal, self._terminal = self._terminal, None
        return terminal

    def whole_text(self) -> str:
        """The text for the terminal with `final_only`, else nothing."""
        return self._text.decode() if self.final_only else ""

    @property
    def ready(self) -> bool:
        """Whether `publish` or `terminal` has something."""
        return self._terminal is not None or self._showable

    @property
    def ended(self) -> bool:
        """Whether the terminal is fixed."""
        return self._ended

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text that are held."""
        return len(self._text)

    @property
    def _showable(self) -> bool:
        return not self.final_only and bool(self._text or (self._ended and self._shown))
