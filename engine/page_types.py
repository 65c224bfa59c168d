"""The words of the page allocator: states, counts and errors. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

#: Page ids are 32-bit in block tables and in grants.
MAX_PAGES = 2**31 - 1

#: The page that padding and dropped window positions point at. Never handed out.
NULL_PAGE = 0


class PageState(IntEnum):
    """Where a page is. Exactly one at a time."""

    FREE = 0
    OWNED = 1  # one or more references of holders
    CACHED = 2  # no reference, content still in the prefix index; handed out when no page is free
    PINNED = 3  # no reference, but a write in flight still reads it
    GRANTED = 4  # target of a hand-over, taken back or not
    QUARANTINED = 5  # taken back, but the writer is not known to have stopped


class GrantPhase(IntEnum):
    """Where a pool's own grant is."""

    OFFERED = 0
    REVOKING = 1
    QUARANTINED = 2


@dataclass(slots=True)
class PageGrant:
    """Pages offered to a writer, in order of tokens."""

    pages: list[int]
    phase: GrantPhase = GrantPhase.OFFERED


class PageError(Exception):
    """A use of the pool that would break its books. Nothing was changed."""


class OutOfPages(PageError):
    """Fewer pages are free than were wanted. Nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} free")
        self.wanted = wanted
        self.free = free


class StaleHolder(PageError):
    """A holder, grant or pin that holds nothing (any more): released twice, or never acquired."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} holds nothing in this pool: it was given back before, or never acquired")
        self.kind = kind
        self.name = name


class WrongPageState(PageError):
    """A page, grant or id is not in the state that the call needs."""


@dataclass(frozen=True, slots=True)
class GrantedPage:
    """A page offered to a writer. The generation rises each time the page is granted."""

    page_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state. `total` counts usable pages (not the null page) and is the sum of the others.

    `pinned` counts only what nothing but a write in flight keeps from being free.
    """

    total: int
    free: int
    owned: int
    cached: int
    granted: int
    quarantined: int
    pinned: int

    @classmethod
    def of(cls, in_state: Sequence[int]) -> Self:
        """`in_state`: pages by PageState."""
        free, owned, cached, pinned, granted, quarantined = in_state
        return cls(sum(in_state), free, owned, cached, granted, quarantined, pinned)
