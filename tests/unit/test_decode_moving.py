"""A sequence moves from one decode member to another, in virtual time over real pages, and says what it would have said."""

from dataclasses import replace
from typing import Any

import pytest

from decode_svc.messages import (
    DrainPush,
    EndAll,
    EndSeat,
    LosePrefill,
    OutputMade,
    PauseSeat,
    PromptReady,
    PushDrained,
    SeatEnded,
    SeatPaused,
    SeatPushed,
)
from decode_svc.seats import SeatState
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.prefix_keys import tenant_salt
from tests.unit.decode_world import CANCEL
from tests.unit.moving_world import MOVED, Move, MovingWorld, Pair, outputs_after, pushed, ready

SHUTTING_DOWN = Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)
MID = 8  # bytes: of each transfer at each poll, so that a push takes many


def expected(pair: Pair, **begin: Any) -> Move:
    """A sequence that stands still at its source; its grant at the target is out."""
    move = pair.begin(**begin)
    pair.pause(move)
    pair.open_target(move)
    return move


def pushed_off(pair: Pair, **begin: Any) -> Move:
    """The same, and its source was told to write."""
    move = expected(pair, **begin)
    pair.push(move)
    return move


def being_written(pair: Pair, **begin: Any) -> Move:
    """The same, and the first writes are posted."""
    move = pushed_off(pair, **begin)
    pair.serve(pair.source)
    pair.source.post()
    return move


@pytest.mark.parametrize(("prompt", "steps"), [(1, 1), (3, 1), (4, 1), (4, 5), (5, 4), (9, 8), (16, 2), (23, 11)])
def test_what_was_said_before_and_after_a_move_is_what_is_said_without_one(prompt: int, steps: int) -> None:
    pair = Pair()
    move = pair.begin(prompt, most=16, steps=steps)
    paused = pair.pause(move)
    assert paused == SeatPaused(move.begins, prompt + steps - 1, pushable=True)
    pair.open_target(move)
    grant = pair.push(move)
    assert grant.landing_row is None and grant.token_count == paused.cache_tokens
    pair.carry()
    done = pushed(pair.source, move.begins)
    assert done.cause == "" and done.sent_bytes == len(grant.groups[0].page_ids) * pair.source.slabs[0].unit_bytes
    assert ready(pair.target, move.goes_on), "the commit is told at once, not with the next token"
    assert pair.target.scheduler.load().running == 1
    pair.leave(move)
    assert pair.source.ending(move.begins) == MOVED
    pair.source.assert_empty()
    pair.target.run()
    assert pair.joined(move) == pair.undisturbed(move)
    assert pair.target.ending(move.goes_on).reason is FinishReason.MAX_OUTPUT_TOKENS
    usage = pair.target.ended(move.goes_on).usage  # type: ignore[union-attr]
    assert (usage.selected_tokens, usage.returned_tokens) == (16, 16)
    pair.assert_empty()


def test_a_pause_in_a_running_step_keeps_its_token_and_stops_at_the_border() -> None:
    pair = Pair()
    move = pair.begin(steps=2)
    neighbour = pair.source.open(prompt=3, max_output_tokens=9)
    pair.source.step(PauseSeat(move.begins))
    assert len(pair.source.selected(move.begins)) == 3
    for _ in range(4):
        plan = pair.source.step()
        assert plan is not None and [seat.number for seat in plan.seats] == [neighbour]
    assert outputs_after(pair.source, move.begins, SeatPaused) == []
    assert pair.source.last(SeatPaused, move.begins) == SeatPaused(move.begins, 5 + 2, pushable=True)
    load = pair.source.scheduler.load()
    assert (load.moving, load.running, load.waiting) == (1, 1, 0)
    pair.source.tell(PauseSeat(move.begins))  # by a router that missed the answer
    pair.source.step()
    assert sum(isinstance(event, SeatPaused) for event in pair.source.events) == 2


def test_a_seat_that_ends_before_the_border_answers_with_its_end() -> None:
    pair = Pair()
    move = pair.begin(most=3, steps=2)
    pair.source.step(PauseSeat(move.begins))
    assert pair.source.step() is None
    assert pair.source.ending(move.begins).reason is FinishReason.MAX_OUTPUT_TOKENS
    assert not pair.source.has(SeatPaused, move.begins)
    pair.source.tell(PauseSeat(move.begins))
    assert pair.source.step() is None
    pair.assert_empty()


def test_a_handed_over_prompt_chooses_its_first_token_and_stands_still_after_it() -> None:
    world = Pair().source
    seat = world.granted_seat(prompt=6)
    world.fill(seat)
    world.tell(PauseSeat(seat))
    world.step()
    assert not world.has(SeatPaused, seat)
    assert world.step() is None
    assert world.last(SeatPaused, seat) == SeatPaused(seat, 6, pushable=True)
    world.cancel(seat)
    world.step()
    world.assert_empty()


def test_a_seat_that_waits_for_its_handover_says_at_once_that_it_can_not_move_and_never_runs() -> None:
    world = Pair().source
    seat = world.granted_seat(prompt=6)
    world.tell(PauseSeat(seat))
    assert world.step() is None
    assert world.last(SeatPaused, seat) == SeatPaused(seat, 0, pushable=False)
    world.fill(seat)
    assert world.step() is None, "it was told that nothing more comes"
    assert world.selected(seat) == [] and world.scheduler.books()["landing_rows_used"] == 0
    world.tell(EndSeat(seat, MOVED, None))
    world.step()
    assert world.ended(seat).report.released == {"landing_rows": 1, "pages": 2}  # type: ignore[union-attr]
    world.assert_empty()


def test_a_prompt_that_is_computed_here_stops_and_can_not_move() -> None:
    world = Pair().source
    seat = world.open(prompt=40)
    world.step()
    world.tell(PauseSeat(seat))
    assert world.step() is None
    assert world.last(SeatPaused, seat) == SeatPaused(seat, 24, pushable=False)
    world.tell(EndSeat(seat, MOVED, None))
    world.step()
    world.assert_empty()


def test_a_preempted_sequence_stands_still_without_pages() -> None:
    pair = Pair(pages=9)
    first, second = pair.begin(10, most=20, steps=1), pair.begin(10, most=20, steps=1)
    while not pair.source.preempted:
        assert pair.source.step() is not None
    (away,) = (move for move in (first, second) if pair.source.seat(move.begins).away)
    paused = pair.pause(away)
    assert not paused.pushable
    for _ in range(4):
        pair.source.step()
    assert pair.source.seat(away.begins).away, "nobody gives it pages that it can not use"
    for move in (first, second):
        pair.source.cancel(move.begins)
    pair.source.step()
    pair.source.assert_empty()


@pytest.mark.parametrize("wrong", ["request", "count", "row", "running"])
def test_a_grant_that_does_not_fit_is_refused_and_nothing_is_written(wrong: str) -> None:
    pair = Pair()
    move = pair.begin()
    if wrong != "running":
        pair.pause(move)
    pair.open_target(move)
    grant = pair.target.grant_of(move.goes_on)
    changed = {
        "request": {"key": replace(grant.key, request_id="another")},
        "count": {"token_count": grant.token_count - 1},
        "row": {"landing_row": 0},
        "running": {},
    }[wrong]
    pair.source.push_seat(move.begins, replace(grant, **changed))
    assert pushed(pair.source, move.begins).cause == "bad_grant"
    assert pair.source.scheduler.books()["pushes_open"] == 0
    pair.check()


def test_a_push_that_failed_leaves_the_sequence_as_it_stands_and_another_may_follow() -> None:
    pair = Pair()
    move = pair.begin()
    pair.pause(move)
    first = pair.open_target(move)
    grant = pair.push(move)
    pair.fabric.fail_next(grant.endpoint.agent)
    pair.carry()
    failed = pushed(pair.source, move.begins)
    assert (failed.cause, failed.sent_bytes) == ("transfer_failed", 0) and "transport_error" in failed.detail
    assert pair.source.seat(move.begins).state is SeatState.PAUSED
    assert pair.source.scheduler.books()["pages_pinned"] == 0
    pair.target.tell(LosePrefill(first, Cause.PREFILL_FAILED, drained=True))
    pair.target.step()
    assert pair.target.ended(first) is not None
    pair.target.assert_empty()
    pair.open_target(move)
    pair.push(move)
    pair.carry()
    pair.leave(move)
    pair.target.run()
    assert pair.joined(move) == pair.undisturbed(move)
    pair.assert_empty()


@pytest.mark.parametrize("posted", [False, True])
def test_a_cancel_while_pages_are_written_waits_for_the_writes(posted: bool) -> None:
    pair = Pair(step_bytes=MID)
    move = pushed_off(pair, prompt=20)
    pair.serve(pair.source)
    if posted:
        pair.source.post()
        pair.source.poll()
        assert pair.fabric.in_flight == 1
    pair.source.cancel(move.begins)
    pair.source.step()
    books = pair.source.scheduler.books()
    assert pair.source.ended(move.begins) is None and books["pages_pinned"] == 6 and books["pages_owned"] == 0
    pair.carry()
    end = pair.source.ended(move.begins)
    assert end is not None and end.ending == CANCEL and end.report.cancel_effective_at == pair.source.now
    assert end.report.released == {"batch_places": 1, "pages": 6}
    assert not pair.source.has(SeatPushed, move.begins)
    pair.source.assert_empty()
    pair.target.cancel(move.goes_on)
    pair.target.step()
    pair.carry()
    pair.assert_empty()


def test_clocks_run_while_it_stands_still_and_while_it_is_pushed() -> None:
    for pushes in (False, True):
        pair = Pair(step_bytes=MID)
        move = pair.begin(prompt=20, limits=Limits(inter_token_s=5.0))
        pair.pause(move)
        if pushes:
            pair.open_target(move)
            pair.push(move)
            pair.serve(pair.source)
            pair.source.post()
        pair.pass_time(5.1)
        pair.source.step()
        pair.carry()
        assert pair.source.ending(move.begins).cause is Cause.INTER_TOKEN_ENGINE
        pair.source.assert_empty()


def test_an_end_does_not_wait_for_ever_for_its_writes_but_the_pages_do() -> None:
    pair = Pair(step_bytes=0)
    move = being_written(pair, prompt=20)
    pair.source.cancel(move.begins)
    pair.source.step()
    pair.source.now += 2.0
    pair.source.step()
    end = pair.source.ended(move.begins)
    assert end is not None and end.report.cancel_effective_at is None
    assert pair.source.scheduler.books()["pages_pinned"] == 6
    pair.check()
    pair.fabric.set_speed(1 << 20)
    pair.carry()
    pair.source.assert_empty()


def test_the_end_of_the_member_is_told_at_once_and_its_writes_run_out() -> None:
    pair = Pair(step_bytes=MID)
    move = being_written(pair, prompt=20)
    pair.source.tell(EndAll(SHUTTING_DOWN))
    pair.source.step()
    assert pair.source.ending(move.begins) == SHUTTING_DOWN
    assert pair.source.scheduler.books()["pages_pinned"] == 6
    pair.carry()
    pair.source.assert_empty()


def test_a_sequence_that_moved_is_not_given_up_because_the_source_hears_of_its_last_write_late() -> None:
    pair = Pair()
    move = being_written(pair)
    results = pair.source.sender.poll()
    pair.target.poll()
    assert ready(pair.target, move.goes_on)
    pair.leave(move)
    assert pair.source.ended(move.begins) is None
    pair.source.end_pushes(results)
    assert pair.source.ending(move.begins) == MOVED
    pair.source.tell(DrainPush(pair.target.grant_of(move.goes_on).grant_id, 7))
    assert PushDrained(7, committed=True) in pair.source.errands
    pair.source.errands.clear()
    pair.source.assert_empty()


def test_the_target_takes_its_grant_back_while_pages_are_written() -> None:
    pair = Pair(step_bytes=MID)
    move = being_written(pair, prompt=20)
    pair.target.cancel(move.goes_on)
    pair.target.step()
    pair.serve(pair.target)
    assert pair.source.scheduler.books()["drains_waiting"] == 1
    assert not pair.source.has(SeatPushed, move.begins) and pair.target.ended(move.goes_on) is None
    pair.carry()
    assert pushed(pair.source, move.begins).cause == "revoked"
    assert pair.target.ending(move.goes_on) == CANCEL
    pair.target.assert_empty()
    assert pair.source.seat(move.begins).state is SeatState.PAUSED


def test_a_grant_that_was_taken_back_before_it_came_is_never_written() -> None:
    pair = Pair()
    move = expected(pair)
    pair.target.cancel(move.goes_on)
    pair.target.step()
    pair.carry()
    pair.push(move)
    assert pushed(pair.source, move.begins).cause == "revoked"
    pair.source.take_orders()
    assert pair.source.queued == []
    pair.leave(move)
    pair.assert_empty()


def test_a_source_that_slept_gives_its_pushes_up() -> None:
    pair = Pair(step_bytes=0)
    move = pushed_off(pair, prompt=20)
    pair.serve(pair.source)
    pair.source.now += 11.0
    pair.source.tell()
    pair.carry()
    assert pushed(pair.source, move.begins).cause == "lease_expired"
    pair.leave(move)
    pair.source.assert_empty()


def test_a_source_that_is_lost_in_the_middle_costs_a_fence_and_no_page() -> None:
    pair = Pair(step_bytes=MID)
    move = being_written(pair, prompt=20)
    pair.target.poll()
    pair.source.sender.close()
    pair.target.tell(LosePrefill(move.goes_on, Cause.PREFILL_LOST, drained=False))
    pair.target.step()
    assert pair.target.ending(move.goes_on).cause is Cause.PREFILL_LOST
    held = pair.target.scheduler.books()
    assert held["pages_granted"] == 6 and held["landing_rows_used"] == 0
    assert len(pair.target.drains()) == 1
    pair.target.receiver.fence(pair.source.me.incarnation)
    pair.check()


def test_a_target_that_is_lost_fails_the_push_and_the_sequence_stands() -> None:
    pair = Pair(step_bytes=MID)
    move = being_written(pair, prompt=20)
    grant = pair.target.grant_of(move.goes_on)
    pair.fabric.kill(grant.endpoint.agent)
    pair.source.poll()
    assert pushed(pair.source, move.begins).cause == "transfer_failed"
    pair.leave(move)
    pair.source.assert_empty()


def test_a_sequence_that_moves_here_needs_no_landing_row_and_its_clock_goes_on() -> None:
    pair = Pair(landing_rows=1)
    held = pair.target.granted_seat(prompt=6)
    move = pair.begin(limits=Limits(inter_token_s=5.0))
    pair.pause(move)
    pair.open_target(move, limits=Limits(inter_token_s=5.0))
    assert pair.target.scheduler.books()["landing_rows_used"] == 1
    pair.pass_time(5.1)
    pair.target.step()
    pair.carry()
    assert pair.target.ending(move.goes_on).cause is Cause.INTER_TOKEN_ENGINE
    assert pair.target.ended(move.goes_on).report.released == {"pages": 2}  # type: ignore[union-attr]
    pair.target.fill(held)
    pair.target.run()
    pair.target.assert_empty()


def test_a_target_that_is_asked_to_pause_before_the_commit_does_not_go_on_after_it() -> None:
    pair = Pair()
    move = expected(pair)
    pair.target.tell(PauseSeat(move.goes_on))
    pair.target.step()
    pair.push(move)
    pair.carry()
    assert pair.target.step() is None
    assert pair.target.selected(move.goes_on) == [] and pair.target.seat(move.goes_on).state is SeatState.PAUSED
    pair.target.cancel(move.goes_on)
    pair.target.step()
    pair.target.assert_empty()


def test_a_sequence_moves_twice() -> None:
    pair = Pair()
    move = pushed_off(pair, most=14)
    pair.carry()
    pair.leave(move)
    for _ in range(3):
        pair.target.step()
    pair.target.tell(PauseSeat(move.goes_on))
    pair.target.step()
    middle = [*move.told, *pair.target.selected(move.goes_on)]
    assert pair.target.last(SeatPaused, move.goes_on) == SeatPaused(move.goes_on, 5 + len(middle) - 1, pushable=True)
    first, third = pair.source, MovingWorld(pair.fabric, "third", lambda: "f" * 32)
    pair.source, pair.target = pair.target, third
    again = replace(move, begins=move.goes_on)
    pair.open_target(again)
    assert again.told == middle
    pair.push(again)
    pair.carry()
    pair.leave(again)
    third.run()
    assert [*middle, *third.selected(again.goes_on)] == third.runner.said(move.prompt, 14)
    pair.assert_empty()
    first.assert_empty()


def test_events_of_a_moving_seat_come_in_order() -> None:
    pair = Pair()
    move = pushed_off(pair)
    pair.carry()
    pair.leave(move)
    kinds = [type(event) for event in pair.source.events if event.seat == move.begins]
    assert kinds[-3:] == [SeatPaused, SeatPushed, SeatEnded] and set(kinds[2:-3]) == {OutputMade}
    assert kinds[1] is PromptReady


@pytest.mark.parametrize("have", range(5))
def test_a_sequence_moves_to_where_its_beginning_is_already(have: int) -> None:
    """17 tokens are in the cache, four pages and one token; the target lacks what it never saw, and always the last page."""
    pair, salt = Pair(prefix_cache=True), tenant_salt("tenant")
    move = pair.begin(prompt=13, most=16, steps=5, salt=salt)
    pair.pause(move)
    told = pair.source.seat(move.begins).sequence.output_token_ids
    if have:
        pair.target.open((*move.prompt, *told)[: 4 * have], 1, salt=salt)
        pair.target.run()
    pair.open_target(move, salt=salt)
    grant = pair.push(move)
    assert (grant.first_position, grant.token_count) == (4 * have, 17) and len(grant.groups[0].page_ids) == 5 - have
    pair.carry()
    pair.leave(move)
    pair.target.run()
    assert pair.joined(move) == pair.undisturbed(move)
    pair.assert_empty()


def test_of_a_sequence_that_is_at_the_target_wholly_a_page_moves_all_the_same() -> None:
    pair, salt = Pair(prefix_cache=True), tenant_salt("tenant")
    move = pair.begin(prompt=12, most=16, steps=5, salt=salt)
    pair.pause(move)
    told = pair.source.seat(move.begins).sequence.output_token_ids
    pair.target.open((*move.prompt, *told)[:16], 1, salt=salt)
    pair.target.run()
    pair.open_target(move, salt=salt)
    grant = pair.push(move)
    assert (grant.first_position, grant.token_count) == (12, 16)
    pair.carry()
    pair.leave(move)
    pair.target.run()
    assert pair.joined(move) == pair.undisturbed(move)
    pair.assert_empty()
