"""Prefixes that a decode member has already: what is not computed, not asked for and not taken twice, over real pages."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from decode_svc.admission import PREFIX_GONE
from decode_svc.messages import DrainAnswer, DrainAnswered, EndSeat, OutputMade, SeatGranted
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind
from engine.page_types import PageState
from engine.sequence import Earlier
from kv_transfer.plan import part_count
from lifecycle.finish import FinishReason
from lifecycle.prefix_keys import tenant_salt
from tests.unit.decode_world import CANCEL, PAGE_TOKENS
from tests.unit.pressure_world import PressureWorld

SALT, OTHER = tenant_salt("one"), tenant_salt("another")
B = PAGE_TOKENS


def world(**options: object) -> PressureWorld:
    return PressureWorld(**{"total_pages": 60, "prefix_cache": True, **options})  # type: ignore[arg-type]


def tokens(count: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def granted(target: PressureWorld, seat: int) -> SeatGranted:
    return next(event for event in target.events if isinstance(event, SeatGranted) and event.seat == seat)


def finished(target: PressureWorld, prompt: Sequence[int], output: int = 4, **options: object) -> int:
    """A seat from its Open to its end; it says what it would have said alone."""
    seat = target.open(prompt, output, salt=SALT, **options)  # type: ignore[arg-type]
    target.run()
    target.said(seat, prompt)
    assert len(target.selected(seat)) == output
    return seat


def computed(target: PressureWorld) -> int:
    """Prompt tokens computed so far."""
    return sum(plan.prompt_tokens for plan in target.plans)


def test_a_prompt_that_was_computed_before_is_computed_from_its_end_on() -> None:
    target = world()
    finished(target, tokens(10))
    before = computed(target)
    seat = finished(target, tokens(10))
    assert granted(target, seat).cached_tokens == 8 and computed(target) - before == 2
    end = target.ended(seat)
    assert end is not None and end.usage.cached_prompt_tokens == 8
    target.assert_empty()


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 3 * B])
def test_the_last_token_of_a_prompt_is_always_computed(length: int) -> None:
    target = world()
    finished(target, tokens(length))
    before = computed(target)
    seat = finished(target, tokens(length))
    cached = (length - 1) // B * B
    assert granted(target, seat).cached_tokens == cached and computed(target) - before == length - cached
    target.assert_empty()


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 3 * B, 3 * B + 1])
def test_b26_a_grant_has_the_pages_that_are_missing_by_position(length: int) -> None:
    for have in range(length // B + 1):
        target = world()
        if have:
            finished(target, tokens(have * B), output=1)
        seat = target.granted_seat(tokens(length), 2 * B, salt=SALT)
        grant = target.grant_of(seat)
        assert grant.first_position == have * B and grant.token_count == length
        assert len(grant.groups[0].page_ids) == -(-length // B) - have
        assert granted(target, seat).cached_tokens == have * B
        held = target.memory.pools[0].pages_of(f"seat-{seat}") if have else ()
        assert not set(held) & set(grant.groups[0].page_ids) and len(held) == have
        target.fill(seat)
        target.run()
        target.said(seat, tokens(length))
        assert len(target.selected(seat)) == 2 * B
        target.assert_empty()


def test_a_prompt_that_is_here_wholly_needs_only_its_logits() -> None:
    target = world()
    finished(target, tokens(2 * B), output=1)
    seat = target.granted_seat(tokens(2 * B), salt=SALT)
    grant = target.grant_of(seat)
    assert grant.first_position == grant.token_count == 2 * B and part_count(grant) == 1
    target.fill(seat)
    target.run()
    target.said(seat, tokens(2 * B))


def test_a_chat_brings_only_what_is_new() -> None:
    """Eight turns: each prompt is everything before, what was said, and 7 new tokens."""
    target = world()
    history: tuple[int, ...] = ()
    sent: list[int] = []
    for turn in range(8):
        history += tokens(3, first=40 + 10 * turn)
        seat = target.granted_seat(history, 4, salt=SALT)
        grant = target.grant_of(seat)
        sent.append(len(grant.groups[0].page_ids))
        target.fill(seat)
        target.run()
        target.said(seat, history)
        history += tuple(target.selected(seat))
    # 7 tokens a turn, of which the last one said was never fed: what is sent are the pages from there on.
    assert max(sent) <= 2
    assert sum(sent) < sum(-(-(7 * turn + 3) // B) for turn in range(8)) / 2


def test_generated_pages_can_be_left_out() -> None:
    for keep, expected in ((True, 3 * B), (False, B)):
        target = world(keep_generated=keep)
        seat = finished(target, tokens(B), output=2 * B + 1)
        history = (*tokens(B), *target.selected(seat), 9)
        again = target.granted_seat(history, salt=SALT)
        assert granted(target, again).cached_tokens == expected


def test_b48_the_same_tenant_finds_it_and_another_does_not() -> None:
    target = world()
    finished(target, tokens(9))
    assert granted(target, target.open(tokens(9), salt=SALT)).cached_tokens == 8
    assert granted(target, target.open(tokens(9), salt=OTHER)).cached_tokens == 0
    assert granted(target, target.open(tokens(9))).cached_tokens == 0


def test_a_seat_without_a_salt_leaves_nothing() -> None:
    target = world()
    target.open(tokens(12))
    target.run()
    assert len(target.memory.pools[0].index) == 0
    assert target.scheduler.books()["pages_free"] == target.scheduler.books()["pages_total"]


def test_two_that_run_side_by_side_share_their_pages() -> None:
    target = world()
    first = target.open(tokens(9), 12, salt=SALT)
    target.step()
    target.step()
    second = target.open(tokens(9), 12, salt=SALT)
    target.step()
    tables = [target.seat(seat).holding.tables[0] for seat in (first, second)]
    assert tables[0][:2] == tables[1][:2] and not set(tables[0][2:]) & set(tables[1][2:])
    target.run()
    for seat in (first, second):
        target.said(seat, tokens(9))
    target.assert_empty()


def test_pages_of_a_request_that_was_cancelled_are_found() -> None:
    target = world()
    seat = target.open(tokens(9), 30, salt=SALT)
    target.step()
    target.cancel(seat)
    target.run()
    assert target.ending(seat).reason is FinishReason.CANCELLED
    assert granted(target, target.open(tokens(9), salt=SALT)).cached_tokens == 8


def test_a_grant_that_is_taken_back_leaves_nothing_and_what_was_shared_stays() -> None:
    target = world()
    finished(target, tokens(B), output=1)
    seat = target.granted_seat(tokens(3 * B), salt=SALT)
    granted_pages = target.grant_of(seat).groups[0].page_ids
    target.cancel(seat)
    target.step()
    assert {target.memory.pools[0].state(page) for page in granted_pages} == {PageState.GRANTED}
    again = target.granted_seat(tokens(3 * B), salt=SALT)
    assert granted(target, again).cached_tokens == B
    assert not set(target.grant_of(again).groups[0].page_ids) & set(granted_pages)
    target.check()


def test_what_broke_the_model_is_not_found_again() -> None:
    target = world()
    seat = target.open(tokens(9), 8, salt=SALT)
    target.step()
    target.model = lambda seat: None
    broken = target.scheduler.next_batch(target.now)
    assert broken is not None
    target.scheduler.commit(broken, [None] * len(broken.draws), target.now)
    target.collect()
    assert target.ending(seat).reason is FinishReason.MODEL_ERROR
    assert len(target.memory.pools[0].index) == 0
    target.assert_empty()


def test_more_than_the_router_reckoned_with_is_not_computed_here() -> None:
    target = world()
    finished(target, tokens(9))
    assert target.refusal(target.open(tokens(20), salt=SALT, most_computed_tokens=11)).reason == PREFIX_GONE
    seat = target.open(tokens(20), salt=SALT, most_computed_tokens=12)
    assert granted(target, seat).cached_tokens == 8
    target.run()
    target.assert_empty()


def test_another_attempt_goes_on_from_what_the_first_one_left() -> None:
    """As after a router's loss: the prompt and what was chosen are both found."""
    target = world()
    finished(target, tokens(B), output=B + 1)
    told = target.runner.said(tokens(B), B + 1)
    earlier = Earlier(tuple(told), len(told), len(told))
    seat = target.open(tokens(B), 3 * B, salt=SALT, earlier=earlier)
    assert granted(target, seat).cached_tokens == 2 * B
    target.run()
    assert [*told, *target.selected(seat)] == target.runner.said(tokens(B), 3 * B)
    end = target.ended(seat)
    assert end is not None and end.usage.cached_prompt_tokens == B


def test_room_is_what_nobody_holds() -> None:
    """Cached pages are given up for those who need them; what a seat found is not counted twice against it."""
    target = world(total_pages=9)
    finished(target, tokens(7 * B), output=4)
    assert target.scheduler.load().free_pages == 8
    seat = target.open(tokens(8 * B - 4), 4, salt=SALT)
    assert granted(target, seat).cached_tokens == 6 * B
    other = target.open(tokens(B, first=90), 1, salt=SALT)
    assert not any(isinstance(event, SeatGranted) and event.seat == other for event in target.events)
    target.run()
    finished(target, tokens(7 * B, first=50), output=4)
    target.assert_empty()


@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_under_pressure_with_shared_prefixes_everybody_says_what_is_right(kind: PreemptionKind) -> None:
    target = world(kind=kind, total_pages=13)
    prompts = [(*tokens(6), seat) for seat in range(50, 55)]
    seats = [target.open(prompt, 24, salt=SALT) for prompt in prompts]
    target.run(3000)
    assert target.preempted >= 2
    for seat, prompt in zip(seats, prompts, strict=True):
        target.said(seat, prompt)
        assert len(target.selected(seat)) == 24
    target.assert_empty()


def test_a_preempted_seat_takes_back_what_is_still_here() -> None:
    target = world(total_pages=13)
    low = target.open(tokens(4), 40, salt=SALT)
    while target.seat(low).sequence.cache_tokens < 30:
        target.step()
    high = target.open(tokens(12, first=50), 10, salt=SALT, priority=5)
    while not target.seat(low).away:
        target.step()
    dropped, before = target.preemption.counts.dropped_tokens, computed(target)
    target.run()
    assert dropped > 28 and 0 < computed(target) - before <= 3 * B
    for seat, prompt, output in ((low, tokens(4), 40), (high, tokens(12, first=50), 10)):
        target.said(seat, prompt)
        assert len(target.selected(seat)) == output
    target.assert_empty()


class PrefixMachine(RuleBasedStateMachine):
    """Seats over few prompts of two tenants, under pressure, ended at any time: right tokens and whole books throughout."""

    WINDOW: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.world = world(total_pages=19, step=StepLimits(tokens=10, sequences=4, prompts=2), sequences=6, window=self.WINDOW)
        self.prompts: dict[int, tuple[int, ...]] = {}

    @rule(
        shared=st.integers(0, 4 * B),
        own=st.integers(0, 3),
        output=st.integers(1, 20),
        tenant=st.sampled_from([SALT, OTHER, b""]),
        handed=st.booleans(),
    )
    def open(self, shared: int, own: int, output: int, tenant: bytes, handed: bool) -> None:
        prompt = (*tokens(max(1, shared)), *tokens(own, first=60 + 7 * own))
        begin = self.world.granted_seat if handed else self.world.open
        seat = begin(prompt, output, salt=tenant)
        self.prompts[seat] = prompt

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        waiting = [
            event.seat
            for event in self.world.events
            if isinstance(event, SeatGranted)
            and event.grant is not None
            and (seat := self.world.scheduler.seats.get(event.seat)) is not None
            and seat.state.value == "offered"
        ]
        if waiting:
            self.world.fill(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.prompts:
            self.world.tell(EndSeat(data.draw(st.sampled_from(sorted(self.prompts))), CANCEL, self.world.now))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step(seconds=0.01)

    @rule()
    def drained(self) -> None:
        for drain in self.world.drains():
            self.world.tell(DrainAnswered(drain.grant_id, DrainAnswer.STOPPED))

    @invariant()
    def right(self) -> None:
        self.world.check()
        said: dict[int, list[int]] = {}
        for event in self.world.events:
            if isinstance(event, OutputMade):
                said.setdefault(event.seat, []).extend(event.selected)
        for seat, selected in said.items():
            assert selected == self.world.runner.said(self.prompts[seat], len(selected))

    @invariant()
    def nobody_writes_into_what_others_have(self) -> None:
        for seat in self.world.scheduler.seats:
            for table, pool in zip(seat.holding.tables, self.world.memory.pools, strict=True):
                pages = table[seat.sequence.cache_tokens // B :] if seat.whole else []
                assert all(pool._references[page] == 1 for page in pages)


TestPrefixMachine = pytest.mark.slow(PrefixMachine.TestCase)
TestPrefixMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
