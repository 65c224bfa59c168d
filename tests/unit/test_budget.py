"""Budgets: estimates, what can never fit, and tickets that are given back once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.record import AttemptKey
from router.budget import (
    Budget,
    BudgetBook,
    Capacity,
    Claim,
    Demand,
    Limits,
    OverBudget,
    Resource,
    Scope,
    Seats,
    claims,
    estimate,
    never_fits,
)

PAGES = Budget(Resource.PAGES, Scope.MEMBER, "decode-0")
TOKENS = Budget(Resource.TOKENS, Scope.MEMBER, "prefill-0")
CAPACITY = Capacity(context_tokens=2048, page_tokens=16, member_pages=64, member_tokens=512)


@pytest.mark.parametrize(
    ("prompt", "output", "pages"), [(1, 1, 1), (15, 1, 1), (16, 1, 2), (1, 15, 1), (17, 15, 2), (512, 128, 40)]
)
def test_full_reservation_covers_prompt_and_output(prompt: int, output: int, pages: int) -> None:
    assert estimate(prompt, output, 16) == Demand(prefill_tokens=prompt, pages=pages)


@pytest.mark.parametrize(("output", "expected", "pages"), [(500, 20, 3), (500, 0, 33), (10, 20, 2), (20, 20, 3)])
def test_expected_output_counts_up_to_the_requests_own_limit(output: int, expected: int, pages: int) -> None:
    assert estimate(20, output, 16, expected_output_tokens=expected) == Demand(prefill_tokens=20, pages=pages)


@pytest.mark.parametrize(("tokens", "pages"), [(15, 1), (64, 4), (65, 5), (80, 5), (2000, 5)])
def test_where_all_layers_look_back_only_so_far_a_long_sequence_needs_no_more_pages(tokens: int, pages: int) -> None:
    assert estimate(1, tokens - 1 or 1, 16, sequence_pages=5).pages == pages
    roomy = Capacity(context_tokens=2048, page_tokens=16, member_pages=6, sequence_pages=5)
    assert roomy.most_tokens == 2048 and never_fits(1, 2047, roomy, Limits()) is None
    small = Capacity(context_tokens=2048, page_tokens=16, member_pages=4, sequence_pages=5)
    assert small.most_tokens == 64 and never_fits(1, 63, small, Limits()) is None
    refused = never_fits(1, 64, small, Limits())
    assert refused is not None and (refused.field, refused.limit) == ("max_output_tokens", 63)


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        estimate(0, 1, 16)


@pytest.mark.parametrize(
    ("prompt", "output", "limits", "field", "limit", "words"),
    [
        (2000, 49, Limits(), "prompt", 1999, "context of 2048"),
        (10, 2048, Limits(), "prompt", 0, "context of 2048"),
        (513, 1, Limits(), "prompt", 512, "a prefill member takes at most 512"),
        (512, 513, Limits(), "max_output_tokens", 512, "a decode member has 64"),
        (101, 1, Limits(tenant_tokens=100), "prompt", 100, "a tenant takes at most 100"),
        (101, 1, Limits(total_tokens=99), "prompt", 99, "the cell takes at most 99"),
        (20, 100, Limits(tenant_pages=7), "max_output_tokens", 92, "a tenant has 7"),
        (20, 100, Limits(total_pages=1), "max_output_tokens", 0, "the cell has 1"),
    ],
)
def test_what_can_never_run_is_told_with_the_true_limit(
    prompt: int, output: int, limits: Limits, field: str, limit: int, words: str
) -> None:
    refused = never_fits(prompt, output, CAPACITY, limits)
    assert refused is not None
    assert (refused.field, refused.limit) == (field, limit)
    assert words in refused.sentence


@pytest.mark.slow
@given(
    prompt=st.integers(1, 3000),
    output=st.integers(1, 3000),
    pages=st.integers(1, 200),
    member_tokens=st.none() | st.integers(1, 3000),
)
def test_never_fits_is_exact_and_its_limit_is_true(prompt: int, output: int, pages: int, member_tokens: int | None) -> None:
    capacity = Capacity(context_tokens=2048, page_tokens=16, member_pages=pages, member_tokens=member_tokens)
    refused = never_fits(prompt, output, capacity, Limits())
    fits = prompt + output <= 2048 and prompt <= (member_tokens or prompt) and -(-(prompt + output) // 16) <= pages
    assert (refused is None) == fits
    if refused is None or refused.limit == 0:
        return
    assert refused.limit < refused.value
    if refused.field == "prompt":
        again, more = (
            never_fits(refused.limit, output, capacity, Limits()),
            never_fits(refused.limit + 1, output, capacity, Limits()),
        )
    else:
        again, more = (
            never_fits(prompt, refused.limit, capacity, Limits()),
            never_fits(prompt, refused.limit + 1, capacity, Limits()),
        )
    assert more is not None
    assert again is None or again.sentence != refused.sentence


def test_without_a_decode_member_nobody_can_say_how_many_pages_a_request_needs() -> None:
    unknown, limits = Capacity(context_tokens=2048, page_tokens=0, member_pages=0), Limits(tenant_pages=4, total_pages=6)
    assert never_fits(1000, 1048, unknown, limits, outputs=8) is None
    assert unknown.most_tokens == unknown.most_tokens_of(1000, 8) == 2048
    assert never_fits(1000, 1049, unknown, limits) is not None, "the context is the model's own"
    assert never_fits(1000, 24, unknown, Limits(tenant_tokens=999)) is not None


def test_claims_of_a_split_cell_and_of_an_aggregated_one() -> None:
    demand, limits = Demand(prefill_tokens=100, pages=9), Limits(tenant_tokens=1000, tenant_pages=90, total_pages=900)
    split = claims(demand, Seats("acme", "decode-0", 64, "prefill-0", 512), limits)
    assert {claim.budget.label: (claim.amount, claim.limit) for claim in split} == {
        "pages:member:decode-0": (9, 64),
        "tokens:member:prefill-0": (100, 512),
        "pages:tenant:acme": (9, 90),
        "pages:total:": (9, 900),
        "tokens:tenant:acme": (100, 1000),
    }
    aggregated = claims(demand, Seats("acme", "decode-0", 64), limits)
    assert all(claim.budget.resource is Resource.PAGES for claim in aggregated)
    assert len(aggregated) == 3


def test_a_claim_is_all_or_nothing_and_says_what_is_short() -> None:
    book = BudgetBook()
    book.acquire(AttemptKey("a", 1), [Claim(TOKENS, 60, 100), Claim(PAGES, 6, 10)])
    with pytest.raises(OverBudget) as caught:
        book.acquire(AttemptKey("b", 1), [Claim(TOKENS, 40, 100), Claim(PAGES, 5, 10)])
    short = caught.value.shortage
    assert (short.budget, short.wanted, short.taken, short.limit, short.never_fits) == (PAGES, 5, 6, 10, False)
    assert "5 wanted, 6 of 10 taken" in str(caught.value)
    assert (book.held(TOKENS), book.held(PAGES)) == (60, 6)
    assert book.statistics().refused == {"pages:member": 1}


def test_a_second_release_changes_nothing_and_is_counted() -> None:
    book = BudgetBook()
    ticket = book.acquire(AttemptKey("a", 1), [Claim(PAGES, 6, 10)])
    assert book.release(ticket)
    assert not book.release(ticket)
    again = book.acquire(AttemptKey("a", 1), [Claim(PAGES, 10, 10)])
    assert not book.release(ticket)
    assert book.held(PAGES) == 10
    assert book.release(again)
    statistics = book.statistics()
    assert (statistics.open_tickets, statistics.acquired, statistics.released, statistics.late_releases) == (0, 2, 2, 2)
    assert (statistics.held, book.check()) == ({}, [])


def test_the_commit_gives_prompt_tokens_back_once() -> None:
    book = BudgetBook()
    ticket = book.acquire(AttemptKey("a", 1), [Claim(TOKENS, 60, 100), Claim(PAGES, 6, 10)])
    left = book.release_tokens(ticket)
    assert (book.held(TOKENS), book.held(PAGES)) == (0, 6)
    assert book.release_tokens(ticket) == book.release_tokens(left) == left
    assert book.held(PAGES) == 6
    assert book.release(ticket)
    assert not book.release(left)
    assert book.release_tokens(left) is left
    assert (book.held(PAGES), book.check()) == (0, [])


def test_misuse_is_an_error() -> None:
    book = BudgetBook()
    book.acquire(AttemptKey("a", 1), [Claim(PAGES, 1, 10)])
    with pytest.raises(ValueError, match="already holds a ticket"):
        book.acquire(AttemptKey("a", 1), [])
    with pytest.raises(ValueError, match="each budget once"):
        book.acquire(AttemptKey("b", 1), [Claim(PAGES, 1, 10), Claim(PAGES, 1, 10)])
    with pytest.raises(ValueError, match="0 or more"):
        Claim(PAGES, -1, 10)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.integers(0, 60), st.sampled_from(["take", "drop", "half"])),
        max_size=60,
    )
)
def test_b35_the_book_never_passes_a_limit_and_returns_to_zero(steps: list[tuple[str, int, int, str]]) -> None:
    book, tickets, halved = BudgetBook(), {}, set()
    for name, pages, tokens, action in steps:
        key = AttemptKey(name, 1)
        if action == "take" and name not in tickets:
            try:
                tickets[name] = book.acquire(key, [Claim(PAGES, pages, 10), Claim(TOKENS, tokens, 100)])
            except OverBudget as refused:
                assert refused.shortage.taken + refused.shortage.wanted > refused.shortage.limit
        elif action == "half" and name in tickets:
            book.release_tokens(tickets[name])
            halved.add(name)
        elif action == "drop" and name in tickets:
            assert book.release(tickets.pop(name))
            halved.discard(name)
        kept = [(n, claim) for n, ticket in tickets.items() for claim in ticket.claims]
        assert book.held(PAGES) == sum(claim.amount for _, claim in kept if claim.budget == PAGES) <= 10
        assert book.held(TOKENS) == sum(c.amount for n, c in kept if c.budget == TOKENS and n not in halved) <= 100
        assert book.check() == []
    for ticket in tickets.values():
        book.release(ticket)
    assert (book.statistics().held, book.statistics().open_tickets) == ({}, 0)
