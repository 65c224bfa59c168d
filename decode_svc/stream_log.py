"""Output of one request between the engine's steps and the writer of its stream: bounded, numbered, ended once. Pure.

Numbers are given when a delta is published, that is when the writer takes it; what waits until then grows as one delta.
The terminal comes last, exactly once, and fixing it closes the log to everything else in the same call.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from decode_svc.flow import cost, log_probs_of
from decode_svc.messages import SeatEnded
from engine.log_probs import TokenLogProb

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt as an event: ids, text when it is echoed, and log-probabilities of all but the first, when they are wanted."""

    token_ids: tuple[int, ...]
    text: str = ""
    log_probs: tuple[TokenLogProb, ...] = ()


#: With `final_only` so many tokens are told at once: fewer are chosen again faster than they are sent one by one.
TELL_TOKENS = 16

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
    """One numbered delta. `selected_ids` are all tokens chosen since the one before; `cost_bytes` goes back to the window.

    sequence_no: None when there is nothing to show and only the chosen tokens are told; it then takes no number.
    next_sequence_no: number of the event that follows.
    log_probs: one for each of token_ids, when they are wanted. held_log_probs: those of the last of selected_ids, which are not
    shown yet. prompt: this is the prompt, and nothing else is in it.
    choice: which of several outputs it is of; ended: it is the last of that one, which ended so.
    """

    sequence_no: int | None
    next_sequence_no: int
    text: str
    token_ids: tuple[int, ...]
    selected_ids: tuple[int, ...]
    text_bytes: int
    cost_bytes: int
    log_probs: tuple[TokenLogProb, ...] = ()
    held_log_probs: tuple[TokenLogProb, ...] = ()
    prompt: PromptPart | None = None
    choice: int = 0
    ended: SeatEnded | None = None


@dataclass(slots=True)
class StreamLog(Generic[E]):
    """`final_only` keeps all text for the terminal; what it publishes tells chosen tokens and shows nothing.

    next_sequence_no: number of the next event, a delta or the terminal.
    waiting_since: reading of the caller's clock when the oldest unpublished text came, in seconds; None when there is none.
    top: as SequenceSpec.log_probs. Tokens are shown in the order in which they were chosen, so the log-probability of each waits
    in one queue until its token is shown; `held` are those that wait from the beginning, of tokens that earlier attempts chose.
    """

    next_sequence_no: int
    high_water_bytes: int
    final_only: bool = False
    top: int | None = None
    held: Sequence[TokenLogProb] = ()
    waiting_since: float | None = field(default=None, init=False)
    held_bytes: int = field(default=0, init=False)
    sent_bytes: int = field(default=0, init=False)
    _text: bytearray = field(default_factory=bytearray, init=False)
    _shown: list[int] = field(default_factory=list, init=False)
    _selected: list[int] = field(default_factory=list, init=False)
    _log_probs: list[TokenLogProb] = field(default_factory=list, init=False)
    _waiting_log_probs: deque[TokenLogProb] = field(default_factory=deque, init=False)
    _prompt: PromptPart | None = field(default=None, init=False)
    _terminal: E | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._waiting_log_probs.extend(self.held)

    def add(
        self,
        text: bytes,
        shown: Sequence[int],
        selected: Sequence[int],
        now: float,
        log_probs: Sequence[TokenLogProb] = (),
    ) -> None:
        """Append safe bytes of whole characters, ids whose last byte is in them, ids chosen, and the log-probability of each
        chosen one when they are wanted. Raises LogEnded, LogOverflow."""
        if self._ended:
            raise LogEnded("output after the terminal")
        self._text += text
        self._shown += shown
        self._selected += selected
        if self.top is not None:
            self._waiting_log_probs.extend(log_probs)
            self._log_probs.extend(self._waiting_log_probs.popleft() for _ in shown)
        if self.final_only or not text:
            return
        self.held_bytes += cost(text, log_probs_of(len(shown), self.top))
        if self.waiting_since is None:
            self.waiting_since = now
        if self.held_bytes > HARD_BOUND_WINDOWS * self.high_water_bytes:
            raise LogOverflow(self.held_bytes, HARD_BOUND_WINDOWS * self.high_water_bytes)

    def add_prompt(self, prompt: PromptPart) -> None:
        """The prompt goes out before any output. Raises LogEnded."""
        if self._ended:
            raise LogEnded("the prompt after the terminal")
        assert not self._selected, "the prompt comes before the first token"
        self._prompt = prompt

    def end(self, terminal: E) -> None:
        """Fix the terminal: from now on nothing can be added. Raises LogEnded when it was fixed before."""
        if self._ended:
            raise LogEnded("a second terminal")
        self._ended = True
        self._terminal = terminal

    def publish(self) -> Published | None:
        """Number everything that waits as one delta; None when there is nothing to show, nor (`final_only`) enough to tell.

        Tokens without text wait for some, or for the end.
        """
        if not self._showable:
            return None
        if self._prompt is not None:
            return self._tell_prompt(self._prompt)
        if self.final_only:
            return self._tell_tokens()
        text_bytes = len(self._text)
        told, self._log_probs = tuple(self._log_probs), []
        published = Published(
            sequence_no=self.next_sequence_no,
            next_sequence_no=self.next_sequence_no + 1,
            text=self._text.decode(),
            token_ids=tuple(self._shown),
            selected_ids=tuple(self._selected),
            text_bytes=text_bytes,
            cost_bytes=self.held_bytes,
            log_probs=told,
            held_log_probs=self.untold_log_probs,
        )
        self.next_sequence_no += 1
        self.sent_bytes += text_bytes
        self.held_bytes = 0
        self.waiting_since = None
        self._text.clear()
        self._shown.clear()
        self._selected.clear()
        return published

    def rest(self, *, numbered: bool) -> Published:
        """All that is left, once, after the end; with `final_only` all there was. Instead of `publish` and `terminal`."""
        assert self._ended, "the rest is known only after the end"
        text_bytes, number = len(self._text), self.next_sequence_no
        self.next_sequence_no += numbered
        left = Published(
            sequence_no=number if numbered else None,
            next_sequence_no=self.next_sequence_no,
            text=self._text.decode(),
            token_ids=tuple(self._shown),
            selected_ids=tuple(self._selected),
            text_bytes=text_bytes,
            cost_bytes=self.held_bytes,
            log_probs=tuple(self._log_probs),
        )
        self.sent_bytes += text_bytes
        self.held_bytes = 0
        self.waiting_since = None
        for part in (self._text, self._shown, self._selected, self._log_probs):
            part.clear()
        return left

    def terminal(self) -> E | None:
        """The terminal, once, when it is fixed and every delta before it was published."""
        if self._terminal is None or self._showable:
            return None
        terminal, self._terminal = self._terminal, None
        return terminal

    def whole_text(self) -> str:
        """The text for the terminal with `final_only`, else nothing."""
        return self._text.decode() if self.final_only else ""

    def whole_tokens(self) -> tuple[Sequence[int], Sequence[TokenLogProb]]:
        """The ids shown and their log-probabilities for the terminal with `final_only`, else nothing."""
        return (self._shown, self._log_probs) if self.final_only else ((), ())

    @property
    def untold_ids(self) -> tuple[int, ...]:
        """Tokens chosen that nothing published has told."""
        return tuple(self._selected)

    @property
    def untold_log_probs(self) -> tuple[TokenLogProb, ...]:
        """Log-probabilities of those of `untold_ids` that nothing published has returned: the last ones."""
        waiting = list(self._waiting_log_probs)
        count = min(len(self._selected), len(self._log_probs) + len(waiting))
        shown = max(0, count - len(waiting))
        return (*self._log_probs[len(self._log_probs) - shown :], *waiting[len(waiting) - (count - shown) :])

    @property
    def caught_up(self) -> bool:
        """Whether everything that can be published now was."""
        return not self._showable

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
        if self._prompt is not None:
            return True
        if self.final_only:
            return len(self._selected) >= TELL_TOKENS and not self._ended
        return bool(self._text or (self._ended and self._shown))

    def _tell_prompt(self, prompt: PromptPart) -> Published:
        number, self._prompt = self.next_sequence_no, None
        self.next_sequence_no += 1
        return Published(number, number + 1, "", (), (), 0, 0, prompt=prompt)

    def _tell_tokens(self) -> Published:
        # Nothing is returned before the end, so every token that is told has its log-probability beside it.
        told, held = tuple(self._selected), self.untold_log_probs
        self._selected.clear()
        return Published(None, self.next_sequence_no, "", (), told, 0, 0, held_log_probs=held)
