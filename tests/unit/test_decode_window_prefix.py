"""Prefixes at a decode member whose layout has a window: each group asks for what it lacks, and sharers never lack a page."""

import pytest
from hypothesis import settings

from decode_svc.messages import DrainAnswer, DrainAnswered
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, Reservation
from engine.page_types import PageState
from tests.unit.decode_world import PAGE_TOKENS
from tests.unit.pressure_world import PressureWorld
from tests.unit.test_decode_prefix import OTHER, SALT, PrefixMachine, computed, finished, granted, tokens, world

WINDOW = 6
B = PAGE_TOKENS


def windowed(**options: object) -> PressureWorld:
    return world(window=WINDOW, **options)


@pytest.mark.parametrize("window", [1, 2, B, WINDOW, 13, 60])
@pytest.mark.parametrize("length", [B, 2 * B + 1, 30])
def test_a_prompt_that_was_computed_before_is_computed_from_its_end_on(window: int, length: int) -> None:
    target = world(window=window, step=StepLimits(tokens=10, sequences=4))
    finished(target, tokens(length))
    before = computed(target)
    seat = finished(target, tokens(length))
    cached = (length - 1) // B * B
    assert granted(target, seat).cached_tokens == cached and computed(target) - before == length - cached
    end = target.ended(seat)
    assert end is not None and end.usage.cached_prompt_tokens == cached
    target.assert_empty()


def test_the_next_turn_of_a_chat_is_sent_what_is_new_in_each_group() -> None:
    """Also where the window begins in the middle of what is known: what leaves it is not asked for."""
    target = windowed(total_pages=60)
    first = target.granted_seat(tokens(22), 8, salt=SALT)
    target.fill(first)
    target.run()
    history = [*tokens(22), *target.selected(first)]
    assert len(history) == 30  # the last of them was never fed
    for new, full, window in ((2, 1, 1), (9, 3, 2)):
        prompt = (*history, *tokens(new, first=60))
        grant = target.grant_of(target.granted_seat(prompt, 3, salt=SALT))
        assert grant.first_position == 28
        assert [sum(page > 0 for page in group.page_ids) for group in grant.groups] == [full, window]


@pytest.mark.parametrize("output", range(2, 24, 3))
def test_what_was_generated_can_be_computed_on_from_wherever_its_end_lies_in_a_page(output: int) -> None:
    """The last full page may see one that the last token does not see any more."""
    target = windowed()
    seat = finished(target, tokens(3), output=output)
    turn = finished(target, (*tokens(3), *target.selected(seat), 70, 71, 72))
    assert granted(target, turn).cached_tokens == (3 + output - 1) // B * B


def test_of_a_long_common_front_the_group_that_keeps_it_asks_for_nothing() -> None:
    """What the window shows behind the front was never sent here: only that is asked for, and nothing can be computed on."""
    target = windowed()
    first = target.granted_seat((*tokens(24), *tokens(12, first=60)), 4, salt=SALT)
    target.fill(first)
    target.run()
    seat = target.granted_seat((*tokens(24), *tokens(10, first=80)), 4, salt=SALT)
    grant = target.grant_of(seat)
    assert granted(target, seat).cached_tokens == 0 and grant.first_position == 24
    full, window = grant.groups
    assert all(full.page_ids) and window.page_ids == (0, *window.page_ids[1:]) and all(window.page_ids[1:])
    target.fill(seat)
    target.run()
    target.said(seat, (*tokens(24), *tokens(10, first=80)))
    target.assert_empty()


def test_pages_that_the_window_lost_are_sent_and_those_of_the_other_group_are_not() -> None:
    target = windowed()
    finished(target, tokens(23))
    pool = target.memory.pools[1]
    pool.allocate("others", pool.usable_pages)
    pool.release("others")
    again = target.open(tokens(23), 4, salt=SALT)
    assert granted(target, again).cached_tokens == 0  # to compute on from, the window's pages would be needed
    target.run()
    pool.allocate("more", pool.usable_pages)
    pool.release("more")
    seat = target.granted_seat(tokens(23), 4, salt=SALT)
    grant = target.grant_of(seat)
    # The token at 23 sees position 18, on page 4: pages 4 and 5 of the window, page 5 of the other group.
    assert grant.first_position == 16 and [group.page_ids[0] > 0 for group in grant.groups] == [False, True]
    assert [sum(page > 0 for page in group.page_ids) for group in grant.groups] == [1, 2]
    target.fill(seat)
    target.run()
    target.said(seat, tokens(23))
    target.assert_empty()


def test_another_tenant_finds_nothing_in_any_group() -> None:
    target = windowed()
    finished(target, tokens(22))
    for salt in (OTHER, b""):
        grant = target.grant_of(target.granted_seat(tokens(22), 4, salt=salt))
        assert grant.first_position == 0
        assert [sum(page > 0 for page in group.page_ids) for group in grant.groups] == [6, 2]
        assert granted(target, target.open(tokens(22), 4, salt=salt)).cached_tokens == 0


def test_a_grant_that_is_taken_back_leaves_what_was_shared() -> None:
    target = windowed()
    finished(target, tokens(12), output=1)
    seat = target.granted_seat(tokens(3 * B + 2), salt=SALT)
    pages = [set(group.page_ids) - {0} for group in target.grant_of(seat).groups]
    target.cancel(seat)
    target.step()
    assert all(
        pool.state(page) is PageState.GRANTED for pool, ids in zip(target.memory.pools, pages, strict=True) for page in ids
    )
    for drain in target.drains():
        target.tell(DrainAnswered(drain.grant_id, DrainAnswer.STOPPED))
    target.step()
    finished(target, tokens(3 * B + 2), output=20)
    target.assert_empty()


def test_sequences_that_share_behind_a_window_never_lack_a_page() -> None:
    """All of max_output_tokens is promised: nobody is preempted, whoever leaves a shared page first."""
    target = windowed(total_pages=40, reservation=Reservation.FULL)
    finished(target, tokens(10), output=1)
    seats = [target.open(tokens(10), output, salt=SALT) for output in (30, 5, 12, 21)]
    target.memory.pools[1].allocate("others", target.memory.room()[1])
    target.run(500)
    for seat in seats:
        target.said(seat, tokens(10))
        assert granted(target, seat).cached_tokens == 8
    assert not target.preempted and [len(target.selected(seat)) for seat in seats] == [30, 5, 12, 21]


@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_under_pressure_with_shared_prefixes_everybody_says_what_is_right(kind: PreemptionKind) -> None:
    target = windowed(kind=kind, total_pages=16, step=StepLimits(tokens=10, sequences=4))
    prompts = [(*tokens(9), seat) for seat in range(50, 55)]
    seats = [target.open(prompt, 24, salt=SALT) for prompt in prompts]
    target.run(3000)
    assert target.preempted >= 2
    for seat, prompt in zip(seats, prompts, strict=True):
        target.said(seat, prompt)
        assert len(target.selected(seat)) == 24
    target.assert_empty()


def test_what_broke_the_model_is_not_found_again_where_it_left_the_window() -> None:
    target = windowed()
    seat = target.open(tokens(22), 20, salt=SALT)
    for _ in range(6):
        target.step()
    target.model = lambda seat: None
    broken = target.scheduler.next_batch(target.now)
    assert broken is not None
    target.scheduler.commit(broken, [None] * len(broken.draws), target.now)
    target.collect()
    assert target.ended(seat) is not None
    assert [len(pool.index) for pool in target.memory.pools] == [0, 0]
    target.assert_empty()


class WindowMachine(PrefixMachine):
    WINDOW = WINDOW


class WideWindowMachine(PrefixMachine):
    WINDOW = 4 * B + 3


TestWindowMachine = pytest.mark.slow(WindowMachine.TestCase)
TestWindowMachine.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestWideWindowMachine = pytest.mark.slow(WideWindowMachine.TestCase)
TestWideWindowMachine.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
