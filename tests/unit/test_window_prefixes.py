"""Prefixes where pages leave windows: what of them can be computed on from, what is owed to holders that share, what is told.

The walk takes random calls on the pools of up to three groups and compares what is found with the definition.
"""

import random
from collections.abc import Sequence

import pytest

from engine.layout import GroupKind, GroupLayout, pages_for
from engine.pages import OutOfPages, PagePool, PageState
from engine.prefixes import Prefixes, page_pools
from lifecycle.prefix_keys import PrefixKeys, tenant_salt
from prefill_svc.prompt_pages import PromptPages, most_pages

SIZE = 4
SALT, OTHER = tenant_salt("one"), tenant_salt("another")
KEYS = PrefixKeys(b"identity", SIZE)


def group(window: int | None) -> GroupLayout:
    return GroupLayout(GroupKind.FULL if window is None else GroupKind.SLIDING, 1, 1, 1, SIZE, "float32", window)


def indexed(pool: PagePool, holder: str, keys: Sequence[bytes]) -> None:
    pool.allocate(holder, len(keys))
    pool.remember(holder, 0, keys)


# what is usable


@pytest.mark.parametrize(
    ("window", "full", "windowed", "usable"),
    [
        (8, range(6), range(6), 6),
        (8, range(6), (4, 5), 6),  # positions 17 to 23 are seen by the token at 24
        (9, range(6), (4, 5), 6),
        (10, range(6), (4, 5), 0),  # and position 15 with two more
        (10, range(6), (3, 4, 5), 6),
        (8, range(4), range(6), 4),
        (8, (0, 1, 3, 4), range(6), 2),
        (8, range(6), (0, 1, 3), 2),
        (8, range(6), (0, 1, 3, 4), 5),
        (8, range(6), (1, 3, 5), 0),
        (8, range(6), (0, 5), 1),  # one page is the front of its window
        (1, range(6), (), 6),  # a token that sees itself alone
        (100, range(6), range(5), 5),
        (100, range(6), range(1, 6), 0),
    ],
)
def test_a_prefix_is_usable_as_far_as_each_group_has_what_the_next_token_sees(
    window: int, full: Sequence[int], windowed: Sequence[int], usable: int
) -> None:
    groups = (group(None), group(window))
    pools = page_pools(groups, [20, 20])
    keys = KEYS.of(SALT, range(6 * SIZE))
    for pool, numbers in zip(pools, (full, windowed), strict=True):
        indexed(pool, "a", [keys[number] for number in numbers])
        pool.release("a")
    found = Prefixes(pools, groups, KEYS).to_compute_on(keys)
    assert found.pages == usable
    assert found.spans == tuple(range(each.first_page(usable * SIZE), usable) for each in groups)


def test_without_a_group_that_keeps_everything_the_end_of_a_prefix_is_enough() -> None:
    groups = (group(6),)
    pools = page_pools(groups, [20])
    keys = KEYS.of(SALT, range(6 * SIZE))
    indexed(pools[0], "a", keys[3:5])
    assert Prefixes(pools, groups, KEYS).to_compute_on(keys).spans == (range(3, 5),)


def test_who_is_sent_the_rest_keeps_what_each_group_has_of_it() -> None:
    groups = (group(None), group(6))
    pools = page_pools(groups, [20, 20])
    keys = KEYS.of(SALT, range(7 * SIZE))
    prefixes = Prefixes(pools, groups, KEYS)
    indexed(pools[0], "a", keys[:5])
    found = prefixes.to_receive(keys, 7 * SIZE + 1)
    # The token at 29 sees position 24, on page 6: nothing of the window is here, and five pages of the others are.
    assert (found.spans, found.pages, found.complete_pages) == ((range(5), range(6, 6)), 0, 5)
    indexed(pools[1], "b", [keys[6]])
    found = prefixes.to_receive(keys, 7 * SIZE + 1)
    assert (found.spans, found.complete_pages) == ((range(5), range(6, 7)), 5)
    assert [table[:] for table in prefixes.reuse("c", found)] == [
        list(pools[0].pages_of("a")),
        [0] * 6 + list(pools[1].pages_of("b")),
    ]


# pages that are owed


def test_a_page_that_two_hold_keeps_one_free_for_each() -> None:
    """Whoever leaves it behind first gets another one in its place, though it frees none."""
    pool = PagePool(6, windowed=True)
    keys = KEYS.of(SALT, range(2 * SIZE))
    indexed(pool, "a", keys)
    assert (pool.free_pages, pool.owed_pages) == (3, 0)
    assert pool.price(pool.index.front(keys)) == 2
    pool.reuse("b", keys)
    assert (pool.free_pages, pool.owed_pages) == (1, 2) and pool.check() == []
    pool.allocate("c", 1)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 free"):
        pool.allocate("c", 1)
    for holder in ("a", "b"):
        pool.drop_front(holder, 1)
        pool.allocate(holder, 1)
    assert pool.owed_pages == 1 and pool.check() == []
    assert pool.free_without("a") == 2
    pool.release("a")
    assert (pool.free_pages, pool.owed_pages) == (2, 0) and pool.check() == []


def test_more_are_not_shared_than_can_be_owed() -> None:
    pool = PagePool(4, windowed=True)
    keys = KEYS.of(SALT, range(2 * SIZE))
    indexed(pool, "a", keys)
    with pytest.raises(OutOfPages):
        pool.reuse("b", keys)
    with pytest.raises(OutOfPages):
        pool.share("b", pool.pages_of("a"))
    assert not pool.holds("b") and pool.check() == []
    assert pool.reuse("b", keys[:1]) == list(pool.pages_of("a")[:1])


def test_what_a_write_still_reads_is_owed_to_who_shares_it() -> None:
    """A sequence that moved away leaves a page to its write and to another sequence, whose window then leaves it."""
    pool = PagePool(4, windowed=True)
    keys = KEYS.of(SALT, range(SIZE))
    indexed(pool, "moves", keys)
    (page,) = pool.reuse("stays", keys)
    pool.pin("write", [page])
    assert pool.free_pages == 1
    pool.release("moves")
    assert pool.free_pages == 1 and pool.check() == []
    pool.drop_front("stays", 1)
    assert pool.state(page) is PageState.PINNED and pool.allocate("stays", 1) and pool.free_pages == 1
    assert pool.check() == []
    assert pool.reuse("late", keys) == [page] and pool.free_pages == 0
    pool.unpin("write")
    assert pool.free_pages == 1 and pool.check() == []


def test_who_leaves_a_page_that_its_writer_still_holds_is_owed_no_other() -> None:
    pool = PagePool(4, windowed=True)
    keys = KEYS.of(SALT, range(SIZE))
    indexed(pool, "writes", keys)
    pool.pin("write", pool.reuse("leaves", keys))
    pool.drop_front("leaves", 1)
    assert (pool.owed_pages, pool.free_pages) == (0, 2) and pool.check() == []


def test_check_speaks_when_debts_are_wrong() -> None:
    pool = PagePool(4, windowed=True)
    keys = KEYS.of(SALT, range(SIZE))
    indexed(pool, "a", keys)
    pool.reuse("b", keys)
    pool._held_references += 1
    pool._kept.add(3)
    text = "\n".join(pool.check())
    assert "3 references are counted in all, 2 are held" in text
    assert "page 3: kept for a write, and none reads it" in text
    assert "3 pages are counted as owed, 1 are" in text


def test_what_is_not_trusted_is_not_found_where_it_left_a_window_either() -> None:
    groups = (group(None), group(5))
    pools = page_pools(groups, [20, 20])
    prefixes = Prefixes(pools, groups, KEYS)
    keys = KEYS.of(SALT, range(4 * SIZE))
    for pool in pools:
        pool.allocate("a", 4)
    prefixes.remember("a", 0, keys, (0, 0))
    pools[1].drop_front("a", 2)
    prefixes.forget("a", keys)
    assert [len(pool.index) for pool in pools] == [0, 0]
    assert pools[1].counts().free == 17 and not any(pool.check() for pool in pools)


# against a plain model


class Walk:
    """Sequences that are computed in chunks and leave pages behind, others that are sent, writes that read: at random."""

    STEP = 6

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        windows = self.rng.choice([(None, 5, 9), (None, 6), (7,), (None, 1), (None, 40)])
        self.groups = tuple(group(window) for window in windows)
        self.pools = page_pools(self.groups, [self.rng.randrange(16, 40) for _ in windows])
        self.prefixes = Prefixes(self.pools, self.groups, KEYS)
        self.computing: dict[str, tuple[PromptPages, list[bytes], int, int]] = {}
        self.sent: dict[str, int] = {}
        self.pins: list[tuple[int, str]] = []
        self.content: list[dict[int, bytes]] = [{} for _ in windows]
        self.chains: dict[bytes, list[bytes]] = {}
        self.told: set[bytes] = set()
        self.names = 0
        self.hits = 0

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def prompt(self) -> tuple[list[int], list[bytes]]:
        """One of few beginnings, then something of few; of two tenants."""
        rng = self.rng
        ids = [*range(rng.choice((0, 5, 12, 20))), *([rng.randrange(100, 103)] * rng.randrange(1, 12))]
        keys = KEYS.of(rng.choice((SALT, OTHER)), ids)
        for count, key in enumerate(keys, 1):
            self.chains[key] = keys[:count]
        return ids, keys

    def usable(self, keys: Sequence[bytes]) -> bool:
        """By the definition: the token behind them finds all that it sees, in every group."""
        count = len(keys)
        return all(
            pool.index.page(keys[number]) is not None
            for pool, each in zip(self.pools, self.groups, strict=True)
            for number in range(each.first_page(count * SIZE), count)
        )

    def step(self) -> None:
        moves = [self.begin, self.begin, self.receive]
        moves += [self.compute] * 4 + [self.end, self.pin] if self.computing else []
        moves += [self.end_sent] if self.sent else []
        moves += [self.unpin] if self.pins else []
        moves += [self.distrust] if self.computing and self.rng.random() < 0.05 else []
        self.rng.choice(moves)()

    def begin(self) -> None:
        if len(self.computing) > 3:
            return self.end()
        ids, keys = self.prompt()
        able = keys[: (len(ids) - 1) // SIZE]
        found = self.prefixes.to_compute_on(able)
        assert found.pages == max(count for count in range(len(able) + 1) if self.usable(able[:count]))
        room = [pool.free_pages for pool in self.pools]
        if not self.prefixes.fits(found, most_pages(self.groups, len(ids), self.STEP), room):
            return None
        holder = self.name()
        tables = self.prefixes.reuse(holder, found)
        self.right(tables, keys)
        pages = PromptPages(self.pools, self.groups, holder, len(ids), self.STEP, tables)
        self.computing[holder] = (pages, keys, found.pages * SIZE, len(ids))
        self.hits += found.pages > 0
        return None

    def right(self, tables: Sequence[Sequence[int]], keys: Sequence[bytes]) -> None:
        for table, content in zip(tables, self.content, strict=True):
            assert all(content[page] == key for page, key in zip(table, keys, strict=False) if page)

    def compute(self) -> None:
        """A chunk: it is written, its full pages can be found, what left a window goes back; never is a page short."""
        holder = self.rng.choice(list(self.computing))
        pages, keys, done, tokens = self.computing[holder]
        end = min(tokens, done + self.rng.randrange(1, self.STEP + 1))
        if done == end:
            return self.end(holder)
        for table, content, each in zip(pages.tables, self.content, self.groups, strict=True):
            assert all(table[each.first_page(done) : pages_for(end, SIZE)])
            for number in range(done // SIZE, pages_for(end, SIZE)):
                content[table[number]] = keys[number] if (number + 1) * SIZE <= end else b""
        full = end // SIZE
        self.prefixes.remember(holder, done // SIZE, keys[:full], pages.gone)
        pages.slide(end)
        self.computing[holder] = (pages, keys, end, tokens)
        return None

    def end(self, holder: str = "") -> None:
        holder = holder or self.rng.choice(list(self.computing))
        self.computing.pop(holder)[0].release()

    def receive(self) -> None:
        """What a decode member does: of each group the pages that are needed and not here are sent."""
        ids, keys = self.prompt()
        found = self.prefixes.to_receive(keys, len(ids))
        for span, pool, each in zip(found.spans, self.pools, self.groups, strict=True):
            assert span.start == each.first_page(len(ids))
            assert all(pool.index.page(keys[number]) is not None for number in span)
            assert span.stop >= len(keys) or pool.index.page(keys[span.stop]) is None
        wanted = [pages_for(len(ids), SIZE) - span.start for span in found.spans]
        if not self.prefixes.fits(found, wanted, [pool.free_pages for pool in self.pools]):
            return
        holder = self.name()
        tables = self.prefixes.reuse(holder, found)
        self.right(tables, keys)
        gone = [span.start for span in found.spans]
        for table, pool, content in zip(tables, self.pools, self.content, strict=True):
            for page in pool.allocate(holder, pages_for(len(ids), SIZE) - len(table)):
                content[page] = keys[len(table)] if len(table) < len(keys) else b""
                table.append(page)
        self.prefixes.remember(holder, found.complete_pages, keys, gone)
        self.sent[holder] = len(ids)

    def end_sent(self) -> None:
        holder = self.rng.choice(list(self.sent))
        del self.sent[holder]
        for pool in self.pools:
            pool.release(holder)

    def pin(self) -> None:
        """A write reads what a prompt's end will see, so its own window never leaves that."""
        pages, _, done, tokens = self.computing[self.rng.choice(list(self.computing))]
        number = self.rng.randrange(len(self.pools))
        first = self.groups[number].first_page(tokens)
        ready = [page for page in pages.tables[number][first : done // SIZE] if page]
        if ready:
            name = self.name()
            self.pools[number].pin(name, ready)
            self.pins.append((number, name))

    def unpin(self) -> None:
        number, name = self.pins.pop(self.rng.randrange(len(self.pins)))
        self.pools[number].unpin(name)

    def distrust(self) -> None:
        holder = self.rng.choice(list(self.computing))
        _, keys, done, _ = self.computing[holder]
        self.prefixes.forget(holder, keys[: done // SIZE])
        self.end(holder)

    def check(self) -> None:
        for pool in self.pools:
            assert pool.check() == []
            assert pool.free_pages >= 0
        changes = self.prefixes.take_changes()
        if changes.anew:
            self.told.clear()
        self.told |= set(changes.stored)
        self.told -= set(changes.evicted)
        assert all(self.usable(self.chains[key]) for key in self.told)
        if len(self.groups) > 1 or self.groups[0].window is not None:
            assert self.prefixes._usable is not None and self.prefixes._usable.check() == []

    def at_rest(self) -> None:
        for holder in list(self.computing):
            self.end(holder)
        while self.sent:
            self.end_sent()
        while self.pins:
            self.unpin()
        self.check()
        assert all(pool.free_pages == pool.usable_pages for pool in self.pools)


def walk_through(seed: int, steps: int) -> Walk:
    walk = Walk(seed)
    for _ in range(steps):
        walk.step()
        walk.check()
    walk.at_rest()
    return walk


@pytest.mark.parametrize("seed", range(6))
def test_against_the_definition(seed: int) -> None:
    assert walk_through(seed, steps=300).hits > 10


@pytest.mark.slow
def test_against_the_definition_for_long() -> None:
    for seed in range(20):
        walk_through(1000 + seed, steps=5_000)


# what is told


def test_what_is_told_is_what_can_be_computed_on_from() -> None:
    """Of a prompt that was computed every page; once the first ones left behind are given up, those that follow them soon."""
    groups = (group(None), group(9))
    pools = page_pools(groups, [40, 20])
    prefixes = Prefixes(pools, groups, KEYS)
    ids = list(range(6 * SIZE))
    keys = KEYS.of(SALT, ids)
    pages = PromptPages(pools, groups, "a", len(ids) + 1, SIZE, prefixes.reuse("a", prefixes.to_compute_on(())))
    for full in range(1, 7):
        prefixes.remember("a", full - 1, keys[:full], pages.gone)
        pages.slide(full * SIZE)
    assert set(prefixes.take_changes().stored) == set(keys)
    pages.release()
    taken = pools[1].allocate("b", pools[1].counts().free + 1)
    assert len(taken) == 14 and pools[1].index.page(keys[0]) is None
    # Page 0 is seen behind pages 1 and 2.
    assert prefixes.take_changes().evicted == tuple(keys[:2])
    pools[1].release("b")
    again = PromptPages(pools, groups, "c", len(ids) + 1, SIZE, prefixes.reuse("c", prefixes.to_compute_on(())))
    prefixes.remember("c", 0, keys[:1], again.gone)
    assert prefixes.take_changes().stored == (keys[0],)
    prefixes.remember("c", 1, keys[:2], again.gone)
    assert prefixes.take_changes().stored == (keys[1],)
