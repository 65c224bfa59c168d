"""What a decode member hands out: KV pages with promises for growth, and landing rows. Pure.

A promise is kept by a counter, not by pages: a seat takes its pages one by one as it grows. Pages that are promised and not
taken stay free, so an early end costs nothing. The invariant is free >= promised in every group; `take` within the promise
never fails. Beyond its promise a seat may take what is free and promised to nobody.

Behind a window a seat is promised the most pages that it holds at once, not all that it ever takes: what leaves the window
goes back at once, and is promised to it again for as long as it will need more.
"""

from collections.abc import Callable, Sequence

from decode_svc.holding import Held, Holding, NoLandingRow, NoPages, Wanted, shareable
from decode_svc.host_pages import HostPages
from engine.layout import Layout, pages_for
from engine.page_copy import PageCopy
from engine.pages import MAX_PAGES, NULL_PAGE, GrantedPage, PageCounts
from engine.prefixes import Found, Prefixes, page_pools

__all__ = ["DecodeMemory", "Held", "Holding", "NoLandingRow", "NoPages", "Wanted"]


class DecodeMemory:
    """Owner of the page pools, of the landing rows and of the host pages that seats are swapped out to.

    `total_pages`: of each group, or of every one; page 0 included, which is never handed out. `host_pages` per group, 0: none.
    step_tokens: most tokens of one seat in a step where prompts are computed here. prefix_cache: whether pages are found again
    by what they hold, where the layout allows it.
    """

    def __init__(
        self,
        layout: Layout,
        total_pages: int | Sequence[int],
        landing_rows: int,
        host_pages: int = 0,
        step_tokens: int = 1,
        *,
        prefix_cache: bool = False,
    ) -> None:
        self.groups = layout.groups
        totals = [total_pages] * len(self.groups) if isinstance(total_pages, int) else total_pages
        self.pools = page_pools(self.groups, totals)
        self.prefixes = Prefixes(self.pools, self.groups, layout.prefix_keys if prefix_cache else None)
        self.host = HostPages(len(layout.groups), host_pages)
        self.page_bytes = tuple(group.page_bytes for group in layout.groups)
        self.page_tokens = tuple(group.page_tokens for group in layout.groups)
        self.landing_rows = landing_rows
        self.step_tokens = step_tokens
        #: Groups whose pages leave a window.
        self.windowed = tuple(number for number, group in enumerate(self.groups) if group.window is not None)
        #: The group that requests are measured by: the first that keeps all pages, where there is one.
        self.measure = next((number for number in range(len(self.groups)) if number not in self.windowed), 0)
        self._promised = [0] * len(self.pools)
        #: The one given back last goes out first.
        self._free_rows = dict.fromkeys(range(landing_rows - 1, -1, -1))
        self._holdings: dict[str, Holding] = {}
        self._grants: dict[str, Held] = {}

    # promises

    def need(self, tokens: int, *, computed: bool = False) -> list[int]:
        """Most pages that a seat holds at once on its way to `tokens` tokens, per group. computed: here, in chunks."""
        step_tokens = self.step_tokens if computed else 1
        return [group.most_pages(tokens, step_tokens) for group in self.groups]

    def covers(self, holding: Holding, tokens: int) -> bool:
        """Whether the tables reach so far."""
        return all(len(table) >= pages_for(tokens, size) for table, size in zip(holding.tables, self.page_tokens, strict=True))

    def fits_ever(self, tokens: int, siblings: int = 0, shared_tokens: int = 0) -> bool:
        """Whether an empty member could hold `tokens` tokens, also when it has to compute what was lost; and as many for each of
        the siblings, which share the first `shared_tokens`."""
        need = zip(self.need(tokens, computed=True), shareable(self.groups, shared_tokens), self.pools, strict=True)
        return all(count + siblings * (count - shared) <= pool.usable_pages for count, shared, pool in need)

    @property
    def most_tokens(self) -> int:
        """Tokens that an empty member could hold: by the groups that keep all pages, else by the smallest one."""
        bounds = [pool.usable_pages * size for pool, size in zip(self.pools, self.page_tokens, strict=True)]
        kept = [bound for group, bound in enumerate(bounds) if group not in self.windowed]
        return min(kept, default=min(bounds))

    def available(self) -> int:
        """Pages of the measuring group that are neither used nor promised; fewer where another group has none for a seat more."""
        room = self.room()
        short = [room[group] for group in self.windowed if room[group] < self._whole_window(group)]
        return min(room[self.measure], *short) if short else room[self.measure]

    @property
    def sequence_pages(self) -> int:
        """Most pages of the measuring group that one seat holds at once, however long it gets; 0: as many as its tokens need."""
        if self.measure not in self.windowed:
            return 0
        return self.groups[self.measure].most_pages(self.page_tokens[self.measure] * MAX_PAGES, self.step_tokens)

    def _whole_window(self, group: int) -> int:
        return self.groups[group].most_pages(self.groups[group].page_tokens * MAX_PAGES, 1)

    def room(self) -> list[int]:
        """Pages that are neither used nor promised, per group."""
        return [pool.free_pages - promised for pool, promised in zip(self.pools, self._promised, strict=True)]

    def promise(
        self,
        holder: str,
        tokens: int,
        kept: Sequence[int] | None = None,
        wanted: Wanted | None = None,
        *,
        computed: bool = False,
        shared_tokens: int = 0,
    ) -> Holding:
        """Promise the pages of `tokens` tokens, all or nothing; `kept`: pages of each group for others. Raises NoPages.

        What is here of `wanted`, and of use, is in its tables. computed: as in `need`. shared_tokens: the full pages of so many
        at the front come from another seat (decode_svc.branching) and are not promised.
        """
        groups = len(self.pools)
        holding = Holding(holder, tuple([] for _ in self.pools), [0] * groups, tokens, [0] * groups)
        if wanted is not None and self.prefixes.on:
            holding.salt = wanted.salt
            self.prefixes.extend(holding.keys, wanted.salt, wanted.token_ids)
        found = self._found(holding, wanted)
        need = [
            count - shared
            for count, shared in zip(self.need(tokens, computed=computed), shareable(self.groups, shared_tokens), strict=True)
        ]
        self._promise(holding, need, found, kept or [0] * groups)
        self._holdings[holder] = holding
        return holding

    def take(self, holding: Holding, tokens: int) -> None:
        """Make the tables cover `tokens` tokens, all groups or none: out of the promise, then out of what nobody was promised.

        Raises NoPages, never for tokens within the promise.
        """
        missing = [-(-tokens // size) - len(table) for size, table in zip(self.page_tokens, holding.tables, strict=True)]
        if max(missing) <= 0:
            return
        for group, count in enumerate(missing):
            beyond = count - holding.promised[group]
            if beyond > 0 and beyond > self.pools[group].free_pages - self._promised[group]:
                raise NoPages(beyond, self.pools[group].free_pages - self._promised[group])
        for group, count in enumerate(missing):
            if count > 0:
                self._spend(holding, group, min(count, holding.promised[group]))
                holding.tables[group].extend(self.pools[group].allocate(holding.holder, count))

    def slide(self, holding: Holding, cached_tokens: int, *, computed: bool) -> None:
        """The tables' content has grown to so many tokens: give back the pages that left a window, and keep the promise of as
        many as are still needed. computed: more of it is computed here in chunks."""
        for group in self.windowed:
            layout, gone = self.groups[group], holding.gone[group]
            left = layout.first_page(cached_tokens) - gone
            if left > 0:
                self.pools[group].drop_front(holding.holder, left)
                holding.tables[group][gone : gone + left] = [NULL_PAGE] * left
                holding.gone[group] = gone + left
            # One page ahead of a seat that has outgrown what was expected.
            tokens = max(holding.tokens, cached_tokens + layout.page_tokens)
            at_once = layout.most_pages(tokens, self.step_tokens if computed else 1)
            ahead = min(at_once, pages_for(tokens, layout.page_tokens) - holding.gone[group]) - holding.live(group)
            promised = max(0, min(ahead, holding.promised[group] + max(0, left)))
            self._promised[group] += promised - holding.promised[group]
            holding.promised[group] = promised

    def reach(self, holding: Holding) -> int:
        """Tokens that the pages of a seat hold, with those that it was promised."""
        tables = zip(self.page_tokens, holding.tables, holding.promised, strict=True)
        return min(size * (len(table) + promised) for size, table, promised in tables)

    def give_back(self, holding: Holding, tokens: int) -> None:
        """Pages that were taken out of the promise and are behind the first `tokens` tokens are promised again."""
        for group, (pool, table, size) in enumerate(zip(self.pools, holding.tables, self.page_tokens, strict=True)):
            keep = pages_for(tokens, size)
            if len(table) > keep:
                count = pool.trim(holding.holder, keep - holding.gone[group])
                del table[keep:]
                holding.promised[group] += count
                self._promised[group] += count

    def vacate(self, holding: Holding) -> None:
        """Take everything from a seat that stays: its pages and what it was promised. What is indexed may still be found."""
        self._break_promise(holding)
        holding.indexed = 0
        for pool, table in zip(self.pools, holding.tables, strict=True):
            if pool.holds(holding.holder):
                pool.trim(holding.holder, 0)
            table.clear()
        holding.gone = [0] * len(self.pools)

    def refill(self, holding: Holding, tokens: int, most_tokens: int = 0, *, computed: bool = False) -> int:
        """Promise the pages of `tokens` tokens to a seat that was vacated, all or nothing. Raises NoPages.

        Returns how many of its first `most_tokens` tokens are still here; their pages are in its tables.
        """
        assert not holding.pages, f"{holding.holder} is refilled and holds {holding.pages} pages"
        found = self._found(holding, Wanted(holding.salt, (), most_tokens))
        self._promise(holding, self.need(tokens, computed=computed), found, [0] * len(self.pools))
        holding.tokens = tokens
        return holding.found_tokens

    def freed_by(self, holding: Holding) -> list[int]:
        """Pages of each group that could be promised to others if this seat were vacated; those it shares stay."""
        pairs = zip(self.pools, holding.promised, strict=True)
        return [promised + (pool.free_without(holding.holder) if pool.holds(holding.holder) else 0) for pool, promised in pairs]

    def swap_out(self, holding: Holding, tokens: int) -> list[PageCopy] | None:
        """Vacate a seat, what is needed of its first `tokens` tokens into host pages; None when the host area is full: nothing
        was changed."""
        used = [
            table[group.first_page(tokens) : pages_for(tokens, group.page_tokens)]
            for group, table in zip(self.groups, holding.tables, strict=True)
        ]
        copies = self.host.swap_out(holding.holder, used)
        if copies is not None:
            self.vacate(holding)
        return copies

    def swap_back(self, holding: Holding, tokens: int) -> list[PageCopy]:
        """Take the pages of `tokens` tokens out of the promise; the copies that fill them."""
        for group in self.windowed:
            self.skip(holding, group, self.groups[group].first_page(tokens))
        self.take(holding, tokens)
        return self.host.swap_back(
            holding.holder, [table[gone:] for table, gone in zip(holding.tables, holding.gone, strict=True)]
        )

    def release(self, holding: Holding) -> int:
        """Give back what a seat took, what it was promised and its host pages; returns the pages taken. Once for each promise."""
        del self._holdings[holding.holder]
        self._break_promise(holding)
        self.host.release(holding.holder)
        return sum(pool.release(holding.holder) for pool in self.pools if pool.holds(holding.holder))

    # content

    def remember(self, holding: Holding, tokens: int, known: Callable[[int, int], Sequence[int]]) -> None:
        """The first `tokens` tokens of a seat are in its pages: the full ones can be found from now on.

        known: the seat's token ids from one position to before another.
        """
        size, full = self.prefixes.page_tokens, tokens // self.prefixes.page_tokens
        if not holding.salt or full <= holding.indexed:
            return
        named = len(holding.keys)
        if full > named:
            self.prefixes.extend(holding.keys, holding.salt, known(named * size, full * size))
        self.prefixes.remember(holding.holder, holding.indexed, holding.keys[:full], holding.gone)
        holding.indexed = full

    def distrust(self, holding: Holding) -> None:
        """What is in a seat's pages can not be right: nobody finds it any more."""
        self.prefixes.forget(holding.holder, holding.keys)
        holding.salt = b""

    # grants

    def grant(
        self, holding: Holding, grant_id: str, tokens: int, *, with_row: bool = True
    ) -> tuple[int | None, tuple[list[GrantedPage], ...]]:
        """Offer the pages of `tokens` positions that the seat lacks, out of the promise; returns the landing row, when one is
        wanted, and the pages, from the one after `holding.indexed` pages on.

        Pages that the last position has left behind a window, and those that the seat has, are null in it. Raises NoLandingRow.
        """
        if with_row and not self._free_rows:
            raise NoLandingRow(f"all {self.landing_rows} landing rows are held")
        row = self._free_rows.popitem()[0] if with_row else None
        granted = []
        pages = 0
        for group, (pool, layout, table) in enumerate(zip(self.pools, self.groups, holding.tables, strict=True)):
            self.skip(holding, group, max(0, layout.first_page(tokens) - len(table)))
            count = pages_for(tokens, layout.page_tokens) - len(table)
            self._spend(holding, group, count)
            granted.append([GrantedPage(NULL_PAGE, 0)] * (len(table) - holding.indexed) + pool.grant(grant_id, count))
            holding.granted_bytes += count * layout.page_bytes
            pages += count
        self._grants[grant_id] = Held(row, pages)
        return row, tuple(granted)

    def commit(self, holding: Holding, grant_id: str) -> int | None:
        """The writer is done: the pages are the seat's. Returns the landing row, if any, which stays held until `free_row`."""
        held = self._grants.pop(grant_id)
        for pool, table in zip(self.pools, holding.tables, strict=True):
            table += pool.commit_grant(grant_id, holding.holder)
        return held.landing_row

    def free_row(self, row: int) -> None:
        """The logits of a committed grant were read."""
        assert row not in self._free_rows, f"landing row {row} is given back twice"
        self._free_rows[row] = None

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
        if held.landing_row is not None:
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
        faults = [fault for pool in self.pools for fault in pool.check()] + self.host.check()
        for group, pool in enumerate(self.pools):
            promised = sum(holding.promised[group] for holding in self._holdings.values())
            if promised != self._promised[group]:
                faults.append(f"group {group}: {self._promised[group]} pages are counted as promised and seats hold {promised}")
            if promised > pool.free_pages:
                faults.append(f"group {group}: {promised} pages are promised and {pool.free_pages} are free")
        for holding in self._holdings.values():
            for group, (table, gone) in enumerate(zip(holding.tables, holding.gone, strict=True)):
                pool = self.pools[group]
                owned = pool.pages_of(holding.holder) if pool.holds(holding.holder) else ()
                if (*[NULL_PAGE] * gone, *owned) != tuple(table):
                    faults.append(f"group {group}: the table of {holding.holder} is not what the pool says it owns")
        granted = [held.landing_row for held in self._grants.values() if held.landing_row is not None]
        rows = sorted([*self._free_rows, *rows_of_commits, *granted])
        if rows != list(range(self.landing_rows)):
            faults.append(f"landing rows: {len(rows)} are accounted for, there are {self.landing_rows}")
        return faults

    def _found(self, holding: Holding, wanted: Wanted | None) -> Found:
        if wanted is None:
            return self.prefixes.to_compute_on(())
        able = holding.keys[: wanted.most_tokens // self.prefixes.page_tokens]
        return self.prefixes.to_receive(able, len(wanted.token_ids)) if wanted.received else self.prefixes.to_compute_on(able)

    def _promise(self, holding: Holding, need: Sequence[int], found: Found, kept: Sequence[int]) -> None:
        """Take what was found, and promise the rest; both or nothing."""
        left = [free - others for free, others in zip(self.room(), kept, strict=True)]
        if not self.prefixes.fits(found, need, left):
            short = max(zip(need, left, strict=True), key=lambda pair: pair[0] - pair[1])
            raise NoPages(short[0], max(0, short[1]))
        holding.indexed = holding.found_tokens = 0
        if found.pages or any(found.spans):
            holding.tables = self.prefixes.reuse(holding.holder, found)
            holding.gone = [span.start for span in found.spans]
            holding.indexed = found.complete_pages
            holding.found_tokens = found.pages * self.prefixes.page_tokens
        self.prefixes.note(len(found.keys), found.pages)
        for group, (pages, span) in enumerate(zip(need, found.spans, strict=True)):
            holding.promised[group] += pages - len(span)
            self._promised[group] += pages - len(span)

    def skip(self, holding: Holding, group: int, pages: int) -> None:
        """A table begins behind so many pages, which left the window elsewhere, or never were in this one."""
        assert not pages or not holding.tables[group], f"{holding.holder} has pages in group {group} already"
        holding.tables[group].extend([NULL_PAGE] * pages)
        holding.gone[group] += pages

    def _break_promise(self, holding: Holding) -> None:
        for group, promised in enumerate(holding.promised):
            self._promised[group] -= promised
            holding.promised[group] = 0

    def _spend(self, holding: Holding, group: int, count: int) -> None:
        assert count <= holding.promised[group], f"{holding.holder} takes {count} pages, promised {holding.promised}"
        holding.promised[group] -= count
        self._promised[group] -= count


def _values(counts: PageCounts) -> tuple[int, ...]:
    return (counts.total, counts.free, counts.owned, counts.cached, counts.granted, counts.quarantined, counts.pinned)
