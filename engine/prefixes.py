"""The prefix cache of a member: the indexes of its KV groups, asked as one. Pure.

A prefix is here when every group has all its pages. Requests without a salt neither find nor leave anything: a salt that got lost
on some way costs time, and shows nobody what is not theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.pages import PagePool
from engine.prefix_index import PrefixChanges, PrefixCounts
from lifecycle.prefix_keys import PrefixKeys


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Since the start, but for `indexed_pages`. Pages are those of one group; every group has as many."""

    indexed_pages: int = 0
    hit_pages: int = 0
    missed_pages: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    hit_tokens: int = 0


class Prefixes:
    """`pools`: one for each KV group; `keys`: None where nothing is cached."""

    def __init__(self, pools: Sequence[PagePool], keys: PrefixKeys | None) -> None:
        self._pools = tuple(pools)
        self._keys = keys
        self.page_tokens = keys.page_tokens if keys is not None else 1

    @property
    def on(self) -> bool:
        """Whether anything is cached."""
        return self._keys is not None

    def extend(self, keys: list[bytes], salt: bytes, token_ids: Sequence[int]) -> None:
        """Append the keys of the full pages of `token_ids`, which follow what `keys` name. Nothing without a salt."""
        if self._keys is not None and salt:
            self._keys.extend(keys, salt, token_ids)

    def front(self, keys: Sequence[bytes]) -> int:
        """Pages of the longest front that is here in every group."""
        count = len(keys)
        for pool in self._pools:
            if count:
                count = len(pool.index.front(keys[:count]))
        return count

    def fits(self, keys: Sequence[bytes], wanted: Sequence[int], room: Sequence[int]) -> bool:
        """Whether `wanted` pages of each group, of which the front `keys` is here, can be had from `room` free pages."""
        for pool, count, free in zip(self._pools, wanted, room, strict=True):
            if count - len(keys) + pool.waiting_among(pool.index.front(keys)) > free:
                return False
        return True

    def reuse(self, holder: str, keys: Sequence[bytes]) -> tuple[list[int], ...]:
        """A new holder begins with these pages, which are all here; one table a group."""
        tables = tuple(pool.reuse(holder, keys) for pool in self._pools)
        assert all(len(table) == len(keys) for table in tables), f"{holder} finds less than was found before"
        return tables

    def note(self, asked: int, found: int) -> None:
        """A holder got `found` of `asked` pages that could have been here."""
        counts = self._pools[0].index.counts
        counts.hit_pages += found
        counts.missed_pages += asked - found

    def remember(self, holder: str, first: int, keys: Sequence[bytes]) -> None:
        """The pages from `first` on are full: they can be found by these keys."""
        if keys:
            for pool in self._pools:
                pool.remember(holder, first, keys)

    def forget(self, holder: str) -> None:
        """What the holder has is not trusted."""
        for pool in self._pools:
            if pool.holds(holder):
                pool.forget(holder)

    def take_changes(self) -> PrefixChanges:
        """What routers are to be told since the last call."""
        return self._pools[0].index.take_changes()

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
