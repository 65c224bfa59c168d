"""Drafts in the decode scheduler: whatever is drafted, everything that can be seen is what the plain loop shows."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode_svc.config import DecodeSettings
from decode_svc.draft_records import ACCEPTED_LEAST, REST_TOKENS, Record
from decode_svc.messages import EndSeat, OutputMade, OutputTaken, PauseSeat, SeatEnded, SeatEvent
from decode_svc.planning import StepLimits
from decode_svc.preemption import PreemptionKind, Reservation
from decode_svc.seats import SeatState
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from engine.layout import pages_for
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from tests.unit.decode_world import CANCEL, CONTEXT_TOKENS, EOS, PAGE_TOKENS, WRITER
from tests.unit.pressure_world import PressureWorld

MOST = 5


def world(right: float = 1.0, *, seed: int = 0, drafts: bool = True, cheap_rows: bool = True, **options: object) -> PressureWorld:
    """With drafts of which each is right with a probability; without any if not `drafts`. There are pages for everybody."""
    settings: dict[str, object] = {"total_pages": 80, "reservation": Reservation.FULL, **options}
    made = PressureWorld(
        speculation=SpeculationLimits(draft_tokens=MOST),
        right=right if drafts else None,
        draft_seed=seed,
        **settings,  # type: ignore[arg-type]
    )
    if cheap_rows:
        for rows in (1, 100) * 20:
            made.scheduler.speculation.cost.add(rows, 0.01)
    return made


def seen(events: Sequence[SeatEvent], seat: int) -> list[object]:
    """Everything of a seat that others can see, but for times."""
    mine: list[object] = [tuple(event) for event in events if isinstance(event, OutputMade) and event.seat == seat]
    ends = [event for event in events if isinstance(event, SeatEnded) and event.seat == seat]
    return mine + [(end.ending, end.usage, end.report.released, end.report.held_bytes) for end in ends]


def both(case: str, right: float, seed: int) -> tuple[PressureWorld, PressureWorld, list[int]]:
    """The same requests with and without drafts, to their ends."""
    worlds = (world(right, seed=seed), world(drafts=False))
    seats: list[int] = []
    for each in worlds:
        each.runner.outputs = {(9, 9, 9): [*b"one two END three", EOS], (8, 8): [*b"abcd", EOS, *b"efgh"]}
        if case == "stop":
            seats = [
                each.open((9, 9, 9), 30, stops=(b"two E",)),
                each.open((9, 9, 9), 30, stops=(b"two E",), min_output_tokens=9),
            ]
        elif case == "eos":
            seats = [each.open((8, 8), 30), each.open((9, 9, 9), 40, min_output_tokens=18)]
        elif case == "limits":
            lengths = itertools.product((1, PAGE_TOKENS, CONTEXT_TOKENS - 9), (1, 2, 9, 20))
            seats = [each.open(length, most) for length, most in lengths]
        else:
            seats = [each.granted_seat(prompt, 20) for prompt in (3, 4, 13)]
            for seat in seats:
                each.fill(seat)
        each.run()
    return *worlds, seats


@pytest.mark.slow
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("case", ["stop", "eos", "limits", "handed over"])
def test_nothing_of_drafts_can_be_seen(case: str, right: float) -> None:
    accepted = 0
    for seed in range(2 if 0.0 < right < 1.0 else 1):
        with_drafts, plain, seats = both(case, right, seed)
        for seat in seats:
            assert seen(with_drafts.events, seat) == seen(plain.events, seat)
        counts = with_drafts.scheduler.speculation.counts
        assert counts.drafted_tokens > 0
        accepted += counts.accepted_tokens
        if right == 1.0 and case != "limits":
            assert with_drafts.scheduler.steps < plain.scheduler.steps / 2
        with_drafts.assert_empty()
    assert (accepted > 0) == (right > 0.0)


def test_a_cancel_in_the_middle_of_a_drafted_step_throws_all_of_it_away() -> None:
    """Conformance B, with drafts."""
    made = world()
    seat = made.open(prompt=4, max_output_tokens=30)
    made.step()
    plan = made.step()
    assert plan is not None and plan.drafts == {seat: tuple(made.runner.said((1, 2, 3, 4), 5)[1:])}
    selected = made.selected(seat)
    assert len(selected) == 6
    plan = made.step(EndSeat(seat, CANCEL, made.now + 0.5))
    assert plan is not None and len(plan.drafts[seat]) > 2
    assert made.selected(seat) == selected
    end = made.ended(seat)
    assert end is not None and end.ending.reason is FinishReason.CANCELLED
    # The token that was fed is in the cache, no draft is.
    assert end.usage.processed_tokens == 4 + len(selected)
    assert end.report.released == {"batch_places": 1, "pages": pages_for(4 + len(selected), PAGE_TOKENS)}
    made.assert_empty()


def test_a_clock_that_ran_out_during_the_step_throws_all_of_it_away() -> None:
    made = world()
    seat = made.open(prompt=4, max_output_tokens=30, limits=Limits(overall_s=2.5))
    for _ in range(3):
        made.step(seconds=1.0)
    assert made.ending(seat).cause is Cause.OVERALL_DEADLINE
    assert len(made.selected(seat)) == 6
    made.assert_empty()


def test_a_full_window_stops_an_accepted_run_where_it_stops_the_plain_loop() -> None:
    made, plain = world(stream_bytes=60), world(drafts=False, stream_bytes=60)
    for each in (made, plain):
        seat = each.open(prompt=4, max_output_tokens=30)
        each.run()
        live = each.seat(seat)
        assert live.window.paused
        assert live.holding.pages == pages_for(live.sequence.cache_tokens, PAGE_TOKENS)
    assert seen(made.events, 1) == seen(plain.events, 1)
    for each in (made, plain):
        while each.scheduler.seats.get(1) is not None:
            each.tell(OutputTaken(1, each.seat(1).window.untaken_bytes))
            each.run()
    assert seen(made.events, 1) == seen(plain.events, 1)
    assert made.scheduler.steps < plain.scheduler.steps
    made.assert_empty()


def test_a_row_without_numbers_counts_only_when_its_token_is_reached() -> None:
    made = world()
    seat = made.open(prompt=4, max_output_tokens=30)
    history = (1, 2, 3, 4, *made.runner.said((1, 2, 3, 4), 6))
    made.runner.poison_when = lambda seen: seen == history
    made.run()
    assert made.ending(seat) == Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
    assert made.selected(seat) == list(history[4:])
    made.assert_empty()
    made = world(right=0.0)
    made.runner.poison_when = lambda seen: 255 in seen
    seat = made.open(prompt=4, max_output_tokens=30)
    made.run()
    assert made.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS


def test_a_failed_step_ends_its_sequences_as_ever() -> None:
    made = world()
    seat = made.open(prompt=4, max_output_tokens=30)
    made.step()
    plan = made.scheduler.next_batch(made.now)
    assert plan is not None
    made.scheduler.draft(plan)
    assert plan.drafts
    made.scheduler.fail(plan, made.now)
    made.collect()
    assert made.ending(seat).cause is Cause.MODEL_FAILED
    made.assert_empty()


def test_pages_of_wrong_drafts_go_back_at_once() -> None:
    made = world(right=0.0)
    seat = made.open(prompt=PAGE_TOKENS, max_output_tokens=30)
    promised = sum(made.seat(seat).holding.promised)
    made.step()
    longest = 0
    while made.scheduler.seats.get(seat) is not None:
        live = made.seat(seat)
        assert live.holding.pages == pages_for(live.sequence.cache_tokens, PAGE_TOKENS)
        assert live.holding.pages + sum(live.holding.promised) == promised
        plan = made.step()
        assert plan is not None and plan.batch is not None
        longest = max(longest, plan.batch.rows[0].draft_tokens)
    assert longest >= PAGE_TOKENS - 1
    made.assert_empty()


def test_drafts_stay_within_what_a_seat_was_promised() -> None:
    """With `expected` others have a claim on the free pages: nobody is preempted, and nobody is refused, for a draft."""
    made = world(reservation=Reservation.EXPECTED, expected=3, total_pages=30)
    seat = made.open(prompt=3, max_output_tokens=30)
    while made.scheduler.seats.get(seat) is not None:
        live = made.seat(seat)
        reach = made.memory.reach(live.holding)
        plan = made.step()
        if plan is not None and plan.batch is not None and plan.drafts:
            assert plan.batch.rows[0].end_position <= max(reach, pages_for(plan.batch.rows[0].first_position + 1, 4) * 4)
    made.said(seat, (1, 2, 3))
    made.assert_empty()


def test_a_seat_moves_away_with_nothing_but_what_was_accepted() -> None:
    made = world()
    seat = made.open(prompt=4, max_output_tokens=40)
    made.step()
    made.step()
    made.step(PauseSeat(seat))
    made.step()
    live = made.seat(seat)
    assert live.state is SeatState.PAUSED and live.pushable
    assert live.sequence.cache_tokens == 4 + len(made.selected(seat)) - 1
    assert live.holding.pages == pages_for(live.sequence.cache_tokens, PAGE_TOKENS)
    made.cancel(seat)
    made.step()
    made.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_preempted_sequences_go_on_with_drafts(kind: PreemptionKind) -> None:
    made = world(right=0.7, kind=kind, reservation=Reservation.EXPECTED, total_pages=13)
    prompts = {made.open(ids, 25): ids for ids in ((1, 2, 3), (4, 5), (6, 7, 8, 9, 10))}
    made.run(400)
    assert made.preempted and made.scheduler.speculation.counts.accepted_tokens
    for seat, ids in prompts.items():
        made.said(seat, ids)
        assert len(made.selected(seat)) == 25
    made.assert_empty()


def test_drafts_take_what_rows_and_prompts_leave_of_the_budget() -> None:
    made = world(step=StepLimits(tokens=10, sequences=3, prompts=2))
    seats = [made.open((number, 2, 3), 40) for number in (1, 2, 3)]
    for _ in range(4):
        plan = made.step()
        assert plan is not None and plan.scheduled_tokens <= 10
    assert any(len(plan.drafts) > 1 for plan in made.plans)
    made.open(30, 5)
    plan = made.step()
    assert plan is not None and plan.prompt_tokens == 7 and not plan.drafts
    made.run()
    assert all(len(made.selected(seat)) == 40 for seat in seats)
    made.assert_empty()


def test_what_ended_is_forgotten() -> None:
    made = world()
    for number in range(4):
        made.open((number, 2), 6)
        made.run()
    made.open((7, 7), 20)
    made.step()
    assert sorted(made.guesses.forgotten) == [1, 2, 3, 4]


@pytest.mark.slow
def test_poor_drafts_are_given_up_and_tried_again() -> None:
    made = world(right=0.0, stream_bytes=10_000)
    seat = made.open((2, 1), CONTEXT_TOKENS - 3)
    drafted: list[bool] = []
    off = 0
    while made.scheduler.seats.get(seat) is not None:
        plan = made.step()
        drafted.append(plan is not None and bool(plan.drafts))
        off = max(off, made.scheduler.speculation.sequences_off)
    assert off == 1 and made.scheduler.speculation.sequences_off == 0
    assert all(drafted[1:5]) and not any(drafted[20 : 20 + REST_TOKENS // 2]), "it drafts, then gives up"
    assert any(drafted[20 + REST_TOKENS // 2 :]), "it comes back"
    made.said(seat, (2, 1))
    made.assert_empty()


def test_a_record_gives_up_and_comes_back() -> None:
    made = world()
    seat = made.open((1, 2), 60)
    made.step()
    record = Record(made.seat(seat))
    tokens = itertools.count()

    def worth(least: float) -> int:
        record.seat.sequence._output.append(next(tokens) % 26)  # only their number counts
        return record.worth(least, 8)

    assert worth(0.13) == 2
    for _ in range(12):
        record.note(4, wrong=False)
    assert worth(0.13) == 8
    assert worth(1.5) == 0 and record.off, "rows that cost more than a step can bring"
    assert worth(0.13) == 8 and not record.off
    while not record.off:
        record.note(0, wrong=True)
        worth(0.13)
    assert record.accepted > ACCEPTED_LEAST
    waits = 0
    while record.off:
        worth(0.13)
        waits += 1
    assert REST_TOKENS <= waits <= REST_TOKENS + 2
    while not record.off:
        record.note(0, wrong=True)
        worth(0.13)
    waits = 0
    while record.off:
        worth(0.13)
        waits += 1
    assert 2 * REST_TOKENS <= waits <= 2 * REST_TOKENS + 2


@pytest.mark.slow
def test_a_full_batch_drafts_less() -> None:
    """Rows cost a tenth of a step's base: alone all drafts are worth it, among thirty only those that are nearly certain."""
    made = world(0.6, cheap_rows=False, total_pages=400, sequences=32, step=StepLimits(tokens=400, sequences=32))
    for rows in (1, 30, 9, 20) * 20:
        made.scheduler.speculation.cost.add(rows, 0.010 + 0.001 * rows)
    alone = made.open((1, 2), 40)
    made.run()
    drafted_alone = made.scheduler.speculation.counts.drafted_tokens / len(made.selected(alone))
    for number in range(30):
        made.open((number, 3), 40)
    made.run(600)
    everything = made.scheduler.speculation.counts.drafted_tokens / 31 / 40
    assert everything < drafted_alone / 2


def test_settings_are_checked() -> None:
    settings = DecodeSettings(speculation="prompt_lookup", draft_tokens=4, lookup_shortest=3, lookup_longest=3)
    assert settings.scheduler_limits().speculation.kind is SpeculationKind.PROMPT_LOOKUP
    with pytest.raises(ValueError, match="lookup_shortest is 4"):
        DecodeSettings(lookup_shortest=4, lookup_longest=3)
    with pytest.raises(ValueError, match="draft_tokens is 0"):
        replace(SpeculationLimits(), draft_tokens=0)


def test_b56_only_decode_speculates() -> None:
    """Drafts change nothing in the layout of pages: what a prefill member without them computed is taken as it is."""
    made, plain = world(), world(drafts=False)
    assert made.fingerprint == plain.fingerprint
    seat = made.granted_seat(6, 12)
    made.fill(seat, WRITER.incarnation)
    made.run()
    assert made.scheduler.speculation.counts.accepted_tokens
    made.said(seat, (1, 2, 3, 4, 5, 6))
