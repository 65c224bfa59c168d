"""How fast members' counts rise, from the counts that they tell. Pure."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rate:
    """In a second."""

    steps: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class _Counts:
    incarnation: str
    #: When (monotonic seconds), steps, tokens; oldest first.
    seen: deque[tuple[float, int, int]] = field(default_factory=deque)


class Rates:
    """Over the last `window_s` seconds, or since the look before that. Members that are not looked at any more are forgotten."""

    def __init__(self, window_s: float = 3.0) -> None:
        self._window_s = window_s
        self._of: dict[str, _Counts] = {}

    def look(self, now: float, counts: dict[str, tuple[str, int, int]]) -> dict[str, Rate]:
        """Rates by address at monotonic time `now`. `counts`: incarnation, steps and tokens since its start, by address."""
        self._of = {address: known for address, known in self._of.items() if address in counts}
        return {address: self._one(address, now, *told) for address, told in counts.items()}

    def _one(self, address: str, now: float, incarnation: str, steps: int, tokens: int) -> Rate:
        known = self._of.get(address)
        if known is None or known.incarnation != incarnation:
            known = self._of[address] = _Counts(incarnation)
        seen = known.seen
        if not seen or now > seen[-1][0]:
            seen.append((now, steps, tokens))
        while len(seen) > 2 and seen[1][0] <= now - self._window_s:
            seen.popleft()
        (began, first_steps, first_tokens), (last, last_steps, last_tokens) = seen[0], seen[-1]
        seconds = last - began
        if seconds <= 0:
            return Rate()
        return Rate(max(0, last_steps - first_steps) / seconds, max(0, last_tokens - first_tokens) / seconds)
