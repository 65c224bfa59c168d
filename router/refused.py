"""Requests that were refused for want of room, and were told when to come back. Pure: time comes in.

They are known by their names, so that each is offered once however often its client tries, and what they will bring counts for
the time that the next one is told: each comes when those that were told before it are through, and not all at once.
"""

import heapq
import itertools
from collections.abc import Iterable

from router.queue_lanes import DEAD_SLACK, Waiting

#: What a client that was refused for want of room is told to wait at least, and at most: while nothing moves, and in a burst of
#: which nobody knows when members come.
RETRY_AFTER_S, RETRY_AFTER_MAX_S = 1.0, 120.0
#: A client may be so much later than it was told (seconds); after that its request is not awaited any more, and new if it comes.
GRACE_S = 10.0
#: So many are known; of more, those that are to come first are forgotten. A name has at most 128 bytes.
MAX_KEPT = 16_384

#: Metadata in which clients say how often they have tried: gRPC's own retries, and OpenAI's clients.
TRIED_KEYS = ("grpc-previous-rpc-attempts", "x-stainless-retry-count")

_Name = tuple[str, str]


class Refused:
    """What this router refused and awaits. Every operation costs O(log n)."""

    def __init__(self) -> None:
        self._known: dict[_Name, tuple[float, int, int]] = {}
        self._order: list[tuple[float, int, _Name]] = []
        self._numbers = itertools.count()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, waiting: Waiting, after_s: float, now: float) -> None:
        """One was refused, and told to come back after so many seconds."""
        name, due_at, number = _name(waiting), now + after_s, next(self._numbers)
        self._drop(name)
        self._known[name] = (due_at, number, waiting.tokens)
        self._tokens += waiting.tokens
        heapq.heappush(self._order, (due_at, number, name))
        while len(self._known) > MAX_KEPT:
            self._pop()
        if len(self._order) > 2 * len(self._known) + DEAD_SLACK:
            self._order = [(due, number, name) for name, (due, number, _) in self._known.items()]
            heapq.heapify(self._order)

    def take(self, waiting: Waiting, now: float) -> bool:
        """Whether one that comes was refused lately. It is awaited no more."""
        self._forget(now)
        return self._drop(_name(waiting))

    def tokens(self, now: float) -> int:
        """Prompt tokens that will come back."""
        self._forget(now)
        return self._tokens

    def _drop(self, name: _Name) -> bool:
        found = self._known.pop(name, None)
        self._tokens -= found[2] if found is not None else 0
        return found is not None

    def _forget(self, now: float) -> None:
        while self._order and self._order[0][0] + GRACE_S <= now:
            self._pop()

    def _pop(self) -> None:
        _, number, name = heapq.heappop(self._order)
        if name in self._known and self._known[name][1] == number:
            self._drop(name)


def told_s(wait_s: float | None) -> float:
    """When one that is refused may come back, for what is in front of it then; None: that is not known."""
    return RETRY_AFTER_S if wait_s is None else min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, wait_s))


def tried_before(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a client says that this is not its first try, at whichever router that was."""
    return any(key in TRIED_KEYS and str(value) not in ("", "0") for key, value in metadata)


def _name(waiting: Waiting) -> _Name:
    return waiting.tenant, waiting.request_id
