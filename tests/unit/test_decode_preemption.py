"""Preemption in virtual time: who goes, who comes back, what is lost (nothing), and that nobody waits for ever."""

import pytest

from decode_svc.kv_place import PLACE_EDGES, IllegalKvMove, KvPlace
from decode_svc.messages import EndSeat, OutputTaken, PauseSeat, PromptReady, SeatEnded, SeatPaused
from decode_svc.planning import StepLimits
from decode_svc.preemption import PASSES_MAX, PreemptionKind
from decode_svc.progress import NO_PROGRESS_S
from decode_svc.seats import SeatState
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, FinishReason
from tests.unit.decode_world import CANCEL, PAGE_TOKENS, World
from tests.unit.pressure_world import PressureWorld

KINDS = pytest.mark.parametrize("kind", list(PreemptionKind))
AWAY = {PreemptionKind.RECOMPUTE: KvPlace.DROPPED, PreemptionKind.SWAP: KvPlace.SWAPPED}


def prompt(seat: int, length: int = 4) -> tuple[int, ...]:
    return tuple(10 * seat + place for place in range(length))


def under_pressure(kind: PreemptionKind | None, seats: int = 3, output: int = 30, **options: object) -> PressureWorld:
    """12 pages of 4 tokens; each seat needs up to 9, and is promised 1."""
    world = PressureWorld(kind, **options)  # type: ignore[arg-type]
    for seat in range(1, seats + 1):
        world.open(prompt(seat), output)
    return world


def until_away(world: PressureWorld, seat: int) -> None:
    for _ in range(200):
        if world.seat(seat).away:
            return
        world.step()
    raise AssertionError(f"seat {seat} was never preempted")


@KINDS
def test_every_output_is_what_it_would_have_been(kind: PreemptionKind) -> None:
    world = under_pressure(kind, seats=5)
    world.run(2000)
    assert world.preempted >= 3
    for seat in range(1, 6):
        assert world.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
        assert len(world.selected(seat)) == 30
        world.said(seat, prompt(seat))
    assert world.preemption.counts.preempted[kind] == world.preempted
    world.assert_empty()


def test_the_youngest_of_the_lowest_priority_goes_first() -> None:
    world = PressureWorld()
    order = [world.open(prompt(seat), 40, priority=priority) for seat, priority in ((1, -1), (2, 1), (3, -1), (4, 1))]
    gone: list[int] = []
    for _ in range(100):
        world.step()
        gone += [seat for seat in order if seat not in gone and world.scheduler.seats.get(seat) and world.seat(seat).away]
        if len(gone) == 3:
            break
    assert gone == [3, 1, 4], "3 is younger than 1; 4 is younger than 2"


def test_a_seat_may_be_its_own_victim() -> None:
    world = PressureWorld()
    world.open(prompt(1), 40, priority=5)
    second = world.open(prompt(2), 40)
    world.open(prompt(3), 40, priority=5)
    until_away(world, second)
    assert not world.seat(1).away and not world.seat(3).away


@KINDS
def test_step_state_is_untouched_while_away_and_after(kind: PreemptionKind) -> None:
    """B6: next token, position, text and counts stay; coming back draws nothing."""
    world = under_pressure(kind, seats=2)
    until_away(world, 2)
    seat = world.seat(2)
    assert seat.place is AWAY[kind] and seat.state is SeatState.RUNNING and not seat.holding.pages
    before = (seat.sequence.next_input(), seat.sequence.output_token_ids, seat.sequence.cache_tokens)
    for _ in range(100):
        if seat.whole:
            break
        assert (seat.sequence.next_input(), seat.sequence.output_token_ids, seat.sequence.cache_tokens) == before
        world.step()
    world.run()
    assert sum(isinstance(event, PromptReady) and event.seat == 2 for event in world.events) == 1
    world.said(2, prompt(2))
    end = world.ended(2)
    assert end is not None and end.report.preemptions == 1
    world.assert_empty()


def test_lost_tokens_are_computed_again_in_chunks_beside_decode_rows() -> None:
    world = under_pressure(PreemptionKind.RECOMPUTE, seats=2, total_pages=12, step=StepLimits(tokens=6, sequences=2, prompts=1))
    until_away(world, 2)
    lost = world.seat(2).missing_tokens
    assert lost == world.seat(2).sequence.cache_tokens > 12
    chunks: list[int] = []
    world.open(prompt(3), 20)
    while world.scheduler.seats.get(2):
        plan = world.step()
        assert plan is not None and plan.batch is not None, "nothing goes on"
        chunks += [len(rows.token_ids) for rows in plan.batch.rows if rows.sequence == "seat-2" and len(rows.token_ids) > 1]
        assert all(not rows.wants_logits for rows in plan.batch.rows if len(rows.token_ids) > 1 and rows.sequence == "seat-2")
    assert len(chunks) > 1 and max(chunks) <= 6 and sum(chunks) in (lost, lost - 1)
    world.run()
    world.said(2, prompt(2))


def test_a_full_host_area_falls_back_to_computing_again() -> None:
    world = under_pressure(PreemptionKind.SWAP, seats=4, host_pages=5)
    world.run(2000)
    counts = world.preemption.counts
    assert counts.preempted[PreemptionKind.SWAP] and counts.preempted[PreemptionKind.RECOMPUTE]
    assert len(set(counts.swapped_bytes.values())) == 1, "what went out came back"
    for seat in range(1, 5):
        world.said(seat, prompt(seat))
    world.assert_empty()


@pytest.mark.parametrize(("token_s", "bytes_per_s"), [(1.0, 1.0), (1.0, 1e9), (1e-9, 1.0)])
def test_the_cheaper_way_is_taken(token_s: float, bytes_per_s: float) -> None:
    world = under_pressure(None, seats=5)
    size = sum(world.memory.page_bytes)
    for seconds in (2.0, token_s):
        world.preemption.cost.stepped(1, seconds)
    world.preemption.cost.copied(1, 1 / bytes_per_s)
    world.run(2000)
    counts = world.preemption.counts.preempted
    swaps = 2 * size / bytes_per_s <= PAGE_TOKENS * token_s
    assert counts[PreemptionKind.SWAP if swaps else PreemptionKind.RECOMPUTE] >= 3
    assert not counts[PreemptionKind.RECOMPUTE if swaps else PreemptionKind.SWAP]
    for seat in range(1, 6):
        world.said(seat, prompt(seat))
    world.assert_empty()


@KINDS
@pytest.mark.parametrize("how", ["cancel", "clock", "during a step"])
def test_b22_an_end_while_preempted_releases_everything_once(kind: PreemptionKind, how: str) -> None:
    world = PressureWorld(kind)
    world.open(prompt(1), 40)
    world.open(prompt(2), 40, limits=Limits(overall_s=60.0 if how == "clock" else None))
    until_away(world, 2)
    books = world.scheduler.books()
    assert (books["host_pages_used"] > 0) == (kind is PreemptionKind.SWAP)
    if how == "cancel":
        world.cancel(2)
    if how == "during a step":
        world.step(EndSeat(2, CANCEL, world.now))
    world.now += 60.0
    world.step()
    end = world.ended(2)
    assert end is not None
    assert end.ending.cause is (Cause.OVERALL_DEADLINE if how == "clock" else Cause.CLIENT_CANCEL)
    assert end.report.released.get("host_pages", 0) == books["host_pages_used"]
    assert "batch_places" not in end.report.released and end.report.released["pages"] == 0
    assert world.scheduler.books()["host_pages_used"] == 0
    world.said(2, prompt(2))
    world.cancel(1)
    world.step()
    world.assert_empty()


def test_a_cancel_while_lost_tokens_are_computed_again() -> None:
    world = under_pressure(PreemptionKind.RECOMPUTE, seats=2, step=StepLimits(tokens=4, sequences=2, prompts=1))
    until_away(world, 2)
    world.cancel(1)
    plan = world.step(EndSeat(2, CANCEL, world.now))
    assert plan is not None and world.seat(2).missing_tokens, "one chunk of several"
    world.step()
    assert world.ending(2).reason is FinishReason.CANCELLED
    world.assert_empty()


@KINDS
def test_a_failed_step_ends_its_own_seats_and_not_the_preempted_one(kind: PreemptionKind) -> None:
    world = under_pressure(kind, seats=2)
    until_away(world, 2)
    plan = world.scheduler.next_batch(world.now)
    world.copy(world.preemption.take_copies())
    assert plan is not None
    world.scheduler.fail(plan, world.now)
    world.collect()
    assert world.ending(1).reason is FinishReason.MODEL_ERROR
    world.run()
    assert world.ending(2).reason is FinishReason.MAX_OUTPUT_TOKENS
    world.said(2, prompt(2))
    world.assert_empty()


@KINDS
def test_a_preempted_seat_that_is_to_be_moved_stands_still_and_has_nothing_to_push(kind: PreemptionKind) -> None:
    """It keeps what it has on the host until its router, which goes on with it elsewhere, ends it; it is not waited for."""
    world = under_pressure(kind, seats=2)
    until_away(world, 2)
    world.tell(PauseSeat(2))
    world.step()
    paused = next(event for event in world.events if isinstance(event, SeatPaused))
    assert (paused.seat, paused.pushable) == (2, False)
    late = world.open((1, 2), 2)
    assert world.granted(late), "what stands still needs no room"
    world.run()
    assert world.seat(2).away and world.ended(1) is not None
    world.cancel(2)
    world.step()
    end = world.ended(2)
    assert end is not None and (end.report.released.get("host_pages", 0) > 0) == (kind is PreemptionKind.SWAP)
    world.assert_empty()


def test_new_seats_wait_for_those_that_were_preempted() -> None:
    """Holders go before non-holders: what could not come back too leaves no room for a new grant."""
    world = under_pressure(PreemptionKind.RECOMPUTE, seats=2)
    until_away(world, 2)
    assert world.memory.available() >= 1
    late = world.open((1, 2), 2)
    assert world.refusal(late).reason == "no_pages" and world.refusal(late).retryable
    assert world.scheduler.load().free_pages == 0 and world.scheduler.load().preempted == 1
    world.run()
    world.assert_empty()


def read(world: PressureWorld, number: int) -> None:
    """The reader of a seat takes what there is."""
    seat = world.scheduler.seats.get(number)
    if seat is not None and seat.window.untaken_bytes:
        world.tell(OutputTaken(number, seat.window.untaken_bytes))


def test_who_stops_reading_goes_first() -> None:
    world = PressureWorld(PreemptionKind.SWAP, stream_bytes=60)
    stalled, other = world.open(prompt(1), 44, priority=9), world.open(prompt(2), 44)
    for _ in range(60):
        world.step()
        read(world, other)
    end = world.ended(other)
    assert end is not None and end.report.preemptions == 0, "the lower priority went on while the higher one was not read"
    assert world.seat(stalled).stopped
    for _ in range(60):
        read(world, stalled)
        world.step()
    for number in (stalled, other):
        assert world.ending(number).reason is FinishReason.MAX_OUTPUT_TOKENS
        world.said(number, prompt(number))
    world.assert_empty()


@KINDS
def test_b37_who_stops_reading_makes_room_for_who_waits(kind: PreemptionKind) -> None:
    """A reader that stalls for ever holds no pages that somebody else could use."""
    # A token takes 17 bytes of the window: the older one goes on for a while after the younger one had to go.
    world = PressureWorld(kind, stream_bytes=17 * 28)
    stalled, other = world.open(prompt(1), 44, priority=9), world.open(prompt(2), 44)
    for _ in range(200):
        world.step()
        read(world, other)
        if world.seat(other).away:
            break
    assert not world.seat(stalled).stopped
    for _ in range(60):
        world.step()
        read(world, other)
    assert world.ending(other).reason is FinishReason.MAX_OUTPUT_TOKENS
    assert world.seat(stalled).stopped and world.seat(stalled).preemptions == 1
    for _ in range(60):
        read(world, stalled)
        world.step()
    for number in (stalled, other):
        world.said(number, prompt(number))
    world.assert_empty()


def test_a_waiting_seat_of_higher_priority_displaces_lower_ones() -> None:
    world = PressureWorld(total_pages=17)
    first = world.granted_seat(prompt=20, max_output_tokens=40, priority=9)
    other = world.granted_seat(prompt=32, max_output_tokens=30, priority=-9)
    world.fill(first)
    until_away(world, first)  # the grant of the other can not be taken
    world.fill(other)
    for _ in range(3):
        world.step()
    assert not world.seat(first).away and world.seat(other).away
    world.run()
    world.said(first, range(1, 21))
    world.said(other, range(1, 33))
    world.assert_empty()


def test_a_seat_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    """Small ones come back as pages are given back one by one; after four of them they wait for the big one before them."""
    world = PressureWorld(total_pages=25, sequences=40, step=StepLimits(tokens=40, sequences=32, prompts=8))
    keepers = [world.open(prompt(number), 20 + 6 * number, priority=2) for number in range(1, 6)]
    big = world.open(prompt(6, 20), 30, priority=1)
    small = [world.open(prompt(number, 3), 6 + 2 * (number % 3)) for number in range(7, 16)]
    most = 0
    for _ in range(500):
        world.step()
        waiting = world.scheduler.seats.get(big)
        most = max(most, waiting.passed if waiting is not None else 0)
    assert most == PASSES_MAX
    for number in (*keepers, big, *small):
        assert world.ending(number).reason is FinishReason.MAX_OUTPUT_TOKENS
        world.said(number, prompt(number, {big: 20}.get(number, 4 if number in keepers else 3)))
    world.assert_empty()


def test_nobody_is_preempted_for_ever_while_more_important_work_keeps_coming() -> None:
    """Behind an endless row of higher priority the low one still ends within a bound: new seats wait for it."""
    world = PressureWorld(sequences=8)
    low = world.open(prompt(1), 40, priority=-10)
    for turn in range(300):
        if turn % 3 == 0:
            world.open(prompt(2), 40, priority=10)
        world.step()
    assert world.ending(low).reason is FinishReason.MAX_OUTPUT_TOKENS
    world.said(low, prompt(1))


@KINDS
def test_a_landed_seat_that_is_preempted_draws_its_first_token_all_the_same(kind: PreemptionKind) -> None:
    """It has no rows in the step in which its first token is drawn, and its logits are in a landing row."""
    world = PressureWorld(kind, total_pages=7)
    old = world.open(prompt(1), 20)
    while world.seat(old).sequence.cache_tokens < 8:
        world.step()
    landed = [world.granted_seat(prompt=4, max_output_tokens=8) for _ in range(4)]
    for seat in landed:
        world.fill(seat)
    assert world.memory.available() == 0
    assert world.seat(landed[-1]).state is SeatState.LANDED
    world.step()
    assert world.seat(landed[-1]).place is AWAY[kind] and world.seat(landed[-1]).state is SeatState.RUNNING
    assert world.selected(landed[-1]) == world.runner.said(range(1, 5), 1)
    world.run()
    assert len(world.selected(old)) == 20
    world.said(old, prompt(1))
    for seat in landed:
        assert len(world.selected(seat)) == 8
        world.said(seat, range(1, 5))
    world.assert_empty()


def test_what_a_seat_gave_up_is_used_in_the_same_turn() -> None:
    """The last resident seat gives itself up beside a grant that nobody may take; one that waits goes on at once (B37)."""
    world = PressureWorld(total_pages=10)
    first, second = world.open(prompt(1), 32), world.open(prompt(2), 20)
    grant = world.granted_seat(prompt=8, max_output_tokens=1)
    until_away(world, second)
    until_away(world, first)
    assert not world.seat(second).away
    for _ in range(100):
        assert world.step() is not None
        if world.ended(second):
            break
    world.fill(grant)
    world.run()
    for seat in (first, second):
        assert world.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
        world.said(seat, prompt(seat))
    world.assert_empty()


def test_a_preemption_raises_the_rank() -> None:
    """Of two equals the younger goes first, and the other one the next time."""
    world = PressureWorld(total_pages=15)
    first, second = world.open(prompt(1), 44), world.open(prompt(2), 44)
    short = world.open(prompt(3), 14, priority=1)
    until_away(world, second)
    while not world.ended(short):
        world.step()
    until_away(world, first)
    assert world.seat(second).preemptions == 1 and not world.seat(second).away
    world.run()
    world.said(first, prompt(1))
    world.said(second, prompt(2))


def test_outputs_as_long_as_expected_never_preempt() -> None:
    world = PressureWorld(expected=44)
    world.open(prompt(1), 44)
    assert world.refusal(world.open(prompt(2), 8)).reason == "no_pages", "everything is promised"
    world.run()
    assert world.preempted == 0


def test_outputs_that_ended_tell_what_the_next_is_promised() -> None:
    world = PressureWorld(expected=3)
    assert world.scheduler.load().expected_output_tokens == 3
    world.open(prompt(1), 7)
    assert world.memory.promised_pages == 2, "4 of the prompt, 2 of the 3 are fed"
    world.run()
    assert world.scheduler.load().expected_output_tokens == 7
    cancelled = world.open(prompt(2), 40)
    for _ in range(20):
        world.step()
    world.cancel(cancelled)
    world.step()
    assert world.scheduler.load().expected_output_tokens == 7, "a cancelled output tells nothing"
    plain = World()
    assert plain.scheduler.load().expected_output_tokens is None


def test_b37_no_progress_is_a_fault_in_the_books() -> None:
    """Pages that went astray keep a preempted seat out: the watch says so when its bound is over, and only then."""
    world = under_pressure(PreemptionKind.RECOMPUTE, seats=2)
    until_away(world, 2)
    pool = world.memory.pools[0]
    world.cancel(1)
    seat = world.scheduler.seats.get(1)
    assert seat is not None
    world.scheduler.seats.end_due(world.now)
    pool.allocate("astray", pool.free_pages - 1)
    assert world.scheduler.next_batch(world.now) is None
    due_at = world.scheduler.next_wake()
    assert due_at == world.now + NO_PROGRESS_S
    world.check()
    assert world.scheduler.next_batch(due_at) is None
    assert world.scheduler.check() == ["nothing was scheduled for 10 s although 1 seats could go on"]
    assert world.scheduler.progress.take_news() and not world.scheduler.progress.take_news()
    pool.release("astray")
    plan = world.scheduler.next_batch(due_at)
    assert plan is not None
    world.scheduler.commit(plan, world.compute(plan), due_at)
    world.run()
    world.said(2, prompt(2))
    assert any(isinstance(event, SeatEnded) and event.seat == 2 for event in world.events)
    world.assert_empty()


@pytest.mark.parametrize("place", list(KvPlace))
@pytest.mark.parametrize("target", list(KvPlace))
def test_the_place_of_kv_moves_along_its_table_only(place: KvPlace, target: KvPlace) -> None:
    world = PressureWorld()
    seat = world.seat(world.open(prompt(1), 4))
    seat.place = place
    if target in PLACE_EDGES[place]:
        seat.put(target)
        assert seat.place is target
    else:
        with pytest.raises(IllegalKvMove):
            seat.put(target)
        assert seat.place is place
