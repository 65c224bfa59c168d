"""What this router has sent to one member and the member's news do not count yet. Pure; every call is constant time.

What was sent counts until the member has taken it (`taken`) and then told news. News only get younger, so what they have
counted once is forgotten here, and the sums need no walk over what runs.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """What one attempt brings to a member."""

    pages: int = 0
    tokens: int = 0
    sequences: int = 1


class Unseen:
    """The sums for one member. `keys` are whatever names an attempt, each used once."""

    __slots__ = ("_on_the_way", "_taken", "pages", "sequences", "tokens")

    def __init__(self) -> None:
        self.pages = 0
        self.tokens = 0
        self.sequences = 0
        self._on_the_way: dict[Hashable, Sent] = {}
        #: In the order in which they were taken, each with when.
        self._taken: OrderedDict[Hashable, tuple[float, Sent]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._on_the_way or self._taken)

    def __iter__(self) -> Iterator[Hashable]:
        """Who is counted."""
        yield from self._on_the_way
        yield from self._taken

    def add(self, key: Hashable, sent: Sent) -> None:
        """An attempt goes there."""
        assert key not in self._on_the_way and key not in self._taken, "an attempt is sent to a member once"
        self._on_the_way[key] = sent
        self.pages += sent.pages
        self.tokens += sent.tokens
        self.sequences += sent.sequences

    def taken(self, key: Hashable, now: float) -> None:
        """The member has it: news later than `now` count it. Nothing for one that is not on the way."""
        sent = self._on_the_way.pop(key, None)
        if sent is not None:
            self._taken[key] = (now, sent)

    def discard(self, key: Hashable) -> None:
        """It has ended; twice is nothing."""
        sent = self._on_the_way.pop(key, None)
        if sent is None and key in self._taken:
            _, sent = self._taken.pop(key)
        if sent is not None:
            self._forget(sent)

    def settle(self, seen_at: float) -> None:
        """The last news came at `seen_at`."""
        while self._taken:
            at, sent = next(iter(self._taken.values()))
            if at > seen_at:
                return
            self._taken.popitem(last=False)
            self._forget(sent)

    def _forget(self, sent: Sent) -> None:
        self.pages -= sent.pages
        self.tokens -= sent.tokens
        self.sequences -= sent.sequences
