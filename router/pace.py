"""How fast a router's queue moves, and so how long one who comes now would wait. Pure: time comes in.

It is measured by what gets ready at members while somebody waits, so it holds whatever is short: prompt tokens, pages, seats, a
tenant's budget. What leaves the queue says less: as a burst begins, members' own queues fill first. Seconds in which nobody waits
do not count: the queue of a full cell is empty for moments, and its pace is then what it was.
"""

import math
from collections import deque

#: What got ready in so many seconds counts, in seconds in which the queue stood.
WINDOW_S = 30.0
#: Before the queue has stood for so long (seconds), and this many prompts got ready meanwhile, nothing is said.
LEAST_S, LEAST_READY = 5.0, 8
#: When nobody has waited for so long, nothing is known any more: the pools may be others. In seconds.
FORGOTTEN_S = 30.0


class Pace:
    """Prompt tokens a second that get ready while the queue stands. It stands from the first that waits until nobody does."""

    def __init__(self) -> None:
        self._stands_since: float | None = None
        self._empty_since = -math.inf
        #: How long the queue stood before it was empty, in seconds.
        self._stood_s = 0.0
        #: What got ready, and when on a clock that goes while the queue stands.
        self._ready: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def stands(self, now: float) -> None:
        """Somebody waits."""
        if self._stands_since is None:
            if now - self._empty_since > FORGOTTEN_S:
                self._stood_s, self._tokens = 0.0, 0
                self._ready.clear()
            self._stands_since = now

    def empty(self, now: float) -> None:
        """Nobody waits."""
        if self._stands_since is not None:
            self._stood_s += now - self._stands_since
            self._stands_since, self._empty_since = None, now

    def ready(self, tokens: int, now: float) -> None:
        """So many prompt tokens are ready."""
        if self._stands_since is not None:
            self._forget(now)
            self._ready.append((self._stood(now), tokens))
            self._tokens += tokens

    def tokens_per_s(self, now: float) -> float | None:
        """None while that is not known."""
        self._forget(now)
        stood_s = self._stood(now)
        if self._stands_since is None or stood_s < LEAST_S or len(self._ready) < LEAST_READY:
            return None
        return self._tokens / min(WINDOW_S, stood_s)

    def wait_s(self, tokens_ahead: int, now: float) -> float | None:
        """Seconds until so many tokens are through; None while that is not known."""
        pace = self.tokens_per_s(now)
        if pace is None:
            return None
        return tokens_ahead / pace if pace > 0 else math.inf

    def _stood(self, now: float) -> float:
        return self._stood_s + (now - self._stands_since if self._stands_since is not None else 0.0)

    def _forget(self, now: float) -> None:
        oldest = self._stood(now) - WINDOW_S
        while self._ready and self._ready[0][0] <= oldest:
            self._tokens -= self._ready.popleft()[1]
