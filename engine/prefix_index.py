"""Which pages hold which content, and in which order those that nobody holds are given up. Pure, constant time a page.

A page is indexed when all its tokens are in it, and stays so until it is given out for something else. Indexed pages that nobody
holds wait in the order in which they were let go. Their holders let go of the last page first, so the front of a prefix lives
longest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.page_list import FreeList

#: News that wait for whoever tells others of them; of more, everything is told anew.
CHANGES_MIN = 1024


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What changed since the last look. `anew`: `stored` is everything that is indexed, what was known before is void."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    anew: bool = False

    def __bool__(self) -> bool:
        return self.anew or bool(self.stored or self.evicted)


@dataclass(slots=True)
class PrefixCounts:
    """Events since the start: look-ups' pages found and not found, pages that became indexed, that were given up for room, and
    that were dropped because their content is not trusted."""

    hit_pages: int = 0
    missed_pages: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    forgotten_pages: int = 0


class KeyChanges:
    """Keys that came and went since the last look. Of more than `most` everything is told anew."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changes: dict[bytes, bool] = {}
        self._anew = False

    def __len__(self) -> int:
        """Changes that wait to be told."""
        return len(self._changes)

    def note(self, key: bytes, *, stored: bool) -> None:
        """A key came, or went."""
        if self._anew:
            return
        if self._changes.pop(key, stored) is stored:  # a change and its undoing are nothing
            self._changes[key] = stored
        if len(self._changes) > self._most:
            self._anew, self._changes = True, {}

    def take(self, here: Iterable[bytes]) -> PrefixChanges:
        """Changes since the last call; a key that came and went in between is not told. `here`: all that are here."""
        changes, self._changes = self._changes, {}
        if self._anew:
            self._anew = False
            return PrefixChanges(stored=tuple(here), anew=True)
        stored = tuple(key for key, came in changes.items() if came)
        return PrefixChanges(stored, tuple(key for key, came in changes.items() if not came))


class PrefixIndex:
    """The index of one pool. The pool owns the pages' states; here is only what content has to do with."""

    def __init__(self, total_pages: int) -> None:
        """`total_pages` as in PagePool."""
        self.counts = PrefixCounts()
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._waiting = FreeList.empty(total_pages)
        self._changes_max = max(CHANGES_MIN, total_pages)
        self._changes = KeyChanges(self._changes_max)

    def __len__(self) -> int:
        """Pages that are indexed."""
        return len(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    @property
    def waiting_pages(self) -> int:
        """Indexed pages that nobody holds."""
        return len(self._waiting)

    def page(self, key: bytes) -> int | None:
        """Where this content is; None where it is not."""
        return self._pages.get(key)

    def front(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest front of `keys` that is here."""
        pages: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def add(self, page: int, key: bytes) -> bool:
        """Index a page; False when its content is indexed already, or the page is."""
        if key in self._pages or page in self._keys:
            return False
        self._pages[key] = page
        self._keys[page] = key
        self.counts.stored_pages += 1
        self._changes.note(key, stored=True)
        return True

    def drop(self, page: int) -> None:
        """A page's content is not to be found any more. Its pool has taken it out of those that wait."""
        key = self._keys.pop(page)
        del self._pages[key]
        self._changes.note(key, stored=False)

    def wait(self, page: int) -> None:
        """Nobody holds this indexed page any more."""
        self._waiting.append(page)

    def taken(self, page: int) -> None:
        """Somebody holds a page that has waited, or it is given out for something else."""
        self._waiting.remove(page)

    def oldest(self) -> int:
        """The page that has waited longest; 0 when none waits."""
        return self._waiting.oldest()

    def take_changes(self) -> PrefixChanges:
        """What was stored and evicted since the last call; a page that came and went in between is not told."""
        return self._changes.take(self._pages)

    def check(self, waiting: set[int]) -> list[str]:
        """Recount; sentences about what does not add up. `waiting`: indexed pages that nobody holds, as their pool sees it."""
        faults = [f"page {page}: the links of the waiting list do not match" for page in self._waiting.broken_links()]
        here = list(self._waiting)
        if len(here) != len(self._waiting) or len(set(here)) != len(here) or set(here) != waiting:
            faults.append(f"{len(self._waiting)} indexed pages wait to be used again, {len(waiting)} should")
        if {page: key for key, page in self._pages.items()} != self._keys:
            faults.append(f"{len(self._pages)} keys are indexed for {len(self._keys)} pages")
        if len(self._changes) > self._changes_max:
            faults.append(f"{len(self._changes)} changes wait to be told, above {self._changes_max}")
        return faults
