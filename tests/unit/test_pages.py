"""The page allocator: what each call does, and what it refuses."""

import time

import pytest

from engine.pages import (
    MAX_PAGES,
    GrantedPage,
    OutOfPages,
    PageCounts,
    PageError,
    PagePool,
    PageState,
    StaleHolder,
    WrongPageState,
)


def is_stretch(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert sorted(pool.allocate("a", 4)) == [1, 2, 3, 4]
    assert pool.free_pages == 0
    with pytest.raises(WrongPageState):
        pool.state(0)
    with pytest.raises(WrongPageState):
        pool.state(5)


@pytest.mark.parametrize("total", [-1, 0, 1, MAX_PAGES + 1])
def test_a_pool_without_a_usable_page_is_refused_with_the_limit(total: int) -> None:
    with pytest.raises(ValueError, match=r"total_pages is .*, must be 2 to 2147483647"):
        PagePool(total)


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(5)
    pool.allocate("a", 3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 free") as refused:
        pool.allocate("b", 2)
    assert (refused.value.wanted, refused.value.free) == (2, 1)
    assert not pool.holds("b")
    with pytest.raises(OutOfPages):
        pool.grant("g", 2)
    assert pool.check() == []


def test_negative_counts_are_refused() -> None:
    pool = PagePool(5)
    pool.allocate("a", 1)
    for call in (lambda: pool.allocate("a", -1), lambda: pool.grant("g", -1), lambda: pool.trim("a", -1)):
        with pytest.raises(ValueError, match="must be at least 0"):
            call()


def test_every_acquire_has_one_release() -> None:
    pool = PagePool(10)
    pool.allocate("a", 2)
    pool.allocate("a", 1)
    assert pool.release("a") == 3
    for stale in (pool.release, pool.pages_of, pool.unpin, pool.reclaim_grant, pool.revoke_grant, pool.quarantine_grant):
        with pytest.raises(StaleHolder, match="'a' holds nothing"):
            stale("a")
    with pytest.raises(StaleHolder):
        pool.trim("a", 0)
    with pytest.raises(StaleHolder):
        pool.commit_grant("a", "b")
    assert pool.free_pages == 9


def test_a_holder_may_hold_no_page_and_still_ends_with_one_release() -> None:
    pool = PagePool(4)
    assert pool.allocate("a", 0) == []
    assert pool.holds("a")
    assert pool.release("a") == 0
    with pytest.raises(StaleHolder):
        pool.release("a")


def test_growth_continues_the_holders_own_stretch() -> None:
    pool = PagePool(20)
    first = pool.allocate("a", 4)
    first += pool.allocate("a", 3)
    assert is_stretch(first)
    assert pool.pages_of("a") == tuple(first)


def test_freed_tables_come_back_as_whole_stretches() -> None:
    pool = PagePool(33)
    for holder in "abcd":
        assert is_stretch(pool.allocate(holder, 8))
    for holder in "cabd":
        pool.release(holder)
    assert is_stretch(pool.allocate("all", 32))
    pool.release("all")
    assert pool.check() == []


def test_trim_gives_back_the_tail() -> None:
    pool = PagePool(10)
    pages = pool.allocate("a", 5)
    assert pool.trim("a", 2) == 3
    assert pool.pages_of("a") == tuple(pages[:2])
    assert pool.trim("a", 7) == 0
    assert pool.free_pages == 7
    assert pool.release("a") == 2


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(10)
    pages = pool.allocate("a", 3)
    pool.share("b", pages[:2])
    pool.allocate("b", 1)
    assert pool.counts().owned == 4
    assert pool.release("a") == 3
    assert pool.counts().owned == 3
    assert pool.release("b") == 3
    assert pool.free_pages == 9


def test_only_owned_pages_can_be_shared_and_none_twice() -> None:
    pool = PagePool(10)
    pages = pool.allocate("a", 2)
    with pytest.raises(WrongPageState, match="cannot be shared: it must be OWNED"):
        pool.share("b", [*pages, 9])
    with pytest.raises(WrongPageState, match="twice"):
        pool.share("a", pages)
    with pytest.raises(WrongPageState, match="twice"):
        pool.share("b", [pages[0], pages[0]])
    with pytest.raises(WrongPageState):
        pool.share("b", [0])
    assert not pool.holds("b")
    assert pool.check() == []


def test_a_pinned_page_survives_its_holder_until_the_last_pin() -> None:
    pool = PagePool(6)
    pages = pool.allocate("a", 3)
    pool.pin("w1", pages)
    pool.pin("w2", pages[:1])
    assert pool.release("a") == 3
    assert pool.counts() == PageCounts(total=5, free=2, owned=0, cached=0, granted=0, quarantined=0, pinned=3)
    with pytest.raises(OutOfPages):
        pool.allocate("b", 3)
    assert pool.unpin("w1") == 3
    assert pool.state(pages[0]) is PageState.PINNED
    assert pool.unpin("w2") == 1
    assert pool.free_pages == 5
    with pytest.raises(StaleHolder):
        pool.unpin("w2")


def test_unpinning_an_owned_page_leaves_it_owned() -> None:
    pool = PagePool(6)
    pages = pool.allocate("a", 2)
    pool.pin("w", pages)
    pool.unpin("w")
    assert pool.counts().owned == 2


def test_pins_are_refused_on_pages_nobody_owns_and_on_used_ids() -> None:
    pool = PagePool(6)
    pages = pool.allocate("a", 2)
    pool.pin("w", pages)
    with pytest.raises(WrongPageState, match="never used twice"):
        pool.pin("w", pages)
    with pytest.raises(WrongPageState, match="names a page twice"):
        pool.pin("v", [pages[0], pages[0]])
    pool.release("a")
    with pytest.raises(WrongPageState, match="is PINNED and cannot be pinned"):
        pool.pin("v", pages)


def test_a_grant_is_committed_to_its_holder_in_token_order() -> None:
    pool = PagePool(12)
    other = pool.allocate("other", 2)
    granted = [page.page_id for page in pool.grant("g", 3)]
    pool.share("a", other)
    assert pool.pages_granted("g") == tuple(granted)
    assert pool.commit_grant("g", "a") == granted
    assert pool.pages_of("a") == (*other, *granted)
    with pytest.raises(StaleHolder):
        pool.commit_grant("g", "a")


def test_the_generation_rises_each_time_a_page_is_granted() -> None:
    pool = PagePool(3)
    assert pool.grant("g1", 2) == [GrantedPage(1, 1), GrantedPage(2, 1)]
    pool.revoke_grant("g1")
    assert pool.reclaim_grant("g1") == 2
    pool.allocate("a", 2)
    pool.release("a")
    assert [page.generation for page in pool.grant("g2", 2)] == [2, 2]
    assert pool.generation(1) == 2


def test_b02_pages_of_a_revoked_grant_stay_out_of_reach_until_reclaimed() -> None:
    pool = PagePool(4)
    pool.grant("g", 3)
    pool.revoke_grant("g")
    pool.revoke_grant("g")
    with pytest.raises(OutOfPages):
        pool.allocate("b", 1)
    with pytest.raises(WrongPageState, match="was revoked and cannot be committed"):
        pool.commit_grant("g", "a")
    assert pool.quarantine_grant("g") == 3
    assert pool.quarantine_grant("g") == 3
    pool.revoke_grant("g")
    assert pool.counts().quarantined == 3
    with pytest.raises(OutOfPages):
        pool.allocate("b", 1)
    with pytest.raises(WrongPageState):
        pool.commit_grant("g", "a")
    assert pool.check() == []
    assert pool.reclaim_grant("g") == 3
    assert pool.free_pages == 3
    with pytest.raises(StaleHolder):
        pool.reclaim_grant("g")


def test_a_live_grant_cannot_be_reclaimed_or_reused() -> None:
    pool = PagePool(4)
    pool.grant("g", 1)
    with pytest.raises(WrongPageState, match="must be revoked before it can be reclaimed"):
        pool.reclaim_grant("g")
    with pytest.raises(WrongPageState, match="must be revoked before it can be quarantined"):
        pool.quarantine_grant("g")
    with pytest.raises(WrongPageState, match="never used twice"):
        pool.grant("g", 1)


def test_a_grant_of_no_page_commits() -> None:
    pool = PagePool(4)
    assert pool.grant("g", 0) == []
    assert pool.commit_grant("g", "a") == []
    assert pool.holds("a")


def test_all_errors_are_page_errors() -> None:
    for error in (OutOfPages(1, 0), StaleHolder("holder", "a"), WrongPageState("x")):
        assert isinstance(error, PageError)


def test_check_speaks_when_the_books_are_wrong() -> None:
    pool = PagePool(6)
    pages = pool.allocate("a", 2)
    pool._references[pages[0]] = 2
    pool._pin_counts[pages[1]] = 1
    pool._move(pages[1], PageState.CACHED)
    pool._free.append(pages[0])
    text = "\n".join(pool.check())
    assert f"page {pages[0]}: 2 references counted, 1 held" in text
    assert f"page {pages[1]}: 1 pins counted, 0 held" in text
    assert f"page {pages[1]}: state CACHED, its holders make it OWNED" in text
    assert f"page {pages[0]}: 1 times in the free list" in text
    assert "1 pages are counted as OWNED, 2 are" in text


def test_check_survives_a_broken_chain() -> None:
    pool = PagePool(6)
    pool._free._after[2] = 2
    assert any("links of the free list" in sentence for sentence in pool.check())


@pytest.mark.slow
def test_allocate_and_free_cost_the_same_in_a_large_pool() -> None:
    """Ten thousand pages out and back; a linear step anywhere would take minutes, not fractions of a second."""

    def churn(total: int) -> float:
        pool = PagePool(total)
        for index in range(0, total // 2, 8):
            pool.allocate(f"a{index}", 8)
        for index in range(0, total // 2, 16):
            pool.release(f"a{index}")
        start = time.perf_counter()
        for index in range(500):
            pool.allocate(f"b{index}", 20)
            pool.release(f"b{index}")
        return time.perf_counter() - start

    small, large = min(churn(2_000) for _ in range(3)), churn(200_000)
    assert large < 20 * small + 0.1


def test_pages_that_left_a_window_go_back_and_the_others_stay_in_order() -> None:
    pool = PagePool(9)
    pages = pool.allocate("a", 4)
    pool.drop_front("a", 2)
    assert pool.pages_of("a") == tuple(pages[2:])
    assert pool.counts().owned == 2
    assert [pool.state(page) for page in pages[:2]] == [PageState.FREE] * 2
    with pytest.raises(WrongPageState, match="has 2 pages and cannot give back its first 3"):
        pool.drop_front("a", 3)
    pool.drop_front("a", 2)
    assert pool.release("a") == 0 and pool.check() == []


def test_a_page_that_left_a_window_is_kept_while_a_write_reads_it() -> None:
    pool = PagePool(5)
    (page,) = pool.allocate("a", 1)
    pool.pin("write", [page])
    pool.drop_front("a", 1)
    assert pool.state(page) is PageState.PINNED
    pool.unpin("write")
    assert pool.state(page) is PageState.FREE and pool.check() == []
