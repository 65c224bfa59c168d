"""Grants in virtual time: offered, filled, taken back, drained, set aside, fenced; never freed by a clock."""

import pytest

from decode_svc.handover import ENDPOINTS_MAX, HandoverLimits
from decode_svc.messages import (
    AskEndpoint,
    DrainAnswer,
    DrainAnswered,
    EndpointMade,
    EndSeat,
    LosePrefill,
    NoticesArrived,
    SeatGranted,
    WriterFenced,
)
from kv_transfer.offer import Peer
from kv_transfer.plan import part_count
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from tests.unit.decode_world import CANCEL, EOS, WRITER, World

HANDOVER_FAILED = Ending(FinishReason.TRANSPORT_ERROR, Cause.HANDOVER_FAILED)


def test_a_grant_is_offered_filled_and_its_first_token_comes_from_the_landing_row() -> None:
    world = World()
    seat = world.open(prompt=9, max_output_tokens=3, prefill=WRITER)
    assert world.errands == [AskEndpoint("writer-1")]
    assert world.events == []
    assert world.scheduler.books()["pages_granted"] == 3
    world.make_endpoint()
    grant = world.grant_of(seat)
    assert (grant.token_count, grant.first_position, len(grant.groups[0].page_ids)) == (9, 0, 3)
    assert world.step() is None
    parts = [(WRITER.incarnation, world.notice(grant, part)) for part in range(part_count(grant))]
    world.tell(NoticesArrived(tuple(parts[1:])))
    assert world.step() is None  # a half-written grant is never decoded
    world.tell(NoticesArrived((parts[0], parts[0])))
    plan = world.step()
    assert plan is not None and plan.batch is None and plan.landing_rows == [grant.landing_row]
    assert world.selected(seat) == [97]
    assert world.scheduler.books()["landing_rows_used"] == 0
    world.run()
    assert world.text(seat) == b"abc"
    end = world.ended(seat)
    assert end is not None and end.report.released == {"landing_rows": 1, "batch_places": 1, "pages": 3}
    world.assert_empty()


def test_the_oldest_grant_is_the_first_that_is_not_filled_yet() -> None:
    """What the age in the metrics is counted from."""
    world = World()
    handovers = world.scheduler.handovers
    assert handovers.oldest_reserved_at is None
    first, begun = world.granted_seat(), world.now
    world.now += 5.0
    world.open(prefill=WRITER)
    assert handovers.oldest_reserved_at == begun
    grant = world.grant_of(first)
    world.tell(NoticesArrived(tuple((WRITER.incarnation, world.notice(grant, part)) for part in range(part_count(grant)))))
    assert handovers.oldest_reserved_at == begun + 5.0


def test_the_endpoint_of_a_writer_is_asked_for_once() -> None:
    world = World()
    first, second = world.granted_seat(), world.open(prefill=WRITER)
    assert world.errands == []
    assert world.grant_of(first).endpoint == world.grant_of(second).endpoint
    other = world.open(prefill=Peer("prefill-1", "writer-2", "127.0.0.1:3"))
    assert world.errands == [AskEndpoint("writer-2")]
    world.tell(EndpointMade("writer-2", None, "no memory"))
    world.step()
    assert world.ending(other) == HANDOVER_FAILED
    world.check()


def test_the_first_token_of_a_handed_over_prompt_may_be_the_end() -> None:
    world = World(model=lambda seat: EOS)
    seat = world.granted_seat()
    world.fill(seat)
    world.run()
    assert world.ready(seat)
    assert world.ending(seat).reason is FinishReason.EOS
    world.assert_empty()


def test_one_output_token_needs_no_page_beyond_the_prompt() -> None:
    world = World(total_pages=3)
    seat = world.granted_seat(prompt=8, max_output_tokens=1)
    world.fill(seat)
    world.run()
    assert world.selected(seat) == [97]
    world.assert_empty()


def test_landing_rows_and_grants_are_bounded() -> None:
    world = World(landing_rows=1)
    first = world.granted_seat()
    second = world.open(prefill=WRITER)
    assert world.refusal(second).reason == "no_landing_row"
    assert "all 1 landing rows" in world.refusal(second).detail
    world.fill(first)
    world.run()
    world.assert_empty()
    few = World(handover=HandoverLimits(grants_max=1))
    few.granted_seat()
    assert few.refusal(few.open(prefill=WRITER)).reason == "no_landing_row"


def test_cancel_before_the_grant_was_told_gives_the_pages_back_at_once() -> None:
    world = World()
    seat = world.open(prefill=WRITER)
    world.cancel(seat)
    world.step()
    assert world.ending(seat) == CANCEL
    assert world.drains() == []
    world.make_endpoint()  # late
    world.assert_empty()


def test_cancel_during_the_handover_asks_the_writer_first_and_costs_a_round_trip() -> None:
    world = World()
    seat = world.granted_seat(prompt=9)
    grant = world.grant_of(seat)
    world.cancel(seat)
    assert world.step() is None
    assert world.ended(seat) is None
    (drain,) = world.drains()
    assert (drain.grant_id, drain.writer, drain.delay_s) == (grant.grant_id, WRITER, 0.0)
    assert world.scheduler.books()["pages_granted"] == 3
    # A write that was on its way still arrives: it changes nothing.
    world.fill(seat)
    assert world.scheduler.books()["pages_granted"] == 3
    world.now += 0.01
    world.tell(DrainAnswered(grant.grant_id, DrainAnswer.STOPPED))
    end = world.ended(seat)
    assert end is not None and end.ending == CANCEL
    assert end.report.released == {"pages": 3, "landing_rows": 1}
    assert end.report.cancel_effective_at == world.now
    world.tell(DrainAnswered(grant.grant_id, DrainAnswer.STOPPED))
    world.assert_empty()


def test_a_prefill_that_is_lost_and_has_stopped_frees_at_once() -> None:
    world = World()
    seat = world.granted_seat()
    world.tell(LosePrefill(seat, Cause.PREFILL_FAILED, drained=True))
    world.step()
    assert world.ending(seat) == Ending(FinishReason.TRANSPORT_ERROR, Cause.PREFILL_FAILED)
    assert world.drains() == []
    world.assert_empty()


def test_a_prefill_that_is_lost_does_not_let_its_router_wait_but_keeps_the_pages() -> None:
    world = World()
    seat = world.granted_seat(prompt=9)
    world.tell(LosePrefill(seat, Cause.PREFILL_LOST, drained=False))
    world.step()
    assert world.ending(seat).cause is Cause.PREFILL_LOST
    books = world.scheduler.books()
    assert (books["seats"], books["grants_open"], books["pages_granted"], books["landing_rows_used"]) == (0, 1, 3, 1)
    (drain,) = world.drains()
    # The same attempt's successor takes other pages meanwhile.
    again = world.granted_seat(prompt=9)
    assert not set(world.grant_of(again).groups[0].page_ids) & set(world.grant_of(seat).groups[0].page_ids)
    world.tell(DrainAnswered(drain.grant_id, DrainAnswer.STOPPED))
    world.fill(again)
    world.run()
    world.assert_empty()


def test_loss_after_the_commit_is_too_late_to_matter() -> None:
    world = World()
    seat = world.granted_seat(max_output_tokens=2)
    world.fill(seat)
    world.tell(LosePrefill(seat, Cause.PREFILL_LOST, drained=False))
    world.run()
    assert world.ending(seat).reason is FinishReason.MAX_OUTPUT_TOKENS
    world.assert_empty()


def test_b06_a_silent_writer_is_asked_again_then_fenced_and_only_then_the_pages_are_free() -> None:
    world = World(handover=HandoverLimits(retry_s=0.25, tries_before_fence=3))
    seat = world.granted_seat(prompt=9)
    grant = world.grant_of(seat)
    world.cancel(seat)
    world.step()
    delays = []
    for _ in range(3):
        (drain,) = world.drains()
        delays.append(drain.delay_s)
        world.tell(DrainAnswered(grant.grant_id, DrainAnswer.SILENT))
        world.check()
        assert world.scheduler.books()["pages_quarantined"] == 3
    assert delays == [0.0, 0.25, 0.5]
    # The request was told after the first silent try, without pages.
    end = world.ended(seat)
    assert end is not None
    assert (end.report.released, end.report.cancel_effective_at) == ({}, None)
    (fence,) = world.fences()
    assert fence.writer == WRITER.incarnation
    # Nothing is offered to a writer that is being cut off, and no clock frees a page.
    assert world.refusal(world.open(prefill=WRITER)).reason == "wrong_incarnation"
    world.now += 10_000
    world.step()
    assert world.scheduler.books()["pages_quarantined"] == 3
    world.tell(WriterFenced(WRITER.incarnation, proven=True))
    world.assert_empty()
    later = world.open(prefill=WRITER)
    assert AskEndpoint(WRITER.incarnation) in world.errands
    world.make_endpoint()
    world.fill(later)
    world.run()
    world.assert_empty()


def test_a_later_answer_ends_the_quarantine_too() -> None:
    world = World()
    seat = world.granted_seat()
    world.cancel(seat)
    world.step()
    grant = world.grant_of(seat)
    world.tell(DrainAnswered(grant.grant_id, DrainAnswer.SILENT))
    assert world.scheduler.books()["pages_quarantined"] == 2
    world.tell(DrainAnswered(grant.grant_id, DrainAnswer.STOPPED))
    world.assert_empty()


def test_a_fence_that_can_not_be_proven_is_asked_for_again() -> None:
    world = World(handover=HandoverLimits(tries_before_fence=1, retry_most_s=10.0))
    seat = world.granted_seat()
    world.cancel(seat)
    world.step()
    world.tell(DrainAnswered(world.grant_of(seat).grant_id, DrainAnswer.SILENT))
    assert len(world.fences()) == 1
    world.tell(WriterFenced(WRITER.incarnation, proven=False))
    assert world.scheduler.books()["pages_quarantined"] == 2
    assert world.scheduler.next_wake() is not None
    world.now += 5
    world.step()
    assert world.fences() == []
    world.now += 6
    world.step()
    assert len(world.fences()) == 1
    world.tell(WriterFenced(WRITER.incarnation, proven=True))
    world.assert_empty()


def test_another_incarnation_at_the_address_means_fence_at_once_and_the_others_of_that_writer_lose_it() -> None:
    world = World()
    first, second = world.granted_seat(), world.granted_seat()
    world.cancel(first)
    world.step()
    world.tell(DrainAnswered(world.grant_of(first).grant_id, DrainAnswer.OTHER_INCARNATION))
    assert len(world.fences()) == 1
    world.tell(WriterFenced(WRITER.incarnation, proven=True))
    assert world.ending(second) == Ending(FinishReason.TRANSPORT_ERROR, Cause.PREFILL_LOST)
    assert world.ending(first) == CANCEL
    world.assert_empty()


def test_b11_a_seat_that_waits_for_its_writer_is_not_looked_after_all_the_time() -> None:
    """Its clock has run out and stays so; the engine thread sleeps until there is something to do."""
    world = World(handover=HandoverLimits(reap_every_s=100.0))
    world.granted_seat(limits=Limits(first_token_s=2.5))
    world.step()
    world.now += 3
    world.step()
    assert len(world.drains()) == 1
    wake = world.scheduler.next_wake()
    assert wake == world.now + 2.0, "the end of its wait for the writer"


def test_b11_a_grant_nobody_fills_is_asked_back_by_the_reaper_without_traffic() -> None:
    world = World(handover=HandoverLimits(expires_s=30.0, start_s=60.0))
    seat = world.granted_seat()
    start = world.now
    while world.ended(seat) is None and world.now < start + 200:
        wake = world.scheduler.next_wake()
        assert wake is not None
        world.now = max(world.now, wake)
        assert world.step() is None
        for drain in world.drains():
            world.tell(DrainAnswered(drain.grant_id, DrainAnswer.STOPPED))
        world.now += 0.001
    # It waits in prefill's queue for start_s, then shows no sign of life for expires_s.
    assert 85 <= world.now - start <= 95
    assert world.ending(seat) == HANDOVER_FAILED
    world.assert_empty()


@pytest.mark.parametrize("wrong", ["token_count", "page_counts", "layout_fingerprint", "parts"])
def test_b01_a_commit_that_does_not_fit_is_refused_and_revoked(wrong: str) -> None:
    world = World()
    seat = world.granted_seat()
    grant = world.grant_of(seat)
    changed = {"token_count": 4, "page_counts": (1,), "layout_fingerprint": "0" * 32, "parts": 99}[wrong]
    world.tell(NoticesArrived(((WRITER.incarnation, world.notice(grant, **{wrong: changed})),)))
    world.step()
    assert world.ending(seat) == HANDOVER_FAILED
    assert len(world.drains()) == 1
    assert world.scheduler.books()["grants_open"] == 1


def test_strange_notices_are_counted_and_dropped() -> None:
    world = World()
    seat = world.granted_seat()
    grant = world.grant_of(seat)
    world.tell(
        NoticesArrived(
            (
                ("writer-9", world.notice(grant)),
                (WRITER.incarnation, b"nonsense"),
                (WRITER.incarnation, world.notice(grant, grant_id="f" * 32)),
            )
        )
    )
    assert world.handovers.book.statistics().unknown == {"wrong_writer": 1, "bad_notice": 1, "unknown_grant": 1}
    assert world.step() is None
    assert world.scheduler.books()["grants_open"] == 1


def test_clocks_run_during_the_handover() -> None:
    world = World()
    seat = world.granted_seat(limits=Limits(first_token_s=2.0))
    world.now += 2.0
    world.step()
    assert world.ended(seat) is None
    world.now += 2.1  # the writer does not answer: the ending does not wait for ever
    world.step()
    assert world.ending(seat).cause is Cause.FIRST_TOKEN_DEADLINE
    assert world.scheduler.books()["pages_granted"] == 2
    world.check()


def test_b22_cancel_between_commit_and_first_token_throws_it_away() -> None:
    world = World()
    seat = world.granted_seat()
    world.fill(seat)
    world.step(EndSeat(seat, CANCEL, world.now))
    assert world.selected(seat) == []
    assert not world.ready(seat)
    end = world.ended(seat)
    assert end is not None and end.report.released == {"landing_rows": 1, "pages": 2}
    world.assert_empty()


def test_b22_cancel_of_a_landed_prompt_at_the_border_frees_its_row() -> None:
    world = World()
    seat = world.granted_seat()
    world.fill(seat)
    world.cancel(seat)
    assert world.step() is None
    assert world.ending(seat) == CANCEL
    world.assert_empty()


def test_granted_and_computed_prompts_share_a_step() -> None:
    world = World()
    running = world.open(prompt=3, max_output_tokens=6)
    world.step()
    granted = world.granted_seat(max_output_tokens=4)
    world.fill(granted)
    computed = world.open(prompt=7, max_output_tokens=4)
    plan = world.step()
    assert plan is not None and plan.batch is not None
    assert [seat.number for seat in plan.draws] == [running, computed, granted]
    assert plan.batch.scheduled_sequences == 2
    world.run()
    assert [len(world.selected(seat)) for seat in (running, granted, computed)] == [6, 4, 4]
    assert [event.grant is None for event in world.events if isinstance(event, SeatGranted)] == [True, False, True]
    world.assert_empty()


def test_the_agent_of_an_incarnation_that_is_gone_is_given_back() -> None:
    world = World()
    seat = world.granted_seat()
    world.fill(seat)
    world.run()
    world.open(prefill=Peer(WRITER.member, "writer-1b", WRITER.address))
    assert [fence.writer for fence in world.fences()] == [WRITER.incarnation]
    world.tell(WriterFenced(WRITER.incarnation, proven=True))
    world.make_endpoint("writer-1b")
    world.check()


def test_at_the_bound_a_writer_without_an_open_grant_makes_room() -> None:
    """The one that was named longest ago has a grant that is being filled: it stays."""
    world = World(total_pages=80, landing_rows=8)
    busy, idle, fresh = Peer("p-busy", "busy", "a:1"), Peer("p-idle", "idle", "a:2"), Peer("p-new", "new", "a:3")
    filling, filled = world.open(prefill=busy), world.open(prefill=idle)
    for peer in (busy, idle):
        world.make_endpoint(peer.incarnation)
    world.fill(filled, idle.incarnation)
    for number in range(ENDPOINTS_MAX - 2):
        world.make_endpoint(f"other-{number}")
    assert world.fences() == []
    world.open(prefill=fresh)
    world.make_endpoint(fresh.incarnation)
    assert [fence.writer for fence in world.fences()] == [idle.incarnation]
    world.fill(filling, busy.incarnation)
    world.run()
    assert len(world.selected(filling)) == 8


def test_a_writer_that_was_cut_off_to_make_room_has_no_grants_and_gets_another_endpoint() -> None:
    """The transfer thread says so without having been asked: what was being filled is lost, what was taken back is free."""
    world = World()
    filling, cancelled = world.granted_seat(), world.granted_seat()
    world.cancel(cancelled)
    world.step()
    assert world.ended(cancelled) is None
    world.tell(WriterFenced(WRITER.incarnation, proven=True))
    assert world.ending(cancelled) == CANCEL and world.ending(filling).cause is Cause.PREFILL_LOST
    world.assert_empty()
    world.errands.clear()
    again = world.open(prefill=WRITER)
    assert world.errands == [AskEndpoint(WRITER.incarnation)], "the former endpoint leads nowhere"
    world.make_endpoint()
    world.fill(again)
    world.run()
    world.assert_empty()
