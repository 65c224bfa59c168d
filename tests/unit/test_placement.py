"""Placement: room, predicted first-token time, no herd, reasons."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.adapters import Adapter
from router.nearness import Near, Nearness
from router.placement import COMPARED, Choice, DecodeView, LocalLimits, Need, Placement, PrefillView, Refusal, choose

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


def test_a_moved_sequence_needs_no_prefill_member_and_stays_off_members_that_drain() -> None:
    views = [replace(DECODE, draining=True), replace(DECODE, member="d1", free_pages=10)]
    moved = Need(prompt_tokens=0, pages=10, moved=True)
    full = [replace(PREFILL, waiting_tokens=1000)]
    assert pick(views, full, need=moved).placement == Placement("d1")
    assert pick(views, [], need=moved).placement == Placement("d1")
    assert pick(views, full, need=replace(moved, pages=11)).placement is None


def test_an_adapter_is_on_both_members_with_one_content() -> None:
    mine, other = Adapter("polite", "aa"), Adapter("polite", "bb")
    need = replace(NEED, adapter=mine)
    has, lacks = replace(DECODE, member="d1", adapters=(mine,)), replace(DECODE, adapters=(other,))
    source, unlike = replace(PREFILL, member="p1", adapters=(mine,)), replace(PREFILL, adapters=(other,))
    choice = pick([lacks, has], [unlike, source], need=need)
    assert (choice.placement, choice.refusals) == (
        Placement("d1", "p1"),
        {"d0": Refusal.NO_ADAPTER, "p0": Refusal.NO_ADAPTER},
    )
    assert pick([has], [unlike], need=need).refusals == {"p0": Refusal.NO_ADAPTER, "d1": Refusal.NO_PREFILL}
    assert pick([replace(has, computes_prompts=True)], [unlike], need=need).placement == Placement("d1")
    assert pick([lacks], [unlike]).placement == Placement("d0", "p0")


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
    assert len(counts) == len(members) - COMPARED + 1
    assert max(counts.values()) < 800 * (COMPARED / len(members) + 0.05)
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


def near(decode: dict[int, int] | None = None, prefill: dict[int, int] | None = None) -> Near:
    """Members by place, each with the tokens that it is thought to have; their names are d0, d1 and p0, p1 and so on."""

    def made(letter: str, found: dict[int, int]) -> Nearness:
        known = {f"{letter}{place}": tokens for place, tokens in found.items()}
        return Nearness(tuple(found), lambda name: known.get(name, 0))

    return Near(made("d", decode or {}), made("p", prefill or {}))


PREFILLS = [replace(PREFILL, member=f"p{n}") for n in range(50)]
DECODES = [replace(DECODE, member=f"d{n}", computes_prompts=True) for n in range(50)]
LONG = Need(prompt_tokens=900, pages=60)


def test_members_that_have_most_of_a_prompt_are_found_in_any_pool() -> None:
    need = replace(LONG, near=near({33: 640}, {17: 800}))
    for seed in range(20):
        choice = pick(DECODES, PREFILLS, need, seed)
        assert choice.placement == Placement("d33", "p17") and choice.computed_tokens is None
        assert choice.first_token_s == pytest.approx(0.1 + 0.02)


def test_locality_is_worth_what_it_saves_and_no_more() -> None:
    need = replace(LONG, near=near({}, {17: 800}))
    busy = [*PREFILLS[:17], replace(PREFILLS[17], waiting_tokens=700, max_queued_tokens=5000), *PREFILLS[18:]]
    assert pick(DECODES, busy, need).placement == Placement(pick(DECODES, busy, need).placement.decode_member, "p17")
    busier = [*PREFILLS[:17], replace(PREFILLS[17], waiting_tokens=900, max_queued_tokens=5000), *PREFILLS[18:]]
    assert pick(DECODES, busier, need).placement.prefill_member != "p17"


def test_a_near_member_without_room_or_news_is_passed_over() -> None:
    need = replace(LONG, near=near({33: 640}, {17: 800}), local=LocalLimits(500, 10.0))
    for change in ({"draining": True}, {"stale": True}, {"free_pages": 59}, {"max_sequences": 0}):
        views = [*DECODES[:33], replace(DECODES[33], **change), *DECODES[34:]]
        assert all(pick(views, PREFILLS, need, seed).placement.decode_member != "d33" for seed in range(10))
    excluded = replace(need, excluded=frozenset({"d33", "p17"}))
    assert {"d33", "p17"}.isdisjoint({*vars_of(pick(DECODES, PREFILLS, excluded))})


def vars_of(choice: Choice) -> tuple[str, str]:
    assert choice.placement is not None
    return choice.placement.decode_member, choice.placement.prefill_member


def test_a_decode_member_that_lacks_little_computes_it_itself() -> None:
    need = replace(LONG, near=near({33: 800}, {17: 896}), local=LocalLimits(100, 0.25))
    choice = pick(DECODES, PREFILLS, need)
    assert choice.placement == Placement("d33") and choice.computed_tokens == 100
    # One token more than may be lacking, more waiting than there is time for, a member that computes no prompts.
    for other in (
        pick(DECODES, PREFILLS, replace(need, prompt_tokens=901)),
        pick([*DECODES[:33], replace(DECODES[33], waiting_tokens=500), *DECODES[34:]], PREFILLS, need),
        pick([replace(view, computes_prompts=False) for view in DECODES], PREFILLS, need),
        pick(DECODES, PREFILLS, replace(need, local=LocalLimits())),
    ):
        assert vars_of(other)[1] != "" and other.computed_tokens is None


def test_of_a_prompt_that_is_here_wholly_one_token_is_computed() -> None:
    need = replace(LONG, prompt_tokens=896, near=near({33: 896}), local=LocalLimits(100, 0.25))
    assert pick(DECODES, PREFILLS, need).computed_tokens == 1


def test_a_prompt_that_decode_has_does_not_wait_for_a_full_prefill_pool() -> None:
    full = [replace(view, waiting_tokens=1000) for view in PREFILLS]
    need = replace(LONG, near=near({33: 880}), local=LocalLimits(100, 0.25))
    assert pick(DECODES, full, need).placement == Placement("d33")
    assert pick(DECODES, full, replace(need, near=near({33: 10}))).placement is None


def test_g7_one_prefix_for_all_makes_no_herd() -> None:
    """Eight routers that see the same old news send 25 requests each, all with a prefix that one member of 20 has."""
    sent: Counter[str] = Counter()
    for router in range(8):
        mine: Counter[str] = Counter()
        for number in range(25):
            prefills = [
                replace(view, max_queued_tokens=100_000, inflight_tokens=900 * mine[view.member]) for view in PREFILLS[:20]
            ]
            need = replace(LONG, near=near({}, {17: 800}))
            chosen = vars_of(pick(DECODES, prefills, need, seed=1000 * router + number))[1]
            mine[chosen] += 1
        sent += mine
    assert sent["p17"] <= 200 / 5 and len(sent) == 20 and max(sent.values()) <= 200 / 5
