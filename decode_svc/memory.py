"""What a decode member hands out: KV pages with promises for growth, and landing rows. Pure.

`reservation = full` is kept by a counter, not by pages: a seat is promised every page that its prompt and its output can
need, and takes them one by one as it grows. Pages that are promised and not taken stay free, so an early end costs
nothing. The invariant is free >= promised in every group; `take` then never fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.layout import Layout, pages_for
from engine.pages import GrantedPage, PageCounts, PagePool


class NoPages(Exception):
    """The promise can not be made now. Nothing was changed. `wanted`, `available`: pages of the shortest group."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages are needed and {available} are neither used nor promised")
        self.wanted = wanted
        self.available = available


class NoLandingRow(Exception):
    """Every landing row is held. Nothing was changed."""


@dataclass(slots=True)
class Holding:
    """Pages of one seat, one table per KV group; a table is only ever appended to. `promised`: pages not taken yet, per group."""

    holder: str
    tables: tuple[list[int], ...]
    promised: list[int]

    @property
    def pages(self) -> int:
        """Pages taken, all groups."""
        return sum(len(table) for table in self.tables)


@dataclass(slots=True)
class Held:
    """What one open grant keeps away from everybody else until its writer has stopped."""

    landing_row: int
    pages: int
    quarantined: bool = field(default=False, init=False)


class DecodeMemory:
    """Owner of the page pools and of the landing rows. `total_pages` per group, page 0 included, which is never handed out."""

    def __init__(self, layout: Layout, total_pages: int, landing_rows: int) -> None:
        self.pools = tuple(PagePool(total_pages) for _ in layout.groups)
        self.page_tokens = tuple(group.page_tokens for group in layout.groups)
        self.total_pages = total_pages
        self.landing_rows = landing_rows
        self._promised = [0] * len(self.pools)
        self._free_rows = list(range(landing_rows - 1, -1, -1))
        self._holdings: dict[str, Holding] = {}
        self._grants: dict[str, Held] = {}

    # promises

    def need(self, tokens: int) -> list[int]:
        """Pages for `tokens` tokens, per group."""
        return [pages_for(tokens, size) for size in self.page_tokens]

    def fits_ever(self, tokens: int) -> bool:
        """Whether an empty member could hold `tokens` tokens."""
        return all(count < self.total_pages for count in self.need(tokens))

    @property
    def most_tokens(self) -> int:
        """Tokens that an empty member could hold."""
        return min(self.page_tokens) * (self.total_pages - 1)

    def available(self) -> int:
        """Pages of the shortest group that are neither used nor promised."""
        return min(pool.free_pages - promised for pool, promised in zip(self.pools, self._promised, strict=True))

    def promise(self, holder: str, tokens: int) -> Holding:
        """Promise the pages of `tokens` tokens, all or nothing. Raises NoPages."""
        need = self.need(tokens)
        for pool, promised, count in zip(self.pools, self._promised, need, strict=True):
            if pool.free_pages - promised < count:
                raise NoPages(count, max(0, pool.free_pages - promised))
        holding = Holding(holder, tuple([] for _ in self.pools), need)
        self._holdings[holder] = holding
        for group, count in enumerate(need):
            self._promised[group] += count
        return holding

    def take(self, holding: Holding, tokens: int) -> None:
        """Make the tables cover `tokens` tokens out of the promise."""
        for group, table in enumerate(holding.tables):
            missing = -(-tokens // self.page_tokens[group]) - len(table)
            if missing > 0:
                self._spend(holding, group, missing)
                table += self.pools[group].allocate(holding.holder, missing)

    def release(self, holding: Holding) -> int:
        """Give back what a seat took and what it was promised; returns the pages taken. Once for each promise."""
        del self._holdings[holding.holder]
        for group, promised in enumerate(holding.promised):
            self._promised[group] -= promised
            holding.promised[group] = 0
        return sum(pool.release(holding.holder) for pool in self.pools if pool.holds(holding.holder))

    # grants

    def grant(self, holding: Holding, grant_id: str, tokens: int) -> tuple[int, tuple[list[GrantedPage], ...]]:
        """Offer the pages of the prompt out of the promise; returns the landing row and the pages.

        Raises NoLandingRow.
        """
        if not self._free_rows:
            raise NoLandingRow(f"all {self.landing_rows} landing rows are held")
        row = self._free_rows.pop()
        granted = []
        for group, count in enumerate(self.need(tokens)):
            self._spend(holding, group, count)
            granted.append(self.pools[group].grant(grant_id, count))
        self._grants[grant_id] = Held(row, sum(len(pages) for pages in granted))
        return row, tuple(granted)

    def commit(self, holding: Holding, grant_id: str) -> int:
        """The writer is done: the pages are the seat's. Returns the landing row, which stays held until `free_row`."""
        held = self._grants.pop(grant_id)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            table += pool.commit_grant(grant_id, holding.holder)
        return held.landing_row

    def free_row(self, row: int) -> None:
        """The logits of a committed grant were read."""
        assert row not in self._free_rows, f"landing row {row} is given back twice"
        self._free_rows.append(row)

    def revoke(self, grant_id: str) -> None:
        """The grant is being taken back; its pages and its row stay held."""
        for pool in self.pools:
            pool.revoke_grant(grant_id)

    def quarantine(self, grant_id: str) -> None:
        """The writer can not be asked; pages and row stay held until `reclaim`. Does nothing the second time."""
        held = self._grants[grant_id]
        if not held.quarantined:
            held.quarantined = True
            for pool in self.pools:
                pool.quarantine_grant(grant_id)

    def reclaim(self, grant_id: str) -> int:
        """The writer has stopped: pages and row are free. Returns the pages."""
        held = self._grants.pop(grant_id)
        for pool in self.pools:
            pool.revoke_grant(grant_id)
            pool.reclaim_grant(grant_id)
        self.free_row(held.landing_row)
        return held.pages

    # books

    def counts(self) -> PageCounts:
        """Pages by state, all groups added."""
        per_group = [pool.counts() for pool in self.pools]
        return PageCounts(*(sum(values) for values in zip(*(_values(counts) for counts in per_group), strict=True)))

    @property
    def promised_pages(self) -> int:
        """Pages that are free and promised, all groups."""
        return sum(self._promised)

    @property
    def landing_rows_used(self) -> int:
        """Landing rows that a grant or an unread commit holds."""
        return self.landing_rows - len(self._free_rows)

    def check(self, rows_of_commits: Sequence[int]) -> list[str]:
        """Recount everything; sentences about what does not add up. `rows_of_commits`: rows whose logits wait to be read."""
        faults = [fault for pool in self.pools for fault in pool.check()]
        for group, pool in enumerate(self.pools):
            promised = sum(holding.promised[group] for holding in self._holdings.values())
            if promised != self._promised[group]:
                faults.append(f"group {group}: {self._promised[group]} pages are counted as promised and seats hold {promised}")
            if promised > pool.free_pages:
                faults.append(f"group {group}: {promised} pages are promised and {pool.free_pages} are free")
        for holding in self._holdings.values():
            for group, table in enumerate(holding.tables):
                if table and tuple(table) != tuple(self.pools[group].pages_of(holding.holder)):
                    faults.append(f"group {group}: the table of {holding.holder} is not what the pool says it owns")
        rows = sorted([*self._free_rows, *rows_of_commits, *(held.landing_row for held in self._grants.values())])
        if rows != list(range(self.landing_rows)):
            faults.append(f"landing rows: {len(rows)} are accounted for, there are {self.landing_rows}")
        return faults

    def _spend(self, holding: Holding, group: int, count: int) -> None:
        assert count <= holding.promised[group], f"{holding.holder} takes {count} pages, promised {holding.promised}"
        holding.promised[group] -= count
        self._promised[group] -= count


def _values(counts: PageCounts) -> tuple[int, ...]:
    return (counts.total, counts.free, counts.owned, counts.cached, counts.granted, counts.quarantined, counts.pinned)
