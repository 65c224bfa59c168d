"""The prefix cache of a member: the indexes of its KV groups, asked as one. Pure.

A prefix can be computed on from when groups without a window have all its pages, and each windowed group those that the next
token sees; what such a group has of it besides, or lacks, does not matter. Who is sent the rest needs less: each group's pages
that the token after all of it sees, where they are here, need not be sent.

Requests without a salt neither find nor leave anything: a salt that got lost on some way costs time, and shows nobody what is not
theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.layout import GroupLayout
from engine.pages import NULL_PAGE, PagePool
from engine.prefix_index import PrefixChanges, PrefixCounts
from engine.usable_prefixes import UsablePrefixes
from lifecycle.prefix_keys import PrefixKeys


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Since the start, but for `indexed_pages`. Pages are those of the first group; hits are of what can be computed on from."""

    indexed_pages: int = 0
    hit_pages: int = 0
    missed_pages: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What is here of a prefix. keys: of its full pages. spans: for each group, the numbers of pages that are here and of use;
    none before them is needed. pages: so many at the front can be computed on from."""

    keys: Sequence[bytes]
    spans: tuple[range, ...]
    pages: int

    @property
    def complete_pages(self) -> int:
        """So many at the front are here, or not needed, in every group."""
        return min(span.stop for span in self.spans)


def page_pools(groups: Sequence[GroupLayout], totals: Sequence[int]) -> tuple[PagePool, ...]:
    """A pool for each KV group, with so many pages, page 0 included."""
    pairs = zip(groups, totals, strict=True)
    return tuple(PagePool(total, windowed=group.window is not None) for group, total in pairs)


class Prefixes:
    """`pools`: one for each of the KV groups; `keys`: None where nothing is cached."""

    def __init__(self, pools: Sequence[PagePool], groups: Sequence[GroupLayout], keys: PrefixKeys | None) -> None:
        self._pools = tuple(pools)
        self._groups = tuple(groups)
        self._keys = keys
        self._usable = UsablePrefixes(pools, groups) if any(group.window is not None for group in groups) else None
        self.page_tokens = keys.page_tokens if keys is not None else 1

    @property
    def on(self) -> bool:
        """Whether anything is cached."""
        return self._keys is not None

    def extend(self, keys: list[bytes], salt: bytes, token_ids: Sequence[int]) -> None:
        """Append the keys of the full pages of `token_ids`, which follow what `keys` name. Nothing without a salt."""
        if self._keys is not None and salt:
            self._keys.extend(keys, salt, token_ids)

    def to_compute_on(self, keys: Sequence[bytes]) -> Found:
        """What is here of the longest front of `keys` that can be computed on from."""
        count = len(keys)
        for pool, group in zip(self._pools, self._groups, strict=True):
            if count and group.window is None:
                count = len(pool.index.front(keys[:count]))
        while count and (gap := self._gap(keys, count)) is not None:
            # Whatever ends behind the page that lacks, and not behind `count`, sees it as well.
            count = gap
        return Found(keys, tuple(range(self._first_page(group, count), count) for group in self._groups), count)

    def to_receive(self, keys: Sequence[bytes], tokens: int) -> Found:
        """What is here and need not be sent of the first `tokens` tokens, of whose full pages `keys` are some at the front."""
        spans = []
        for pool, group in zip(self._pools, self._groups, strict=True):
            first = group.first_page(tokens)
            spans.append(range(first, first + len(pool.index.front(keys[first:]))))
        return Found(keys, tuple(spans), self.to_compute_on(keys).pages)

    def fits(self, found: Found, wanted: Sequence[int], room: Sequence[int]) -> bool:
        """Whether `wanted` pages of each group, those that were found included, can be had from `room` free pages."""
        for pool, span, count, free in zip(self._pools, found.spans, wanted, room, strict=True):
            here = pool.index.front(found.keys[span.start : span.stop])
            if count - len(here) + pool.price(here) > free:
                return False
        return True

    def reuse(self, holder: str, found: Found) -> tuple[list[int], ...]:
        """A new holder begins with the pages that were found, which are all here; one table a group, null where it needs none."""
        tables = []
        for pool, span in zip(self._pools, found.spans, strict=True):
            pages = pool.reuse(holder, found.keys[span.start : span.stop])
            assert len(pages) == len(span), f"{holder} finds less than was found before"
            tables.append([NULL_PAGE] * span.start + pages)
        return tuple(tables)

    def note(self, asked: int, found: int) -> None:
        """A holder got `found` of `asked` pages that could have been here."""
        counts = self._pools[0].index.counts
        counts.hit_pages += found
        counts.missed_pages += asked - found

    def remember(self, holder: str, first: int, keys: Sequence[bytes], gone: Sequence[int]) -> None:
        """The pages that `keys` name, from number `first` on, are full: they can be found. gone: how many pages at the front the
        holder has not, or not any more, in each group."""
        if len(keys) <= first:
            return
        for pool, before in zip(self._pools, gone, strict=True):
            start = max(first, before)
            if start < len(keys):
                pool.remember(holder, start - before, keys[start:])
        if self._usable is not None:
            self._usable.remembered(keys, first)

    def forget(self, holder: str, keys: Sequence[bytes]) -> None:
        """What the holder has is not trusted, nor what left its windows. `keys`: of all its full pages."""
        for pool, group in zip(self._pools, self._groups, strict=True):
            if pool.holds(holder):
                pool.forget(holder, () if group.window is None else keys)

    def take_changes(self) -> PrefixChanges:
        """What routers are to be told since the last call."""
        return self._pools[0].index.take_changes() if self._usable is None else self._usable.take_changes()

    def statistics(self) -> PrefixStatistics:
        """Counts at this moment."""
        index = self._pools[0].index
        counts: PrefixCounts = index.counts
        return PrefixStatistics(
            indexed_pages=len(index),
            hit_pages=counts.hit_pages,
            missed_pages=counts.missed_pages,
            stored_pages=counts.stored_pages,
            evicted_pages=counts.evicted_pages,
            hit_tokens=counts.hit_pages * self.page_tokens,
        )

    def _gap(self, keys: Sequence[bytes], count: int) -> int | None:
        """Number of the last page that lacks behind a window if `count` pages are computed on from; None when none does."""
        for pool, group in zip(self._pools, self._groups, strict=True):
            if group.window is None:
                continue
            for number in range(count - 1, self._first_page(group, count) - 1, -1):
                if pool.index.page(keys[number]) is None:
                    return number
        return None

    def _first_page(self, group: GroupLayout, pages: int) -> int:
        return group.first_page(pages * self.page_tokens)
