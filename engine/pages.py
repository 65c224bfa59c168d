"""The allocator of one KV group's pages: who holds which page, and what may be handed out. Pure."""

from array import array
from collections.abc import Iterable, Sequence

from engine.page_list import FreeList
from engine.page_recount import PageBooks, recount
from engine.page_types import (
    MAX_PAGES,
    NULL_PAGE,
    GrantedPage,
    GrantPhase,
    OutOfPages,
    PageCounts,
    PageError,
    PageGrant,
    PageState,
    StaleHolder,
    WrongPageState,
)
from engine.prefix_index import PrefixIndex

__all__ = [
    "MAX_PAGES",
    "NULL_PAGE",
    "GrantedPage",
    "OutOfPages",
    "PageCounts",
    "PageError",
    "PagePool",
    "PageState",
    "StaleHolder",
    "WrongPageState",
]


class PagePool:
    """Pages 1..total_pages-1 of one KV group. Constant time a page for every call but `check`.

    Holders, grants and pins are named by ids that the caller never uses twice. A holder comes into being with its
    first `allocate`, `share` or `commit_grant` and ends with its one `release`; the order of its pages is the order
    of its tokens.

    A holder's full pages can be indexed by what they hold (`remember`). Nobody holds them after their holders have let go, but
    they can be held again (`reuse`), until they are given out for something else, the one let go first first.

    In a windowed pool each holder is owed a page for every page that it holds, which it takes when that one leaves its window
    (`drop_front`). So of a page that several hold, all but one take a free page out of reach (`owed_pages`).

    Order of handing out: the page after the holder's last one when that is free, else the least recently freed page
    and then its free neighbours, upwards first. Each stretch comes out ascending. So in a pool whose free pages are
    one stretch every allocation is one stretch, and a freed table comes back whole, whatever order it was freed in.
    """

    def __init__(self, total_pages: int, *, windowed: bool = False) -> None:
        """`total_pages` includes the null page: 2 to MAX_PAGES. windowed: pages leave a window of their holders."""
        if not 2 <= total_pages <= MAX_PAGES:
            raise ValueError(f"total_pages is {total_pages}, must be 2 to {MAX_PAGES} (page 0 is never handed out)")
        self._total = total_pages
        self._windowed = windowed
        self._held_references = 0
        #: Pages that a write keeps after a holder let go of them for good.
        self._kept: set[int] = set()
        self._free = FreeList(total_pages)
        self.index = PrefixIndex(total_pages)
        self._state = bytearray(total_pages)
        self._references: array[int] = array("i", bytes(4 * total_pages))
        self._pin_counts: array[int] = array("i", bytes(4 * total_pages))
        self._generation: array[int] = array("q", bytes(8 * total_pages))
        self._in_state = [0] * len(PageState)
        self._in_state[PageState.FREE] = total_pages - 1
        self._holders: dict[str, list[int]] = {}
        self._grants: dict[str, PageGrant] = {}
        self._pins: dict[str, tuple[int, ...]] = {}

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages that can be handed out now, those that are only kept for their content included, those that are owed not."""
        return len(self._free) + self.index.waiting_pages - self.owed_pages

    @property
    def owed_pages(self) -> int:
        """Free pages that holders of pages in more than one table will take instead of them. None without a window."""
        if not self._windowed:
            return 0
        kept = self._in_state[PageState.OWNED] + self._in_state[PageState.PINNED]
        return self._held_references + len(self._kept) - kept

    @property
    def usable_pages(self) -> int:
        """Pages that could be handed out if nothing were held."""
        return self._total - 1

    def counts(self) -> PageCounts:
        """Pages by state."""
        return PageCounts.of(self._in_state)

    def state(self, page: int) -> PageState:
        """State of a page; raises WrongPageState for the null page and for ids outside the pool."""
        if not 0 < page < self._total:
            raise WrongPageState(f"page {page} is not one of pages 1 to {self._total - 1}")
        return PageState(self._state[page])

    def generation(self, page: int) -> int:
        """How often the page was granted."""
        self.state(page)
        return self._generation[page]

    def pages_of(self, holder: str) -> tuple[int, ...]:
        """The holder's pages in order of tokens. Raises StaleHolder."""
        return tuple(self._held(holder))

    def pages_granted(self, grant_id: str) -> tuple[int, ...]:
        """The pages of an open grant in order of tokens. Raises StaleHolder."""
        return tuple(self._open_grant(grant_id).pages)

    def holds(self, holder: str) -> bool:
        """Whether the holder has something to release (its table may be empty)."""
        return holder in self._holders

    # Holders ---------------------------------------------------------------------------------------------------------

    def allocate(self, holder: str, count: int) -> list[int]:
        """Append `count` pages to the holder's table and return them; all or nothing. Raises OutOfPages."""
        self._need(count)
        table = self._holders.get(holder)
        pages = self._take(count, after=table[-1] if table else NULL_PAGE)
        self._own(pages)
        self._holders.setdefault(holder, []).extend(pages)
        return pages

    def share(self, holder: str, pages: Sequence[int]) -> None:
        """Append pages that others own to the holder's table, with one more reference each. Raises OutOfPages when it would
        be owed pages that are not there."""
        table = self._holders.get(holder, ())
        if len({*table, *pages}) != len(table) + len(pages):
            raise WrongPageState(f"holder {holder!r} would hold a page twice")
        self._require_owned(pages, "shared")
        self._need(len(pages) if self._windowed else 0)
        self._refer(pages)
        self._holders.setdefault(holder, []).extend(pages)

    def trim(self, holder: str, keep: int) -> int:
        """Give back the holder's pages after the first `keep`, last first; returns how many. The holder stays."""
        if keep < 0:
            raise ValueError(f"keep is {keep} pages, must be at least 0")
        table = self._held(holder)
        given_back = table[keep:]
        del table[keep:]
        self._drop_references(reversed(given_back))
        return len(given_back)

    def drop_front(self, holder: str, count: int) -> None:
        """Give back the holder's first `count` pages: they left its window. Its other pages stay in their order."""
        table = self._held(holder)
        if not 0 <= count <= len(table):
            raise WrongPageState(f"holder {holder!r} has {len(table)} pages and cannot give back its first {count}")
        given_back = table[:count]
        del table[:count]
        self._drop_references(given_back, replaced=True)

    def release(self, holder: str) -> int:
        """End the holder: give back all its pages, last first; returns how many. Raises StaleHolder on a second call."""
        table = self._held(holder)
        del self._holders[holder]
        self._drop_references(reversed(table))
        return len(table)

    # Content ---------------------------------------------------------------------------------------------------------

    def reuse(self, holder: str, keys: Sequence[bytes]) -> list[int]:
        """Let a holder without pages begin with those of the longest front of `keys` that is indexed; they are read only."""
        if self._holders.get(holder):
            raise WrongPageState(f"holder {holder!r} has pages already: a prefix is its front")
        pages = self.index.front(keys)
        self._need(self.price(pages))
        for page in pages:
            if self._references[page] == 0:
                self._held_again(page)
        self._refer(pages)
        self._holders[holder] = pages[:]
        return pages

    def price(self, pages: Sequence[int]) -> int:
        """How many fewer pages can be handed out once one more holds these."""
        return len(pages) if self._windowed else sum(self._state[page] == PageState.CACHED for page in pages)

    def remember(self, holder: str, first: int, keys: Sequence[bytes]) -> int:
        """Index the holder's pages from its `first` on by what they hold; returns how many were new. Each is full."""
        table = self._held(holder)
        if first + len(keys) > len(table):
            raise WrongPageState(f"holder {holder!r} has {len(table)} pages, {first + len(keys)} are to be indexed")
        return sum(self.index.add(page, key) for page, key in zip(table[first:], keys, strict=False))

    def forget(self, holder: str, keys: Sequence[bytes] = ()) -> int:
        """The content of a holder's pages is not trusted, nor of those by `keys`, which it may have given back: none of them is
        found any more. Returns how many were."""
        pages = {page for page in self._held(holder) if page in self.index}
        pages.update(page for key in keys if (page := self.index.page(key)) is not None)
        for page in pages:
            self._drop_content(page)
        self.index.counts.forgotten_pages += len(pages)
        return len(pages)

    def free_without(self, holder: str) -> int:
        """How many more pages could be handed out if this holder let go of all of its own."""
        shared = self._windowed
        return sum(self._pin_counts[page] == 0 and (shared or self._references[page] == 1) for page in self._held(holder))

    # Grants ----------------------------------------------------------------------------------------------------------

    def grant(self, grant_id: str, count: int) -> list[GrantedPage]:
        """Offer `count` free pages (0 on a full prefix hit) to a writer; all or nothing. Raises OutOfPages."""
        if grant_id in self._grants:
            raise WrongPageState(f"grant {grant_id!r} is open already: grant ids are never used twice")
        self._need(count)
        pages = self._take(count, after=NULL_PAGE)
        for page in pages:
            self._generation[page] += 1
            self._move(page, PageState.GRANTED)
        self._grants[grant_id] = PageGrant(pages)
        return [GrantedPage(page, self._generation[page]) for page in pages]

    def commit_grant(self, grant_id: str, holder: str) -> list[int]:
        """The writer is done: append the grant's pages to the holder's table. Refused once the grant is revoked."""
        grant = self._open_grant(grant_id)
        if grant.phase is not GrantPhase.OFFERED:
            raise WrongPageState(f"grant {grant_id!r} was revoked and cannot be committed")
        del self._grants[grant_id]
        self._own(grant.pages)
        self._holders.setdefault(holder, []).extend(grant.pages)
        return grant.pages

    def revoke_grant(self, grant_id: str) -> None:
        """From now on the grant cannot be committed. Its pages stay granted until reclaimed. May be called again."""
        grant = self._open_grant(grant_id)
        grant.phase = max(grant.phase, GrantPhase.REVOKING)

    def reclaim_grant(self, grant_id: str) -> int:
        """The writer is known to have stopped: free the pages of a revoked or quarantined grant; returns how many."""
        grant = self._revoked_grant(grant_id, "reclaimed")
        del self._grants[grant_id]
        for page in reversed(grant.pages):
            self._make_free(page)
        return len(grant.pages)

    def quarantine_grant(self, grant_id: str) -> int:
        """The writer cannot be asked: set a revoked grant's pages aside; returns how many. May be called again."""
        grant = self._revoked_grant(grant_id, "quarantined")
        grant.phase = GrantPhase.QUARANTINED
        for page in grant.pages:
            self._move(page, PageState.QUARANTINED)
        return len(grant.pages)

    # Pins ------------------------------------------------------------------------------------------------------------

    def pin(self, pin_id: str, pages: Sequence[int]) -> None:
        """Keep owned pages from becoming free while a write in flight reads them. A page may carry several pins."""
        if pin_id in self._pins:
            raise WrongPageState(f"pin {pin_id!r} is in use already: pin ids are never used twice")
        if len(set(pages)) != len(pages):
            raise WrongPageState(f"pin {pin_id!r} names a page twice")
        self._require_owned(pages, "pinned")
        for page in pages:
            self._pin_counts[page] += 1
        self._pins[pin_id] = tuple(pages)

    def unpin(self, pin_id: str) -> int:
        """End a pin; pages that no holder and no other pin keeps become free. Returns how many the pin held."""
        try:
            pages = self._pins.pop(pin_id)
        except KeyError:
            raise StaleHolder("pin", pin_id) from None
        for page in reversed(pages):
            self._pin_counts[page] -= 1
            if self._pin_counts[page] > 0:
                continue
            self._kept.discard(page)
            if self._state[page] == PageState.PINNED:
                self._let_go(page)
        return len(pages)

    # Books -----------------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Recount everything from the holders; one sentence for each thing that does not add up. Linear in pages."""
        return recount(
            PageBooks(
                states=self._state,
                references=self._references,
                pin_counts=self._pin_counts,
                in_state=self._in_state,
                free=self._free,
                index=self.index,
                tables=self._holders.values(),
                pins=self._pins.values(),
                grants=self._grants.values(),
                held_references=self._held_references,
                kept=self._kept,
                owed=self.owed_pages if self._windowed else None,
            )
        )

    # Inside ----------------------------------------------------------------------------------------------------------

    def _held(self, holder: str) -> list[int]:
        try:
            return self._holders[holder]
        except KeyError:
            raise StaleHolder("holder", holder) from None

    def _open_grant(self, grant_id: str) -> PageGrant:
        try:
            return self._grants[grant_id]
        except KeyError:
            raise StaleHolder("grant", grant_id) from None

    def _revoked_grant(self, grant_id: str, done: str) -> PageGrant:
        grant = self._open_grant(grant_id)
        if grant.phase is GrantPhase.OFFERED:
            raise WrongPageState(f"grant {grant_id!r} must be revoked before it can be {done}")
        return grant

    def _require_owned(self, pages: Iterable[int], done: str) -> None:
        owned, total, state = int(PageState.OWNED), self._total, self._state
        for page in pages:  # each part of each hand-over comes by
            if not 0 < page < total or state[page] != owned:
                raise WrongPageState(f"page {page} is {self.state(page).name} and cannot be {done}: it must be OWNED")

    def _need(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"count is {count} pages, must be at least 0")
        if count > self.free_pages:
            raise OutOfPages(count, self.free_pages)

    def _take(self, count: int, after: int) -> list[int]:
        """Take `count` pages out of the free list, some of the index if need be; the caller knows that there are enough."""
        while len(self._free) < count:
            self._evict()
        return self._free.take(count, after)

    def _move(self, page: int, state: PageState) -> None:
        self._in_state[self._state[page]] -= 1
        self._in_state[state] += 1
        self._state[page] = state

    def _make_free(self, page: int) -> None:
        self._move(page, PageState.FREE)
        self._free.append(page)

    def _own(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._move(page, PageState.OWNED)
        self._refer(pages)

    def _refer(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] += 1
            self._held_references += 1

    def _drop_references(self, pages: Iterable[int], *, replaced: bool = False) -> None:
        """replaced: the holder takes another page for each."""
        for page in pages:
            self._references[page] -= 1
            self._held_references -= 1
            left, pinned = self._references[page], self._pin_counts[page] > 0
            if pinned and not (left and replaced):
                self._kept.add(page)
            if left == 0:
                if pinned:
                    self._move(page, PageState.PINNED)
                else:
                    self._let_go(page)

    def _let_go(self, page: int) -> None:
        """Nobody holds or reads a page any more: it waits for somebody who wants its content, or is free."""
        if page in self.index:
            self._move(page, PageState.CACHED)
            self.index.wait(page)
        else:
            self._make_free(page)

    def _held_again(self, page: int) -> None:
        if self._state[page] == PageState.CACHED:
            self.index.taken(page)
        self._move(page, PageState.OWNED)

    def _evict(self) -> None:
        self._drop_content(self.index.oldest())
        self.index.counts.evicted_pages += 1

    def _drop_content(self, page: int) -> None:
        """A page is not found any more; one that only waited to be is free."""
        if self._state[page] == PageState.CACHED:
            self.index.taken(page)
            self._make_free(page)
        self.index.drop(page)
