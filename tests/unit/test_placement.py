"""Placement: room, predicted first-token time, no herd, reasons."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement import DecodeView, Need, Placement, PrefillView, Refusal, choose

NEED = Need(prompt_tokens=100, pages=10)
DECODE = DecodeView("d0", total_pages=100, free_pages=100, max_sequences=8, decode_step_s=0.02)
PREFILL = PrefillView("p0", max_queued_tokens=1000, prefill_tokens_per_s=1000.0)


def pick(decode: list[DecodeView], prefill: list[PrefillView], need: Need = NEED, seed: int = 0):
    return choose(need, decode, prefill, random.Random(seed))


def test_the_only_pair_is_taken_and_its_time_predicted() -> None:
    choice = pick([DECODE], [replace(PREFILL, waiting_tokens=400, inflight_tokens=500)])
    assert choice.placement == Placement("d0", "p0")
    assert choice.first_token_s == pytest.approx(1.0 + 0.02)
    assert choice.refusals == {}


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(DECODE, draining=True), Refusal.DRAINING),
        (replace(DECODE, free_pages=9), Refusal.NO_PAGES),
        (replace(DECODE, inflight_pages=91), Refusal.NO_PAGES),
        (replace(DECODE, running_sequences=6, waiting_sequences=1, inflight_sequences=1), Refusal.NO_SEQUENCE),
    ],
)
def test_a_decode_member_without_room_is_refused_with_the_reason(view: DecodeView, reason: Refusal) -> None:
    choice = pick([view], [PREFILL])
    assert (choice.placement, choice.refusals) == (None, {"d0": reason})


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(PREFILL, draining=True), Refusal.DRAINING),
        (replace(PREFILL, waiting_tokens=900, inflight_tokens=1), Refusal.NO_TOKENS),
    ],
)
def test_without_a_prefill_member_nothing_is_placed(view: PrefillView, reason: Refusal) -> None:
    choice = pick([DECODE], [view])
    assert (choice.placement, choice.refusals) == (None, {"p0": reason, "d0": Refusal.NO_PREFILL})


def test_excluded_members_are_not_asked_again() -> None:
    others = [replace(DECODE, member="d1"), DECODE], [replace(PREFILL, member="p1"), PREFILL]
    choice = pick(*others, need=replace(NEED, excluded=frozenset({"d0", "p1"})))
    assert choice.placement == Placement("d1", "p0")
    assert choice.refusals == {"d0": Refusal.EXCLUDED, "p1": Refusal.EXCLUDED}


def test_a_member_that_computes_prompts_needs_no_prefill_member() -> None:
    alone = replace(DECODE, computes_prompts=True, prefill_tokens_per_s=500.0)
    choice = pick([alone], [])
    assert choice.placement == Placement("d0")
    assert choice.first_token_s == pytest.approx(0.02 + 0.2)
    assert pick([alone], [replace(PREFILL, draining=True)]).placement == Placement("d0")
    assert pick([alone], [PREFILL]).placement == Placement("d0", "p0")
    busy = pick([alone], [replace(PREFILL, waiting_tokens=1000)])
    assert (busy.placement, busy.refusals["d0"]) == (None, Refusal.NO_PREFILL)


def test_of_two_the_one_with_more_free_pages_and_shorter_queue_is_taken() -> None:
    full = replace(DECODE, member="full", free_pages=20)
    long = replace(PREFILL, member="long", waiting_tokens=500)
    for seed in range(20):
        assert pick([full, DECODE], [PREFILL, long], seed=seed).placement == Placement("d0", "p0")


def test_stale_members_come_last_but_are_used_when_alone() -> None:
    idle_but_stale = replace(DECODE, member="old", stale=True)
    loaded = replace(DECODE, free_pages=20, running_sequences=7)
    for seed in range(20):
        assert pick([idle_but_stale, loaded], [PREFILL], seed=seed).placement == Placement("d0", "p0")
    assert pick([idle_but_stale], [replace(PREFILL, stale=True)]).placement == Placement("old", "p0")


def test_routers_that_see_the_same_do_not_all_go_the_same_way() -> None:
    members = [replace(DECODE, member=f"d{number}", free_pages=100 - number) for number in range(8)]
    counts = Counter(pick(members, [PREFILL], seed=seed).placement.decode_member for seed in range(800))
    assert len(counts) == 7
    assert max(counts.values()) < 800 * 0.3
    assert pick(members, [PREFILL], seed=3) == pick(members, [PREFILL], seed=3)


def test_b35_what_was_sent_since_the_snapshot_spreads_the_load() -> None:
    """One snapshot, many placements: the router's own deltas keep the members even, also beside one that restarted empty."""
    rng = random.Random(1)
    sent = Counter({f"d{number}": 0 for number in range(4)})
    for _ in range(28):
        views = [
            replace(DECODE, member=name, max_sequences=16, inflight_pages=10 * count, inflight_sequences=count)
            for name, count in sent.items()
        ]
        placement = choose(NEED, views, [PREFILL], rng).placement
        assert placement is not None
        sent[placement.decode_member] += 1
    assert max(sent.values()) - min(sent.values()) <= 3


decode_views = st.builds(
    DecodeView,
    member=st.sampled_from([f"d{number}" for number in range(6)]),
    total_pages=st.integers(0, 100),
    free_pages=st.integers(0, 100),
    max_sequences=st.integers(0, 4),
    running_sequences=st.integers(0, 4),
    waiting_tokens=st.integers(0, 100),
    decode_step_s=st.floats(0, 1),
    computes_prompts=st.booleans(),
    draining=st.booleans(),
    stale=st.booleans(),
    inflight_pages=st.integers(0, 100),
)
prefill_views = st.builds(
    PrefillView,
    member=st.sampled_from([f"p{number}" for number in range(6)]),
    max_queued_tokens=st.integers(0, 300),
    waiting_tokens=st.integers(0, 300),
    prefill_tokens_per_s=st.floats(0, 1e4),
    draining=st.booleans(),
    stale=st.booleans(),
)


@pytest.mark.slow
@given(
    st.lists(decode_views, max_size=6, unique_by=lambda view: view.member),
    st.lists(prefill_views, max_size=6, unique_by=lambda view: view.member),
    st.integers(0, 60),
    st.frozensets(st.sampled_from(["d0", "d1", "p0", "p1"])),
    st.integers(0, 1000),
)
def test_a_choice_always_has_room_and_everyone_else_a_reason(
    decode: list[DecodeView], prefill: list[PrefillView], pages: int, excluded: frozenset[str], seed: int
) -> None:
    need = Need(prompt_tokens=100, pages=pages, excluded=excluded)
    choice = pick(decode, prefill, need, seed)
    if choice.placement is None:
        assert {view.member for view in decode} <= choice.refusals.keys()
        return
    target = next(view for view in decode if view.member == choice.placement.decode_member)
    assert target.member not in choice.refusals
    assert not target.draining
    assert target.running_sequences < target.max_sequences
    assert target.free_pages - target.inflight_pages >= pages
    assert choice.first_token_s >= 0
    source = next((view for view in prefill if view.member == choice.placement.prefill_member), None)
    if source is None:
        assert target.computes_prompts
    else:
        assert source.member not in choice.refusals
        assert source.waiting_tokens + 100 <= source.max_queued_tokens
    assert not {choice.placement.decode_member, choice.placement.prefill_member} & excluded
