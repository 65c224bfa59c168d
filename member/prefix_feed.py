"""What a member tells routers of its prefix cache: changes since each one's last look, or everything when it is too far behind.

Only hints: 64 bits of each key, bounded, and never waited for.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from engine.prefix_index import PrefixChanges
from lifecycle.prefix_keys import short

#: Pages that are told at most; of a member with more, those that were stored last.
TOLD_MAX = 65_536
#: Changes that are kept for watchers that are behind; one further back is told everything.
KEPT_CHANGES_MAX = 65_536
#: Hashes in one message.
MESSAGE_HASHES_MAX = 8192


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """A part of what is told. `anew`: what was told before is void."""

    stored: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    anew: bool = False


class PrefixFeed:
    """Written by one, read by any number of watchers, each with the version that it has seen."""

    def __init__(self, told_max: int = TOLD_MAX, kept_changes_max: int = KEPT_CHANGES_MAX) -> None:
        self._told_max = told_max
        self._kept_changes_max = kept_changes_max
        self.version = 0
        self._here: dict[int, None] = {}
        self._log: deque[tuple[int, tuple[int, ...], tuple[int, ...]]] = deque()
        self._kept = 0
        self._first = 0

    def put(self, changes: PrefixChanges) -> None:
        """Something changed in the index."""
        if not changes:
            return
        self.version += 1
        stored, evicted = tuple(map(short, changes.stored)), tuple(map(short, changes.evicted))
        if changes.anew:
            self._here, self._first = {}, self.version
            self._log.clear()
            self._kept = 0
        for key in evicted:
            self._here.pop(key, None)
        self._here.update(dict.fromkeys(stored))
        while len(self._here) > self._told_max:
            del self._here[next(iter(self._here))]
        if not changes.anew:
            self._log.append((self.version, stored, evicted))
            self._kept += len(stored) + len(evicted)
        while self._kept > self._kept_changes_max:
            self._first, old_stored, old_evicted = self._log.popleft()
            self._kept -= len(old_stored) + len(old_evicted)

    def since(self, seen: int | None) -> list[PrefixNews]:
        """What a watcher that has seen a version is to be told, in order; None: it has seen nothing."""
        if seen is None or seen < self._first:
            return _anew(self._here)
        if seen == self.version:
            return []
        net: dict[int, bool] = {}
        for version, stored, evicted in self._log:
            if version > seen:
                net.update(dict.fromkeys(evicted, False))
                net.update(dict.fromkeys(stored, True))
        gone, here = [key for key, found in net.items() if not found], [key for key, found in net.items() if found]
        return [*(PrefixNews(evicted=part) for part in _parts(gone)), *(PrefixNews(stored=part) for part in _parts(here))]


def _anew(here: dict[int, None]) -> list[PrefixNews]:
    parts = list(_parts(here)) or [()]
    return [PrefixNews(stored=part, anew=number == 0) for number, part in enumerate(parts)]


def _parts(keys: Iterable[int]) -> Iterable[tuple[int, ...]]:
    rest = iter(keys)
    while part := tuple(islice(rest, MESSAGE_HASHES_MAX)):
        yield part
