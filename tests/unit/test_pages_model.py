"""The page allocator against a model that is only sets and lists, under random calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.pages import OutOfPages, PageCounts, PagePool, StaleHolder, WrongPageState

TOTAL = 24
USABLE = frozenset(range(1, TOTAL))


class AgainstSets(RuleBasedStateMachine):
    holders = Bundle("holders")
    grants = Bundle("grants")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(TOTAL)
        self.tables: dict[str, list[int]] = {}
        self.open: dict[str, tuple[str, list[int]]] = {}
        self.reads: dict[str, list[int]] = {}
        self.generations = dict.fromkeys(USABLE, 0)
        self.names = 0

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    @property
    def owned(self) -> set[int]:
        return {page for table in self.tables.values() for page in table}

    @property
    def pinned(self) -> set[int]:
        return {page for pages in self.reads.values() for page in pages} - self.owned

    def in_grants(self, *phases: str) -> set[int]:
        return {page for phase, pages in self.open.values() if phase in phases for page in pages}

    @property
    def free(self) -> set[int]:
        return set(USABLE) - self.owned - self.pinned - self.in_grants("offered", "revoking", "quarantined")

    def taken(self, pages: list[int], before: set[int], count: int) -> None:
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= before

    # Holders

    @rule(target=holders, count=st.integers(0, 9))
    def open_holder(self, count: int) -> object:
        name, free = self.name("h"), self.free
        try:
            pages = self.pool.allocate(name, count)
        except OutOfPages as refused:
            assert (refused.wanted, refused.free) == (count, len(free)) and count > len(free)
            return multiple()
        self.taken(pages, free, count)
        self.tables[name] = pages[:]
        return name

    @rule(holder=holders, count=st.integers(0, 5))
    def grow(self, holder: str, count: int) -> None:
        if holder not in self.tables:
            return
        free = self.free
        try:
            pages = self.pool.allocate(holder, count)
        except OutOfPages:
            assert count > len(free)
            return
        self.taken(pages, free, count)
        self.tables[holder] += pages

    @rule(target=holders, source=holders, data=st.data())
    def share_prefix(self, source: str, data: st.DataObject) -> object:
        pages = self.tables.get(source, [])
        pages = pages[: data.draw(st.integers(0, len(pages)))]
        name = self.name("h")
        self.pool.share(name, pages)
        self.tables[name] = pages[:]
        return name

    @rule(holder=holders, page=st.sampled_from(sorted(USABLE)))
    def share_anything(self, holder: str, page: int) -> None:
        if holder not in self.tables:
            return
        try:
            self.pool.share(holder, [page])
        except WrongPageState:
            assert page not in self.owned or page in self.tables[holder]
        else:
            assert page in self.owned and page not in self.tables[holder]
            self.tables[holder].append(page)

    @rule(holder=holders, keep=st.integers(0, 9))
    def trim(self, holder: str, keep: int) -> None:
        table = self.tables.get(holder)
        try:
            count = self.pool.trim(holder, keep)
        except StaleHolder:
            assert table is None
        else:
            assert table is not None and count == max(0, len(table) - keep)
            del table[keep:]

    @rule(holder=holders, count=st.integers(0, 9))
    def drop_front(self, holder: str, count: int) -> None:
        table = self.tables.get(holder)
        try:
            self.pool.drop_front(holder, count)
        except StaleHolder:
            assert table is None
        except WrongPageState:
            assert table is not None and count > len(table)
        else:
            assert table is not None
            del table[:count]

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        """Not consumed: released holders come back here and must be refused."""
        table = self.tables.pop(holder, None)
        try:
            count = self.pool.release(holder)
        except StaleHolder:
            assert table is None
        else:
            assert table is not None and count == len(table)

    # Grants

    @rule(target=grants, count=st.integers(0, 9))
    def grant(self, count: int) -> object:
        name, free = self.name("g"), self.free
        try:
            granted = self.pool.grant(name, count)
        except OutOfPages:
            assert count > len(free)
            return multiple()
        pages = [page.page_id for page in granted]
        self.taken(pages, free, count)
        for page in granted:
            self.generations[page.page_id] += 1
            assert page.generation == self.generations[page.page_id]
        self.open[name] = ("offered", pages)
        return name

    @rule(grant=grants)
    def revoke(self, grant: str) -> None:
        try:
            self.pool.revoke_grant(grant)
        except StaleHolder:
            assert grant not in self.open
        else:
            phase, pages = self.open[grant]
            self.open[grant] = ("revoking" if phase == "offered" else phase, pages)

    @rule(grant=grants)
    def quarantine(self, grant: str) -> None:
        phase, pages = self.open.get(grant, ("gone", []))
        try:
            count = self.pool.quarantine_grant(grant)
        except (StaleHolder, WrongPageState):
            assert phase in ("gone", "offered")
        else:
            assert phase in ("revoking", "quarantined") and count == len(pages)
            self.open[grant] = ("quarantined", pages)

    @rule(grant=grants)
    def reclaim(self, grant: str) -> None:
        phase, pages = self.open.get(grant, ("gone", []))
        try:
            count = self.pool.reclaim_grant(grant)
        except (StaleHolder, WrongPageState):
            assert phase in ("gone", "offered")
        else:
            assert phase in ("revoking", "quarantined") and count == len(pages)
            del self.open[grant]

    @rule(target=holders, grant=grants, into=st.none() | holders)
    def commit(self, grant: str, into: str | None) -> object:
        phase, pages = self.open.get(grant, ("gone", []))
        holder = into if into in self.tables else self.name("h")
        try:
            committed = self.pool.commit_grant(grant, holder)
        except (StaleHolder, WrongPageState):
            assert phase != "offered"
            return multiple()
        assert phase == "offered" and committed == pages
        del self.open[grant]
        self.tables.setdefault(holder, []).extend(pages)
        return holder

    # Pins

    @rule(target=pins, holder=holders, data=st.data())
    def pin(self, holder: str, data: st.DataObject) -> object:
        table = self.tables.get(holder, [])
        pages = data.draw(st.lists(st.sampled_from(table), unique=True)) if table else []
        name = self.name("p")
        self.pool.pin(name, pages)
        self.reads[name] = pages
        return name

    @rule(pin=consumes(pins))
    def unpin(self, pin: str) -> None:
        assert self.pool.unpin(pin) == len(self.reads.pop(pin))
        try:
            self.pool.unpin(pin)
        except StaleHolder:
            return
        raise AssertionError("a pin was given back twice")

    # Books

    @invariant()
    def same_books(self) -> None:
        assert self.pool.check() == []
        assert self.pool.free_pages == len(self.free)
        assert self.pool.counts() == PageCounts(
            total=TOTAL - 1,
            free=len(self.free),
            owned=len(self.owned),
            cached=0,
            granted=len(self.in_grants("offered", "revoking")),
            quarantined=len(self.in_grants("quarantined")),
            pinned=len(self.pinned),
        )
        for holder, table in self.tables.items():
            assert self.pool.pages_of(holder) == tuple(table)

    def teardown(self) -> None:
        """Whatever happened, giving everything back leaves every page free."""
        for holder in self.tables:
            self.pool.release(holder)
        for pin in self.reads:
            self.pool.unpin(pin)
        for grant in self.open:
            self.pool.revoke_grant(grant)
            self.pool.reclaim_grant(grant)
        assert self.pool.free_pages == len(USABLE)
        assert self.pool.check() == []


TestAgainstSets = pytest.mark.slow(AgainstSets.TestCase)
TestAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
