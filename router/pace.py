"""How fast a router's queue moves, and so how long one who comes now would wait. Pure: time comes in.

It is measured at the queue itself, so it holds whatever is short: prompt tokens, pages, seats, a tenant's budget.
"""

import math
from collections import deque

#: What was taken in so many seconds counts, in seconds.
WINDOW_S = 30.0
#: Before the queue has stood for so long (seconds), and this many were taken from it, nothing is said.
LEAST_S, LEAST_TAKEN = 5.0, 8


class Pace:
    """Tokens a second that leave the queue while it stands. It stands from the first that waits until nobody does."""

    def __init__(self) -> None:
        self._stands_since: float | None = None
        self._taken: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def stands(self, now: float) -> None:
        """Somebody waits."""
        if self._stands_since is None:
            self._stands_since = now

    def empty(self) -> None:
        """Nobody waits."""
        if self._stands_since is not None:
            self._stands_since, self._tokens = None, 0
            self._taken.clear()

    def took(self, tokens: int, now: float) -> None:
        """A request has left the queue for its members; fewer than 0 tokens for one that came back."""
        if self._stands_since is not None:
            self._forget(now)
            self._taken.append((now, tokens))
            self._tokens += tokens

    def tokens_per_s(self, now: float) -> float | None:
        """None while that is not known."""
        self._forget(now)
        if self._stands_since is None or now - self._stands_since < LEAST_S or len(self._taken) < LEAST_TAKEN:
            return None
        return max(0, self._tokens) / min(WINDOW_S, now - self._stands_since)

    def wait_s(self, tokens_ahead: int, now: float) -> float | None:
        """Seconds until so many tokens have left the queue; None while that is not known."""
        pace = self.tokens_per_s(now)
        if pace is None:
            return None
        return tokens_ahead / pace if pace > 0 else math.inf

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0][0] <= now - WINDOW_S:
            self._tokens -= self._taken.popleft()[1]
