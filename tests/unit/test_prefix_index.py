"""Pages found again by what they hold: references, order of giving up, news for others, and a plain model under random calls."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from engine.pages import OutOfPages, PagePool, PageState, WrongPageState
from engine.prefix_index import CHANGES_MIN, PrefixIndex


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def computed(pool: PagePool, holder: str, content: Sequence[int]) -> list[int]:
    """A holder that finds what it can, computes the rest and indexes it."""
    found = pool.reuse(holder, keys(*content))
    pages = [*found, *pool.allocate(holder, len(content) - len(found))]
    pool.remember(holder, len(found), keys(*content[len(found) :]))
    return pages


def test_a_page_that_nobody_holds_is_found_again_until_its_room_is_needed() -> None:
    pool = PagePool(6)
    pages = computed(pool, "a", [1, 2, 3])
    pool.release("a")
    assert (pool.free_pages, pool.counts().cached, pool.counts().free) == (5, 3, 2)
    assert pool.reuse("b", keys(1, 2, 9)) == pages[:2]
    assert [pool.state(page) for page in pages] == [PageState.OWNED, PageState.OWNED, PageState.CACHED]
    assert pool.allocate("c", 3) and pool.free_pages == 0
    assert pool.index.page(key(3)) is None and pool.index.counts.evicted_pages == 1
    with pytest.raises(OutOfPages):
        pool.allocate("c", 1)
    assert pool.check() == []


def test_the_front_of_a_prefix_lives_longest() -> None:
    """A sequence lets go of its last page first, and what was let go first is given up first."""
    pool = PagePool(5)
    computed(pool, "a", [1, 2, 3, 4])
    pool.release("a")
    for left in (3, 2, 1, 0):
        pool.allocate(f"x{left}", 1)
        assert pool.index.front(keys(1, 2, 3, 4)) == [pool.index.page(key(n)) for n in range(1, left + 1)]


def test_using_a_prefix_again_makes_it_young() -> None:
    pool = PagePool(5)
    computed(pool, "old", [1, 2])
    computed(pool, "young", [3, 4])
    pool.release("old")
    pool.release("young")
    pool.reuse("again", keys(1, 2))
    pool.release("again")
    pool.allocate("x", 2)
    assert len(pool.index.front(keys(1, 2))) == 2 and not pool.index.front(keys(3))


def test_a_shared_page_is_given_up_only_when_the_last_holder_has_let_go() -> None:
    pool = PagePool(3)
    pages = computed(pool, "a", [1, 2])
    assert pool.reuse("b", keys(1, 2)) == pages
    pool.release("a")
    assert pool.free_pages == 0 and pool.free_without("b") == 2
    pool.release("b")
    assert pool.free_pages == 2 and pool.counts().cached == 2


def test_the_same_content_is_indexed_once() -> None:
    """Two that computed one prefix side by side: the second copy is not found, and free as soon as it is let go."""
    pool = PagePool(5)
    first = computed(pool, "a", [1, 2])
    pool.allocate("b", 2)
    assert pool.remember("b", 0, keys(1, 2)) == 0
    pool.release("b")
    assert pool.counts().free == 2 and pool.index.front(keys(1, 2)) == first
    assert pool.check() == []


def test_a_page_that_a_write_still_reads_stays_indexed_and_can_be_held_again() -> None:
    pool = PagePool(4)
    (page,) = computed(pool, "a", [1])
    pool.pin("write", [page])
    pool.release("a")
    assert pool.state(page) is PageState.PINNED and pool.free_pages == 2
    pool.allocate("x", 2)
    assert pool.reuse("b", keys(1)) == [page]
    pool.unpin("write")
    assert pool.state(page) is PageState.OWNED
    pool.release("b")
    assert pool.state(page) is PageState.CACHED and pool.check() == []


def test_a_grant_takes_pages_out_of_the_index() -> None:
    pool = PagePool(3)
    computed(pool, "a", [1, 2])
    pool.release("a")
    pool.grant("g", 2)
    assert len(pool.index) == 0 and pool.check() == []
    pool.revoke_grant("g")
    pool.quarantine_grant("g")
    assert pool.index.front(keys(1, 2)) == [] and pool.check() == []
    pool.reclaim_grant("g")
    assert pool.counts().free == 2


def test_content_that_is_not_trusted_is_not_found_again() -> None:
    pool = PagePool(4)
    computed(pool, "a", [1, 2])
    pool.reuse("b", keys(1))
    assert pool.forget("a") == 2 and pool.forget("b") == 0
    pool.release("a")
    pool.release("b")
    assert pool.counts().free == 3 and len(pool.index) == 0 and pool.check() == []


def test_a_prefix_is_the_front_of_a_table() -> None:
    pool = PagePool(4)
    pool.allocate("a", 1)
    with pytest.raises(WrongPageState, match="has pages already"):
        pool.reuse("a", keys(1))
    with pytest.raises(WrongPageState, match="1 pages, 2 are to be indexed"):
        pool.remember("a", 0, keys(1, 2))


def test_news_are_told_once_and_a_change_with_its_undoing_not_at_all() -> None:
    index = PrefixIndex(8)
    index.add(1, key(1))
    index.add(2, key(2))
    index.drop(2)
    assert index.take_changes().stored == (key(1),)
    assert not index.take_changes()
    index.drop(1)
    index.add(3, key(1))
    assert not index.take_changes()
    index.drop(3)
    assert index.take_changes().evicted == (key(1),)


def test_of_too_many_news_everything_is_told_anew() -> None:
    pages = range(1, CHANGES_MIN + 1)
    index = PrefixIndex(CHANGES_MIN + 1)
    for page in pages:
        index.add(page, key(page))
    assert len(index.take_changes().stored) == CHANGES_MIN
    for page in pages:
        index.drop(page)
        index.add(page, key(page + CHANGES_MIN))
    assert index.check(set()) == []
    told = index.take_changes()
    assert told.anew and set(told.stored) == {key(page + CHANGES_MIN) for page in pages} and not told.evicted
    index.drop(1)
    assert index.take_changes().evicted == (key(1 + CHANGES_MIN),)


class Plain:
    """The same by sets and lists: tables of holders, and an ordered list of (key, page) that nobody holds."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.tables: dict[str, list[int]] = {}
        self.content: dict[int, int] = {}
        self.waiting: list[int] = []
        self.grants: dict[str, list[int]] = {}
        self.pins: dict[str, list[int]] = {}

    def held(self) -> Counter[int]:
        return Counter(page for table in self.tables.values() for page in table)

    def read(self) -> set[int]:
        return {page for pages in self.pins.values() for page in pages}

    def free(self) -> int:
        away = {page for pages in self.grants.values() for page in pages}
        return self.total - 1 - len({*self.held(), *self.read(), *away})

    def where(self, number: int) -> int | None:
        return next((page for page, content in self.content.items() if content == number), None)

    def took(self, pages: Sequence[int]) -> None:
        """Pages were handed out: they hold nothing that is known, and the oldest ones were given up first."""
        given_up = [page for page in pages if page in self.waiting]
        assert sorted(given_up) == sorted(self.waiting[: len(given_up)])
        for page in given_up:
            self.waiting.remove(page)
            del self.content[page]

    def let_go(self, pages: Sequence[int]) -> None:
        held, read = self.held(), self.read()
        for page in pages:
            if page in self.content and not held[page] and page not in read and page not in self.waiting:
                self.waiting.append(page)


class Walk:
    """Random calls on a pool and on the plain model; what both say is the same after each."""

    def __init__(self, seed: int, total: int) -> None:
        self.rng = random.Random(seed)
        self.pool, self.plain = PagePool(total), Plain(total)
        self.names = 0
        self.expected_told: set[int] = set()

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def step(self) -> None:
        rng, plain = self.rng, self.plain
        moves = [self.begin, self.begin, self.grow]
        moves += [self.end, self.trim] if plain.tables else []
        moves += [self.pin] if plain.tables and len(plain.pins) < 4 else []
        moves += [self.unpin] if plain.pins else []
        moves += [self.grant] if len(plain.grants) < 3 else [self.grant_ends]
        moves += [self.distrust] if plain.tables and rng.random() < 0.1 else []
        rng.choice(moves)()

    def prefix(self) -> list[int]:
        """Chains of contents from a small tree: 100 * branch + depth."""
        branch, depth = self.rng.randrange(6), self.rng.randrange(7)
        return [n if n < 3 else 100 * (branch + 1) + n for n in range(depth)]

    def begin(self) -> None:
        if len(self.plain.tables) > 9:
            return self.end()
        content, holder = self.prefix(), self.name()
        found = []
        for number in content:
            page = self.plain.where(number)
            if page is None:
                break
            found.append(page)
        pages = self.pool.reuse(holder, keys(*content))
        assert pages == found
        for page in pages:
            if page in self.plain.waiting:
                self.plain.waiting.remove(page)
        self.plain.tables[holder] = pages[:]
        rest = content[len(pages) :]
        if self.allocate(holder, len(rest)):
            new = [n for n in rest if self.plain.where(n) is None]
            assert self.pool.remember(holder, len(pages), keys(*rest)) == len(new)
            for page, number in zip(self.plain.tables[holder][len(pages) :], rest, strict=True):
                if self.plain.where(number) is None:
                    self.plain.content[page] = number
        return None

    def allocate(self, holder: str, count: int) -> bool:
        if count > self.plain.free():
            with pytest.raises(OutOfPages):
                self.pool.allocate(holder, count)
            return False
        pages = self.pool.allocate(holder, count)
        self.plain.took(pages)
        self.plain.tables[holder] += pages
        return True

    def any_holder(self) -> str:
        return self.rng.choice(list(self.plain.tables))

    def grow(self) -> None:
        if self.plain.tables:
            self.allocate(self.any_holder(), self.rng.randrange(3))

    def end(self) -> None:
        holder = self.any_holder()
        table = self.plain.tables.pop(holder)
        assert self.pool.release(holder) == len(table)
        self.plain.let_go(table[::-1])

    def trim(self) -> None:
        holder = self.any_holder()
        table = self.plain.tables[holder]
        keep = self.rng.randrange(len(table) + 1)
        gone = table[keep:]
        del table[keep:]
        self.pool.trim(holder, keep)
        self.plain.let_go(gone[::-1])

    def pin(self) -> None:
        table, pin = self.plain.tables[self.any_holder()], self.name()
        self.plain.pins[pin] = self.rng.sample(table, self.rng.randrange(len(table) + 1))
        self.pool.pin(pin, self.plain.pins[pin])

    def unpin(self) -> None:
        pin = self.rng.choice(list(self.plain.pins))
        pages = self.plain.pins.pop(pin)
        self.pool.unpin(pin)
        self.plain.let_go(pages[::-1])

    def grant(self) -> None:
        grant, count = self.name(), self.rng.randrange(4)
        if count > self.plain.free():
            return
        pages = [page.page_id for page in self.pool.grant(grant, count)]
        self.plain.took(pages)
        self.plain.grants[grant] = pages

    def grant_ends(self) -> None:
        grant = self.rng.choice(list(self.plain.grants))
        pages = self.plain.grants.pop(grant)
        if self.rng.random() < 0.5:
            holder = self.name()
            self.pool.commit_grant(grant, holder)
            self.plain.tables[holder] = pages[:]
        else:
            self.pool.revoke_grant(grant)
            self.pool.reclaim_grant(grant)

    def distrust(self) -> None:
        holder = self.any_holder()
        gone = [page for page in self.plain.tables[holder] if page in self.plain.content]
        assert self.pool.forget(holder) == len(gone)
        for page in gone:
            del self.plain.content[page]

    def same(self) -> None:
        pool, plain = self.pool, self.plain
        assert pool.free_pages == plain.free()
        assert pool.counts().cached == len(plain.waiting)
        assert len(pool.index) == len(plain.content)
        assert list(pool.index._waiting) == plain.waiting

    def told(self) -> None:
        changes = self.pool.index.take_changes()
        if changes.anew:
            self.expected_told.clear()
        self.expected_told |= {int.from_bytes(one, "little") for one in changes.stored}
        self.expected_told -= {int.from_bytes(one, "little") for one in changes.evicted}
        assert self.expected_told == set(self.plain.content.values())


@pytest.mark.parametrize("seed", range(3))
def test_against_a_plain_model(seed: int) -> None:
    walk_through(seed, steps=300, total=12 + 9 * seed)


@pytest.mark.slow
def test_against_a_plain_model_for_long() -> None:
    for seed in range(10):
        walk_through(1000 + seed, steps=10_000, total=8 + 5 * seed)


def walk_through(seed: int, steps: int, total: int) -> None:
    walk = Walk(seed, total)
    for number in range(steps):
        walk.step()
        walk.same()
        assert walk.pool.check() == []
        if number % 7 == 0:
            walk.told()
