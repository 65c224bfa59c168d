"""The books of a page pool recounted from those who hold something. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.page_list import FreeList
from engine.page_types import GrantPhase, PageGrant, PageState
from engine.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PageBooks:
    """What a pool has written down: by page number its state, references and pins, by state how many; and who holds pages.

    owed: see PagePool.owed_pages; None: nothing is, in a pool without windows.
    """

    states: Sequence[int]
    references: Sequence[int]
    pin_counts: Sequence[int]
    in_state: Sequence[int]
    free: FreeList
    index: PrefixIndex
    tables: Iterable[Sequence[int]]
    pins: Iterable[Sequence[int]]
    grants: Collection[PageGrant]
    held_references: int
    kept: Collection[int]
    owed: int | None


def recount(books: PageBooks) -> list[str]:
    """One sentence for each thing that does not add up. Linear in pages."""
    references = Counter(page for table in books.tables for page in table)
    pins = Counter(page for pages in books.pins for page in pages)
    granted = Counter(page for grant in books.grants for page in grant.pages)
    quarantined = {page for grant in books.grants if grant.phase is GrantPhase.QUARANTINED for page in grant.pages}
    free = Counter(books.free)
    wrong = [f"page {page}: the links of the free list do not match" for page in books.free.broken_links()]
    if len(books.free) != free.total():
        wrong.append(f"the free list says {len(books.free)} pages and holds {free.total()}")
    seen = [0] * len(PageState)
    waiting: set[int] = set()
    for page in range(1, len(books.states)):
        # Asked with `get`: most pages are in none of them, and a Counter is slow about what it lacks.
        held, pinned, given, listed = references.get(page, 0), pins.get(page, 0), granted.get(page, 0), free.get(page, 0)
        granted_state = PageState.QUARANTINED if page in quarantined else PageState.GRANTED if given else None
        expected = _expected(books, page, held, pinned, granted_state)
        seen[expected] += 1
        if expected == PageState.CACHED:
            waiting.add(page)
        if (books.states[page], books.references[page], books.pin_counts[page]) != (expected, held, pinned):
            wrong += _wrong_page(books, page, expected, held, pinned)
        if (listed, given) not in ((0, 0), (1, 0), (0, 1)) or (listed == 1) != (expected == PageState.FREE):
            wrong.append(f"page {page}: {listed} times in the free list, in {given} grants")
        if given and (held or pinned or page in books.index):
            by = f"held by {held} holders, {pinned} pins"
            wrong.append(f"page {page}: granted to a writer and {'indexed' if page in books.index else by}")
    for state in PageState:
        if seen[state] != books.in_state[state]:
            wrong.append(f"{books.in_state[state]} pages are counted as {state.name}, {seen[state]} are")
    return wrong + _wrong_debts(books, references, pins, len(waiting)) + books.index.check(waiting)


def _wrong_debts(books: PageBooks, references: Counter[int], pins: Counter[int], waiting_pages: int) -> list[str]:
    wrong = []
    if books.held_references != references.total():
        wrong.append(f"{books.held_references} references are counted in all, {references.total()} are held")
    unread = [page for page in books.kept if not pins[page]]
    wrong += [f"page {page}: kept for a write, and none reads it" for page in unread]
    if books.owed is None:
        return wrong
    owed = sum(max(0, references[page] + (page in books.kept) - 1) for page in {*references, *books.kept})
    if books.owed != owed:
        wrong.append(f"{books.owed} pages are counted as owed, {owed} are")
    if owed > len(books.free) + waiting_pages:
        wrong.append(f"{owed} pages are owed and {len(books.free) + waiting_pages} could be handed out")
    return wrong


def _wrong_page(books: PageBooks, page: int, expected: PageState, references: int, pins: int) -> list[str]:
    wrong = []
    if books.states[page] != expected:
        wrong.append(f"page {page}: state {PageState(books.states[page]).name}, its holders make it {expected.name}")
    if books.references[page] != references:
        wrong.append(f"page {page}: {books.references[page]} references counted, {references} held")
    if books.pin_counts[page] != pins:
        wrong.append(f"page {page}: {books.pin_counts[page]} pins counted, {pins} held")
    return wrong


def _expected(books: PageBooks, page: int, references: int, pins: int, granted: PageState | None) -> PageState:
    if references:
        return PageState.OWNED
    if pins:
        return PageState.PINNED
    if granted is not None:
        return granted
    return PageState.CACHED if page in books.index else PageState.FREE
