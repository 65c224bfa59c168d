"""Decisions of the decode scheduler in virtual time: budgets, order, growth, ends."""

import pytest

from decode_svc.config import DecodeSettings
from decode_svc.flow import SlowReader
from decode_svc.messages import EndAll, EndSeat, OutputMade, OutputTaken, PromptReady, SeatGranted, StopAdmitting
from decode_svc.planning import StepLimits
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from tests.unit.decode_world import CANCEL, CONTEXT_TOKENS, EOS, PAGE_TOKENS, World


def test_a_prompt_is_computed_here_and_its_output_ends_at_the_limit() -> None:
    world = World()
    seat = world.open(prompt=5, max_output_tokens=3)
    world.run()
    assert [type(event) for event in world.events[:2]] == [SeatGranted, PromptReady]
    assert world.text(seat) == b"abc"
    end = world.ended(seat)
    assert end is not None
    assert end.ending.reason is FinishReason.MAX_OUTPUT_TOKENS
    assert (end.usage.prompt_tokens, end.usage.selected_tokens, end.usage.processed_tokens) == (5, 3, 7)
    # 5 prompt tokens and 2 fed back: 2 pages of 4.
    assert end.report.released == {"batch_places": 1, "pages": 2}
    world.assert_empty()


@pytest.mark.parametrize("length", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 3 * PAGE_TOKENS, CONTEXT_TOKENS - 1])
@pytest.mark.parametrize("max_output_tokens", [1, 2, PAGE_TOKENS + 1])
def test_b26_prompts_around_page_borders_and_the_context(length: int, max_output_tokens: int) -> None:
    world = World()
    seat = world.open(length, min(max_output_tokens, CONTEXT_TOKENS - length))
    world.run()
    expected = min(max_output_tokens, CONTEXT_TOKENS - length)
    assert len(world.selected(seat)) == expected
    assert world.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
    world.assert_empty()


def test_conformance_a_a_stop_over_two_tokens() -> None:
    """Tokens "AB", "CD", stop "BCD": text is exactly "A". Tokens are bytes here, so "AB" is two of them."""
    said = b"ABCD"
    world = World(model=lambda seat: said[seat.sequence.selected_tokens])
    seat = world.open(stops=(b"BCD",))
    world.run()
    assert world.text(seat) == b"A"
    assert world.ending(seat) == Ending(FinishReason.STOP_SEQUENCE, matched_stop="BCD")
    world.assert_empty()


def test_conformance_b_cancel_between_start_and_end_of_a_step() -> None:
    world = World()
    seat = world.open(prompt=4, max_output_tokens=8)
    for _ in range(3):
        world.step()
    assert world.selected(seat) == [97, 98, 99]
    # decode(3) runs; the cancel comes before it is complete.
    world.step(EndSeat(seat, CANCEL, world.now + 0.5))
    assert world.selected(seat) == [97, 98, 99]
    assert world.text(seat) == b"abc"
    end = world.ended(seat)
    assert end is not None
    assert end.ending.reason is FinishReason.CANCELLED
    report = end.report
    assert report.cancel_requested_at is not None and report.cancel_observed_at is not None
    assert report.cancel_requested_at < report.cancel_observed_at <= (report.cancel_effective_at or 0)
    assert report.released == {"batch_places": 1, "pages": 2}
    world.assert_empty()


def test_conformance_c_characters_cut_by_tokens() -> None:
    said = bytes.fromhex("e4bda0e5a5bd454e44")
    world = World(model=lambda seat: said[seat.sequence.selected_tokens])
    world.open(max_output_tokens=16, stops=(b"END",))
    world.run()
    texts = [event.text for event in world.events if isinstance(event, OutputMade) and event.text]
    assert texts == ["你".encode(), "好".encode()]
    world.assert_empty()


def test_the_first_token_may_be_the_end() -> None:
    world = World(model=lambda seat: EOS)
    seat = world.open()
    world.run()
    assert world.ready(seat)
    assert world.text(seat) == b""
    assert world.ending(seat) == Ending(FinishReason.EOS, matched_token_id=EOS)
    world.assert_empty()


def test_eos_before_the_least_output_is_banned_not_ignored() -> None:
    world = World()
    seat_number = world.open(max_output_tokens=4, min_output_tokens=2)
    plan = world.step()
    assert plan is not None
    (seat,) = plan.draws
    assert seat.sequence.banned_ids() == (EOS,)
    world.run()
    assert len(world.selected(seat_number)) == 4


def test_decode_rows_go_first_and_chunks_share_what_is_left() -> None:
    world = World(step=StepLimits(tokens=12, sequences=8, prompts=2))
    first = [world.open(prompt=2, max_output_tokens=20) for _ in range(3)]
    world.step()
    world.step()
    long = world.open(prompt=30, max_output_tokens=2)
    other = world.open(prompt=30, max_output_tokens=2)
    chunks = []
    while not (world.ready(long) and world.ready(other)):
        plan = world.step()
        assert plan is not None and plan.batch is not None
        assert plan.batch.scheduled_tokens <= 12
        names = [rows.sequence for rows in plan.batch.rows]
        assert len(names) == len(set(names))
        assert [len(rows.token_ids) for rows in plan.batch.rows[:3]] == [1, 1, 1]
        chunks.append([len(rows.token_ids) for rows in plan.batch.rows[3:]])
    # The first prompt is finished before the second gets more than what the first leaves.
    assert chunks[:4] == [[9], [9], [9], [3, 6]]
    world.run()
    assert all(len(world.selected(seat)) == 20 for seat in first)
    world.assert_empty()


def test_nobody_starves_when_places_are_few() -> None:
    world = World(step=StepLimits(tokens=24, sequences=2), total_pages=200)
    seats = [world.open(prompt=1, max_output_tokens=10, priority=priority) for priority in (0, 0, 0, 5, 5)]
    world.run(400)
    assert all(len(world.selected(seat)) == 10 for seat in seats)
    order = [event.seat for event in world.events if isinstance(event, OutputMade)]
    # Priority goes first, for a while: it is worth 16 steps a point.
    assert set(order[5:20]) <= {seats[3], seats[4], *seats[:3]}
    assert order.index(seats[3]) < len(order)
    world.assert_empty()


def test_rotation_is_fair_among_equals() -> None:
    world = World(step=StepLimits(tokens=24, sequences=2, prompts=8), total_pages=200)
    seats = [world.open(prompt=1, max_output_tokens=30) for _ in range(5)]
    for _ in range(26):
        world.step()
    counts = [len(world.selected(seat)) for seat in seats]
    assert max(counts) - min(counts) <= 1


def test_b37_pages_are_promised_in_full_so_that_growth_never_fails() -> None:
    world = World(total_pages=9)  # 8 usable pages: 32 tokens
    first = world.open(prompt=4, max_output_tokens=13)  # most cache 16: 4 pages
    second = world.open(prompt=4, max_output_tokens=13)
    third = world.open(prompt=1, max_output_tokens=1)
    assert world.scheduler.books()["pages_free"] == 8
    assert (world.refusal(third).reason, world.refusal(third).retryable) == ("no_pages", True)
    assert "1 pages are needed and 0" in world.refusal(third).detail
    world.run()
    assert len(world.selected(first)) == len(world.selected(second)) == 13
    world.assert_empty()
    fourth = world.open(prompt=1, max_output_tokens=1)
    world.run()
    assert world.ending(fourth).reason is FinishReason.MAX_OUTPUT_TOKENS


def test_what_can_never_fit_is_refused_with_the_true_limit() -> None:
    world = World(total_pages=5)
    seat = world.open(prompt=10, max_output_tokens=8)
    assert world.refusal(seat).reason == "too_long"
    assert "17 tokens of KV are needed, this member holds at most 16" in world.refusal(seat).detail


def test_bounds_and_duplicates_are_refused() -> None:
    world = World(sequences=2)
    key = AttemptKey("same", 1)
    first = world.open(key=key)
    again = world.open(key=key)
    assert (world.refusal(again).reason, world.refusal(again).retryable) == ("duplicate_attempt", True)
    other_attempt = world.open(key=AttemptKey("same", 2))
    third = world.open()
    assert world.refusal(third).reason == "too_many_sequences"
    assert "all 2 sequences" in world.refusal(third).detail
    world.run()
    assert world.ended(first) and world.ended(other_attempt)
    later = world.open(key=key)
    world.run()
    assert world.ended(later)
    world.assert_empty()


def test_draining_refuses_new_ones_and_finishes_the_others() -> None:
    world = World()
    seat = world.open(max_output_tokens=4)
    world.step()
    world.tell(StopAdmitting())
    assert world.refusal(world.open()).reason == "draining"
    world.run()
    assert len(world.selected(seat)) == 4
    assert world.scheduler.load().draining
    world.assert_empty()


def test_the_end_of_draining_ends_what_still_runs_with_its_own_cause() -> None:
    world = World()
    running, waiting = world.open(max_output_tokens=40), world.granted_seat()
    world.step()
    world.tell(EndAll(Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)))
    world.step()
    assert world.ending(running) == Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)
    assert world.ending(waiting).cause is Cause.SHUTTING_DOWN
    (drain,) = world.drains()
    assert drain.grant_id == world.grant_of(waiting).grant_id


def test_the_end_of_draining_does_not_wait_for_a_silent_writer() -> None:
    world = World()
    seat = world.granted_seat()
    world.cancel(seat)
    world.step()
    assert world.ended(seat) is None
    world.tell(EndAll(Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)))
    world.step()
    assert world.ending(seat) == CANCEL
    assert world.scheduler.books()["pages_granted"] == 2


def test_b47_a_full_window_pauses_one_sequence_and_only_that_one() -> None:
    world = World(stream_bytes=17 * 3)  # a byte of text costs 17
    slow, fast = world.open(max_output_tokens=12), world.open(max_output_tokens=12)
    for _ in range(5):
        world.step()
        world.tell(OutputTaken(fast, 17))
    assert len(world.selected(slow)) == 3
    assert world.scheduler.load().paused == 1
    world.tell(OutputTaken(slow, 17))
    world.step()
    assert len(world.selected(slow)) == 3  # above the low-water mark
    world.tell(OutputTaken(slow, 17))
    world.step()
    assert len(world.selected(slow)) == 4
    assert len(world.selected(fast)) == 7
    world.cancel(slow)
    world.step()
    assert world.ending(slow).reason is FinishReason.CANCELLED


def test_b47_a_sequence_whose_reader_coalesces_runs_on_to_a_larger_bound() -> None:
    world = World(stream_bytes=17 * 2)
    policies = (SlowReader.PAUSE, SlowReader.COALESCE, SlowReader.FAIL)
    seats = [world.open(max_output_tokens=30, slow_reader=policy) for policy in policies]
    world.run()
    assert [len(world.selected(seat)) for seat in seats] == [2, 16, 2]
    assert world.scheduler.load().paused == 3


def test_nothing_runs_while_all_are_paused_and_a_late_credit_is_harmless() -> None:
    world = World(stream_bytes=17)
    seat = world.open(max_output_tokens=3)
    world.step()
    assert world.step() is None
    world.tell(OutputTaken(seat, 17))
    world.step()
    world.tell(OutputTaken(seat, 17))
    world.run()
    assert len(world.selected(seat)) == 3
    world.tell(OutputTaken(seat, 17))
    world.assert_empty()


def test_a_final_only_stream_is_never_paused() -> None:
    world = World(stream_bytes=17)
    seat = world.open(max_output_tokens=9, sends_output=False)
    world.run()
    assert len(world.selected(seat)) == 9


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        (Limits(first_token_s=2.5), Cause.FIRST_TOKEN_DEADLINE),
        (Limits(overall_s=2.5), Cause.OVERALL_DEADLINE),
    ],
)
def test_clocks_end_a_prompt_that_takes_too_long(limits: Limits, cause: Cause) -> None:
    world = World(step=StepLimits(tokens=9, sequences=8))
    seat = world.open(prompt=60, max_output_tokens=2, limits=limits)
    assert world.scheduler.next_wake() == 102.5
    for _ in range(4):
        world.step()
    assert world.ending(seat) == Ending(FinishReason.DEADLINE_EXCEEDED, cause)
    assert world.selected(seat) == []
    world.assert_empty()


def test_the_overall_clock_throws_away_the_token_of_the_step_in_which_it_ran_out() -> None:
    world = World()
    seat = world.open(max_output_tokens=30, limits=Limits(overall_s=3.5))
    for _ in range(5):
        world.step()
    assert len(world.selected(seat)) == 3
    assert world.ending(seat) == Ending(FinishReason.DEADLINE_EXCEEDED, Cause.OVERALL_DEADLINE)
    world.assert_empty()


def test_the_inter_token_clock_tells_a_stalled_engine_from_a_slow_reader() -> None:
    world = World(stream_bytes=17 * 2)
    stalled = world.open(max_output_tokens=30, limits=Limits(inter_token_s=5.0), sends_output=False)
    slow = world.open(max_output_tokens=30, limits=Limits(inter_token_s=5.0))
    world.step()
    world.step()
    world.step(seconds=6.0)
    world.step()
    assert world.ending(stalled) == Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_ENGINE)
    assert world.ending(slow) == Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_BACKPRESSURE)
    world.assert_empty()


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    world = World(step=StepLimits(tokens=24, sequences=1, prompts=1))
    first, second = world.open(max_output_tokens=3), world.open(max_output_tokens=3)
    plan = world.scheduler.next_batch(world.now)
    assert plan is not None and [seat.number for seat in plan.seats] == [first]
    world.scheduler.fail(plan, world.now)
    world.collect()
    assert world.ending(first) == Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
    world.run()
    assert len(world.selected(second)) == 3
    world.assert_empty()


def test_logits_that_are_no_numbers_end_their_own_sequence() -> None:
    world = World()
    first, second = world.open(), world.open()
    world.model = lambda seat: None if seat.number == first else 97
    world.run()
    assert world.ending(first).cause is Cause.MODEL_FAILED
    assert len(world.selected(second)) == 8
    world.assert_empty()


def test_a_cancel_twice_and_after_the_end_changes_nothing() -> None:
    world = World()
    seat = world.open()
    world.cancel(seat)
    world.cancel(seat)
    assert world.step() is None
    assert world.ending(seat) == CANCEL
    world.cancel(seat)
    world.cancel(12345)
    world.assert_empty()


def test_the_load_says_what_waits() -> None:
    world = World(step=StepLimits(tokens=10, sequences=8))
    world.open(prompt=30, max_output_tokens=2)
    world.open(prompt=4, max_output_tokens=2)
    load = world.scheduler.load()
    assert (load.waiting, load.waiting_tokens, load.running) == (2, 34, 0)
    assert load.free_pages == 40 - 8 - 2
    world.step()
    assert world.scheduler.load().waiting_tokens == 24


def test_settings_that_would_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens is 8; .* above step_sequences, 8"):
        DecodeSettings(max_step_tokens=8, step_sequences=8)
    settings = DecodeSettings(max_step_tokens=100, step_sequences=8, max_open_grants=5)
    assert settings.scheduler_limits().step == StepLimits(100, 8, 4)
    assert settings.handover_limits().grants_max == 5
