"""Seats of outputs that an earlier attempt began: what is computed, shown, counted and timed."""

import pytest

from decode_svc.messages import EndAll, EndSeat, NoticesArrived, OutputMade, PromptReady, SeatEnded, WriterFenced
from decode_svc.planning import StepLimits
from engine.sequence import Earlier
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.usage import Usage
from tests.unit.decode_world import CANCEL, EOS, WRITER, World

FIVE = Earlier(tuple(b"abcde"), 5, 5)


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("prompt", [3, 4, 20])
def test_the_output_goes_on_where_it_stood(handed_over: bool, prompt: int) -> None:
    world = World(step=StepLimits(tokens=10, sequences=3, prompts=2))
    whole = world.open(prompt, 12)
    world.run()
    if handed_over:
        seat = world.granted_seat(prompt, 12, earlier=FIVE)
        assert world.grant_of(seat).token_count == prompt + 5
        world.fill(seat)
    else:
        seat = world.open(prompt, 12, earlier=FIVE)
    world.run()
    assert world.text(seat) == b"fghijkl" and b"abcde" + world.text(seat) == world.text(whole)
    end, undisturbed = world.ended(seat), world.ended(whole)
    assert end is not None and undisturbed is not None
    assert (end.ending, end.usage) == (undisturbed.ending, undisturbed.usage)
    assert end.usage == Usage(
        prompt_tokens=prompt, selected_tokens=12, processed_tokens=prompt + 11, returned_tokens=12, billed_tokens=12
    )
    computed = [rows.token_ids for plan in world.plans if plan.batch is not None for rows in plan.batch.rows]
    assert (tuple(b"bcde") in [ids[-4:] for ids in computed if len(ids) > 1]) is not handed_over
    world.assert_empty()


def test_the_promise_is_the_one_of_the_whole_output() -> None:
    world = World()
    first = world.open(5, 12)
    promised = world.memory.promised_pages
    world.cancel(first)
    world.step()
    world.open(5, 12, earlier=FIVE)
    assert world.memory.promised_pages == promised == 4
    waiting = world.scheduler.load()
    assert (waiting.waiting, waiting.waiting_tokens) == (1, 10)


def test_what_was_not_delivered_is_the_first_output() -> None:
    world = World()
    seat = world.open(5, 7, earlier=Earlier(tuple(b"abcde"), 3, 3))
    world.run()
    outputs = [event for event in world.events if isinstance(event, OutputMade)]
    assert [(bytes(one.text), tuple(one.selected), tuple(one.shown)) for one in outputs] == [
        (b"def", tuple(b"f"), tuple(b"def")),
        (b"g", tuple(b"g"), tuple(b"g")),
    ]
    assert [type(event) for event in world.events if event.seat == seat][1:3] == [PromptReady, OutputMade]


def test_a_seat_that_ends_before_its_prompt_shows_what_was_not_delivered() -> None:
    world = World()
    quiet = world.open(5, 7, earlier=Earlier(tuple(b"abcde"), 0, 0), sends_output=False)
    world.cancel(quiet)
    world.step()
    assert world.text(quiet) == b"abcde"
    lost = world.granted_seat(5, 7, earlier=Earlier(tuple(b"abcde"), 1, 1))
    world.scheduler.handovers._cut_off(WRITER.incarnation, world.now)
    world.tell(WriterFenced(WRITER.incarnation, True))
    assert (world.text(lost), world.ending(lost).cause) == (b"bcde", Cause.PREFILL_LOST)
    end = world.ended(lost)
    assert end is not None and (end.usage.selected_tokens, end.usage.returned_tokens) == (5, 5)
    world.assert_empty()


def test_the_first_token_clock_does_not_run_and_the_inter_token_clock_goes_on() -> None:
    world = World()
    limits = Limits(first_token_s=1.0, inter_token_s=10.0)
    seat = world.granted_seat(5, 8, earlier=FIVE, limits=limits, last_token_at=world.now - 4.0)
    world.now += 4.9
    assert world.step() is None and world.ended(seat) is None
    world.fill(seat)
    world.step()
    assert world.ready(seat)
    late = world.granted_seat(5, 8, earlier=FIVE, limits=limits, last_token_at=world.now - 4.0)
    assert world.scheduler.next_wake() is not None
    world.now += 6.0
    world.step()
    assert world.scheduler.seats.get(late) is not None, "its writer is asked first"
    world.run()
    world.now += 2.0
    world.step()
    assert world.ending(late) == Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_ENGINE)


def test_the_first_token_of_a_resumed_seat_is_not_the_requests_first() -> None:
    world = World()
    seat = world.open(5, 6, earlier=FIVE, last_token_at=world.now - 1.0)
    world.run()
    end = world.ended(seat)
    assert end is not None and end.report.first_token_at is None
    assert end.report.last_token_at == end.report.ready_at is not None
    unready = world.open(5, 7, earlier=FIVE, last_token_at=world.now - 1.0)
    world.cancel(unready)
    world.step()
    end = world.ended(unready)
    assert end is not None and end.report.last_token_at is None


def test_a_member_that_stops_or_is_left_keeps_what_a_stop_may_take() -> None:
    world = World(model=lambda seat: b"abEN"[seat.sequence.selected_tokens])
    seats = [world.open(3, 8, stops=(b"END",)) for _ in range(4)]
    for _ in range(4):
        world.step()
    stops = Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)
    world.tell(EndSeat(seats[1], CANCEL, world.now), EndSeat(seats[2], stops, world.now))
    world.tell(EndSeat(seats[3], Ending(FinishReason.CANCELLED, Cause.MOVED), world.now), EndAll(stops))
    world.step()
    assert [world.text(seat) for seat in seats] == [b"ab", b"abEN", b"abEN", b"ab"]
    assert {world.ending(seats[0]), world.ending(seats[2])} == {stops}
    world = World()
    world.model = lambda seat: b"abENDx"[seat.sequence.selected_tokens]
    again = world.open(3, 8, stops=(b"END",), earlier=Earlier(tuple(b"abEN"), 2, 2))
    world.run()
    assert world.text(again) == b""
    assert world.ending(again) == Ending(FinishReason.STOP_SEQUENCE, matched_stop="END")


def test_penalties_and_least_tokens_count_from_the_requests_first_token() -> None:
    world = World(model=lambda seat: 97 if EOS in seat.sequence.banned_ids() else EOS)
    seat = world.open(3, 9, min_output_tokens=4, earlier=Earlier(tuple(b"aa"), 2, 2))
    world.run()
    assert world.selected(seat) == [97, 97, EOS]


def test_notices_of_the_earlier_attempts_grant_do_nothing() -> None:
    world = World()
    first = world.granted_seat(5, 8)
    stale = world.notice(world.grant_of(first))
    world.cancel(first)
    world.step()
    seat = world.granted_seat(5, 8, earlier=FIVE)
    world.tell(NoticesArrived(((WRITER.incarnation, stale),)))
    world.step()
    assert not world.ready(seat)
    assert not any(isinstance(event, SeatEnded) and event.seat == seat for event in world.events)
