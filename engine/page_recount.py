"""The books of a page pool recounted from those who hold something. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.page_list import FreeList
from engine.page_types import PageState
from engine.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PageBooks:
    """What a pool has written down: by page number its state, references and pins, by state how many; and who holds pages."""

    states: Sequence[int]
    references: Sequence[int]
    pin_counts: Sequence[int]
    in_state: Sequence[int]
    free: FreeList
    index: PrefixIndex
    tables: Iterable[Sequence[int]]
    pins: Iterable[Sequence[int]]
    granted: Iterable[Sequence[int]]
    quarantined: Collection[int]


def recount(books: PageBooks) -> list[str]:
    """One sentence for each thing that does not add up. Linear in pages."""
    references = Counter(page for table in books.tables for page in table)
    pins = Counter(page for pages in books.pins for page in pages)
    granted = Counter(page for pages in books.granted for page in pages)
    free = Counter(books.free)
    wrong = [f"page {page}: the links of the free list do not match" for page in books.free.broken_links()]
    if len(books.free) != free.total():
        wrong.append(f"the free list says {len(books.free)} pages and holds {free.total()}")
    seen = [0] * len(PageState)
    waiting: set[int] = set()
    for page in range(1, len(books.states)):
        # Asked with `get`: most pages are in none of them, and a Counter is slow about what it lacks.
        held, pinned, given, listed = references.get(page, 0), pins.get(page, 0), granted.get(page, 0), free.get(page, 0)
        expected = _expected(books, page, held, pinned, given)
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
    return wrong + books.index.check(waiting)


def _wrong_page(books: PageBooks, page: int, expected: PageState, references: int, pins: int) -> list[str]:
    wrong = []
    if books.states[page] != expected:
        wrong.append(f"page {page}: state {PageState(books.states[page]).name}, its holders make it {expected.name}")
    if books.references[page] != references:
        wrong.append(f"page {page}: {books.references[page]} references counted, {references} held")
    if books.pin_counts[page] != pins:
        wrong.append(f"page {page}: {books.pin_counts[page]} pins counted, {pins} held")
    return wrong


def _expected(books: PageBooks, page: int, references: int, pins: int, granted: int) -> PageState:
    if references:
        return PageState.OWNED
    if pins:
        return PageState.PINNED
    if page in books.quarantined:
        return PageState.QUARANTINED
    if granted:
        return PageState.GRANTED
    return PageState.CACHED if page in books.index else PageState.FREE
