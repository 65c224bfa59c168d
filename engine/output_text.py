"""The text of one sequence: from chosen tokens to bytes that may be shown, and which token each byte belongs to. Pure."""

from collections import deque
from dataclasses import dataclass

from text.detokeniser import TextStream, Utf8Policy
from text.stop_matcher import StopMatcher, StopRules


@dataclass(frozen=True, slots=True)
class Released:
    """What became safe to show. `hit` is the index of the stop that ended the output."""

    text: bytes
    token_ids: tuple[int, ...]
    hit: int | None = None


class OutputText:
    """Detokeniser, then stop matcher, with the bookkeeping of what was shown.

    Places are counted in bytes of decoded text. A token counts as shown when the character that holds its last byte
    was released; one without bytes, when all text before it was. Every queue entry is made once and taken once, so a
    token costs the same at any length.
    """

    __slots__ = (
        "_arrivals",
        "_decoded",
        "_half",
        "_matcher",
        "_released",
        "_stream",
        "_unshown",
        "longest_hold_s",
        "shown_tokens",
    )

    def __init__(self, stream: TextStream, rules: StopRules) -> None:
        self._stream = stream
        self._matcher = StopMatcher(rules)
        self._decoded = 0
        self._released = 0
        #: Tokens whose last byte waits in the stream for the rest of its character.
        self._half: list[int] = []
        #: (place after the token's last byte, token), in order.
        self._unshown: deque[tuple[int, int]] = deque()
        #: (place after what one push decoded, time of the push), for text that is not released yet.
        self._arrivals: deque[tuple[int, float]] = deque()
        self.shown_tokens = 0
        self.longest_hold_s = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes decoded and not released: those that may become part of a stop, or those that a stop took away."""
        return self._decoded - self._released

    def push(self, token: int, now: float, armed: bool) -> Released:
        """Add a token. Raises BadUtf8, with nothing changed, when its bytes can never become a character."""
        before = self._decoded
        data = self._stream.push(token)
        self._decode(data, now)
        if data or not self._stream.pending:
            # What waited is the first character of the new text, or nothing at all if it was dropped as invalid.
            self._settle_half(min(before + 1, self._decoded))
        if self._stream.pending:
            self._half.append(token)
        else:
            self._unshown.append((self._decoded, token))
        return self._match(data, now, armed)

    def finish(self, now: float, policy: Utf8Policy, armed: bool) -> Released:
        """The output ends: decode what waits. Raises BadUtf8 (policy ERROR) when that is no character."""
        before = self._decoded
        data = self._stream.finish(policy)
        self._decode(data, now)
        if data:
            self._settle_half(before + 1)
        self._half.clear()
        return self._match(data, now, armed)

    def drop_half(self) -> None:
        """Forget the bytes of a character that never became whole."""
        self._stream.drop()
        self._half.clear()

    def flush(self, now: float) -> Released:
        """Release what was held back for a stop that did not come."""
        return self._release(self._matcher.flush(), None, now)

    def _decode(self, data: bytes, now: float) -> None:
        if data:
            self._decoded += len(data)
            self._arrivals.append((self._decoded, now))

    def _settle_half(self, place: int) -> None:
        self._unshown.extend((place, token) for token in self._half)
        self._half.clear()

    def _match(self, data: bytes, now: float, armed: bool) -> Released:
        matched = self._matcher.push(data, armed=armed)
        released = self._release(matched.safe, matched.hit, now)
        if matched.hit is not None:
            self.drop_half()
            self._unshown.clear()
            self._arrivals.clear()
        return released

    def _release(self, text: bytes, hit: int | None, now: float) -> Released:
        self._released += len(text)
        while self._arrivals:
            place, arrived = self._arrivals[0]
            if text:
                self.longest_hold_s = max(self.longest_hold_s, now - arrived)
            if place > self._released:
                break
            self._arrivals.popleft()
        shown = []
        while self._unshown and self._unshown[0][0] <= self._released:
            shown.append(self._unshown.popleft()[1])
        self.shown_tokens += len(shown)
        return Released(text, tuple(shown), hit)
