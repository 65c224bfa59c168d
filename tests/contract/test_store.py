"""What every request store must do, on a real server."""

import asyncio

import pytest

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, IllegalTransition, State
from lifecycle.usage import Timings, Usage
from router.store import AdoptOutcome, CancelOutcome, CreateOutcome, LiveRequest, Orphan, Owner, WriteOutcome
from tests.redis_server import (
    Clock,
    MakeStore,
    cell,
    clock,
    holds,
    make_store,
    new_record,
    pages,
    ready_to_reap,
    redis_url,
    tokens,
)

__all__ = ["cell", "clock", "make_store", "redis_url"]

HELD = holds(pages(5, 10), tokens(50, 100))


def advance(record: RequestRecord, *events: Event, at: float = 1001.25) -> None:
    for number, event in enumerate(events):
        record.advance(event, at + number)


def finished(record: RequestRecord) -> RequestRecord:
    advance(record, Event.STOPPED, Event.DELIVERED, at=1010.0)
    record.ending = Ending(FinishReason.STOP_SEQUENCE, Cause.NONE, matched_stop="Ü\n")
    record.usage = Usage(prompt_tokens=7, cached_prompt_tokens=0, selected_tokens=5, processed_tokens=11, returned_tokens=4)
    record.timings = Timings(queue_s=0.1, decode_s=1 / 3, cancel_observed_s=None)
    record.sent_bytes, record.held_bytes = 99, 3
    record.released = {"pages": 5, "seats": 1}
    return record


async def decoding(store, request_id: str) -> RequestRecord:
    record = new_record(request_id, store.router)
    assert (await store.create(record)).outcome is CreateOutcome.CREATED
    advance(record, Event.ACCEPTED)
    assert (await store.admit(record, HELD, 1002.0)).applied
    advance(record, Event.SENT, Event.COMMITTED, at=1003.0)
    assert (await store.advance(record)).applied
    return record


async def test_a_record_comes_back_as_it_was_written(make_store: MakeStore) -> None:
    store = make_store()
    record = finished(await decoding(store, "one"))
    result = await store.finish(record)
    assert result.won
    assert result.record == record
    assert await store.get("one") == record
    assert (await store.books()).reserved == {}


async def test_unknown_ids_have_no_record(make_store: MakeStore) -> None:
    store = make_store()
    assert await store.get("never") is None
    assert await store.wait_ended("never", 0.0) is None
    assert (await store.advance(new_record("never"))).outcome is WriteOutcome.UNKNOWN


async def test_b18_same_id_same_body_is_the_same_request(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    first = new_record("twice", "router-a")
    assert (await here.create(first)).outcome is CreateOutcome.CREATED
    again = await there.create(new_record("twice", "router-b", at=2000.0))
    assert (again.outcome, again.record) == (CreateOutcome.EXISTING, first)
    other = await there.create(new_record("twice", "router-b", fingerprint="other body"))
    assert (other.outcome, other.record) == (CreateOutcome.CONFLICT, first)
    assert await here.get("twice") == first


async def test_b18_concurrent_creates_run_once(make_store: MakeStore) -> None:
    stores = [make_store(f"router-{number}") for number in range(4)]
    for number in range(5):
        results = await asyncio.gather(
            *(store.create(new_record(f"race-{number}", store.router)) for store in stores for _ in range(4))
        )
        outcomes = [result.outcome for result in results]
        assert outcomes.count(CreateOutcome.CREATED) == 1
        assert outcomes.count(CreateOutcome.EXISTING) == len(outcomes) - 1
    assert (await stores[0].books()).live_requests == 5


async def test_cancel_before_create_leaves_no_work(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    early = await there.request_cancel("early", "first thoughts", 900.0)
    assert (early.outcome, early.state, early.owner) == (CancelOutcome.ACCEPTED, None, "")
    await there.request_cancel("early", "second thoughts", 950.0)
    result = await here.create(new_record("early"))
    assert result.outcome is CreateOutcome.ALREADY_CANCELLED
    record = result.record
    assert [step.state for step in record.transitions] == [State.CREATED, State.CANCEL_REQUESTED, State.CANCELLED]
    assert record.ending == Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
    assert (record.cancel_requested_at, record.cancel_reason) == (900.0, "first thoughts")
    again = await here.create(new_record("early"))
    assert (again.outcome, again.record) == (CreateOutcome.EXISTING, record)
    late = await there.request_cancel("early", "late", 2000.0)
    assert (late.outcome, late.state, late.ending) == (CancelOutcome.ALREADY_ENDED, State.CANCELLED, record.ending)
    books = await here.books()
    assert (books.live_requests, books.tombstones, books.faults) == (0, 0, ())


async def test_cancel_is_flagged_once_and_told_to_the_owner(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    record = await decoding(here, "running")
    for reason, at in (("first", 1005.0), ("second", 1006.0)):
        result = await there.request_cancel("running", reason, at)
        assert (result.outcome, result.state, result.owner) == (CancelOutcome.ACCEPTED, State.DECODING, "router-a")
    assert await here.heartbeat() == frozenset({"running"})
    assert await there.heartbeat() == frozenset()
    written = await here.advance(record)
    assert written.cancel is not None
    assert (record.cancel_requested_at, record.cancel_reason) == (1005.0, "first")
    advance(record, Event.CANCEL, Event.RELEASED, at=1007.0)
    record.ending = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
    assert (await here.finish(record)).won
    assert await here.heartbeat() == frozenset()
    stored = await there.wait_ended("running", 1.0)
    assert stored == record


async def test_a_request_begins_with_its_ticket_or_queued(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    first, second = new_record("first"), new_record("second")
    begun = await here.begin(first, holds(pages(6, 10), tokens(10, 100)), 1002.0)
    assert begun.created.outcome is CreateOutcome.CREATED and begun.ticket is not None and begun.ticket.applied
    assert [step.state for step in first.transitions] == [State.CREATED, State.QUEUED, State.ADMITTED]
    assert await there.get("first") == first
    short = (await here.begin(second, holds(tokens(10, 100), pages(6, 10)), 1002.0)).ticket
    assert short is not None and short.outcome is WriteOutcome.SHORT and short.shortage is not None
    assert (short.shortage.taken, second.state) == (6, State.QUEUED)
    assert await there.get("second") == second
    assert (await here.books()).reserved == {"pages:member:decode-0": 6, "tokens:member:prefill-0": 10}
    again = new_record("first", "router-b")
    told = await there.begin(again, holds(pages(1, 10)), 1003.0)
    assert (told.created.outcome, told.created.record, told.ticket) == (CreateOutcome.EXISTING, first, None)
    assert again.state is State.CREATED
    assert (await here.admit(second, holds(pages(4, 10)), 1003.0)).applied
    assert (await here.books()).faults == ()


async def test_a_cancel_before_the_begin_leaves_no_work(make_store: MakeStore) -> None:
    store = make_store()
    await store.request_cancel("early", "first thoughts", 900.0)
    result = await store.begin(new_record("early"), holds(pages(6, 10)), 1002.0)
    assert (result.created.outcome, result.ticket) == (CreateOutcome.ALREADY_CANCELLED, None)
    assert result.created.record.state is State.CANCELLED and result.created.record.cancel_reason == "first thoughts"
    books = await store.books()
    assert (books.live_requests, books.tombstones, books.reserved, books.faults) == (0, 0, {}, ())


async def test_admission_is_all_or_nothing_and_says_what_is_short(make_store: MakeStore) -> None:
    store = make_store()
    records = [new_record(f"r{number}") for number in range(3)]
    for record in records:
        await store.create(record)
        advance(record, Event.ACCEPTED)
    assert (await store.admit(records[0], holds(pages(6, 10), tokens(10, 100)), 1002.0)).applied
    short = await store.admit(records[1], holds(tokens(10, 100), pages(6, 10)), 1002.0)
    assert short.outcome is WriteOutcome.SHORT
    assert short.shortage is not None
    assert (short.shortage.budget, short.shortage.wanted, short.shortage.taken, short.shortage.limit) == (
        pages(6, 10).budget,
        6,
        6,
        10,
    )
    assert not short.shortage.never_fits
    assert records[1].state is State.QUEUED
    assert (await store.books()).reserved == {pages(6, 10).budget.label: 6, tokens(1, 1).budget.label: 10}
    assert (await store.admit(records[2], holds(pages(4, 10), prefill=""), 1002.0)).applied
    assert records[2].prefill_member == ""
    assert (await store.books()).faults == ()


async def test_budgets_hold_under_concurrent_admissions_of_many_routers(make_store: MakeStore) -> None:
    stores = [make_store(f"router-{number}") for number in range(4)]
    records = []
    for store in stores:
        for number in range(10):
            record = new_record(f"{store.router}-{number}", store.router)
            await store.create(record)
            advance(record, Event.ACCEPTED)
            records.append((store, record))
    results = await asyncio.gather(*(store.admit(record, holds(pages(3, 40)), 1002.0) for store, record in records))
    assert sum(result.applied for result in results) == 40 // 3
    assert {result.outcome for result in results if not result.applied} == {WriteOutcome.SHORT}
    books = await stores[0].books()
    assert (books.reserved, books.faults) == ({pages(3, 40).budget.label: 39}, ())


async def test_prompt_tokens_go_back_at_the_commit_and_pages_at_the_end(make_store: MakeStore) -> None:
    store = make_store()
    record = await decoding(store, "one")
    assert (await store.books()).reserved == {pages(1, 1).budget.label: 5}
    assert (await store.finish(finished(record))).won
    assert (await store.books()).reserved == {}


async def test_refused_by_a_member_is_queued_and_holds_nothing(make_store: MakeStore) -> None:
    store = make_store()
    record = new_record("one")
    await store.create(record)
    advance(record, Event.ACCEPTED)
    await store.admit(record, HELD, 1002.0)
    advance(record, Event.REFUSED, at=1003.0)
    assert (await store.advance(record)).state is State.QUEUED
    assert (await store.books()).reserved == {}
    assert (await store.admit(record, HELD, 1004.0)).applied
    assert record.attempt == 1


async def test_b49_a_retry_is_a_new_attempt_and_the_old_one_holds_nothing(make_store: MakeStore) -> None:
    store = make_store()
    record = await decoding(store, "one")
    elsewhere = holds(pages(4, 10, "decode-1"), tokens(60, 100, "prefill-1"), decode="decode-1", prefill="prefill-1")
    assert (await store.retry(record, Event.DECODE_LOST, elsewhere, 1005.0)).applied
    assert (record.attempt, record.state) == (2, State.ADMITTED)
    assert (record.decode_member, record.prefill_member) == ("decode-1", "prefill-1")
    assert record.transitions[-1].attempt == 2
    assert (await store.books()).reserved == {claim.budget.label: claim.amount for claim in elsewhere.claims}
    assert await store.get("one") == record


@pytest.mark.parametrize("event", [Event.DECODE_LOST, Event.PREFILL_LOST, Event.REFUSED])
@pytest.mark.parametrize("nowhere", [True, False])
async def test_a_retry_without_room_waits_in_the_queue_holding_nothing(
    make_store: MakeStore, event: Event, nowhere: bool
) -> None:
    store = make_store()
    record = new_record("one")
    await store.create(record)
    advance(record, Event.ACCEPTED)
    await store.admit(record, HELD, 1002.0)
    if event is not Event.REFUSED:
        advance(record, Event.SENT, at=1003.0)
    if event is Event.DECODE_LOST:
        advance(record, Event.COMMITTED, at=1004.0)
    result = await store.retry(record, event, None if nowhere else holds(pages(11, 10)), 1005.0)
    assert result.outcome is (WriteOutcome.APPLIED if nowhere else WriteOutcome.SHORT)
    assert (record.state, record.attempt, record.decode_member) == (State.QUEUED, 2, "")
    assert await store.get("one") == record
    assert (await store.books()).reserved == {}
    assert (await store.admit(record, HELD, 1006.0)).applied


async def test_only_the_owner_writes(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    record = await decoding(here, "one")
    stolen = await there.get("one")
    assert stolen is not None
    stolen.router = "router-b"
    assert (await there.advance(stolen)).outcome is WriteOutcome.OTHER_OWNER
    assert (await there.assert_live([LiveRequest(stolen)]))["one"].outcome is WriteOutcome.OTHER_OWNER
    lost = await there.finish(finished(stolen))
    assert (lost.won, lost.outcome, lost.record) == (False, WriteOutcome.OTHER_OWNER, record)
    with pytest.raises(ValueError, match="owned by 'router-a'"):
        await there.advance(record)


async def test_an_older_attempt_changes_nothing(make_store: MakeStore) -> None:
    store = make_store()
    record = await decoding(store, "one")
    old = await store.get("one")
    assert old is not None
    await store.retry(record, Event.DECODE_LOST, HELD, 1005.0)
    assert (await store.advance(old)).outcome is WriteOutcome.OTHER_ATTEMPT
    assert (await store.finish(finished(old))).outcome is WriteOutcome.OTHER_ATTEMPT
    assert await store.get("one") == record


async def test_what_does_not_follow_the_table_is_refused(make_store: MakeStore) -> None:
    store = make_store()
    record = await decoding(store, "one")
    before = await store.get("one")
    record.transitions.pop(2)
    assert (await store.advance(record)).outcome is WriteOutcome.NO_EDGE
    record.state = State.QUEUED
    assert (await store.advance(record)).outcome is WriteOutcome.NO_EDGE
    assert await store.get("one") == before
    queued = new_record("two")
    with pytest.raises(IllegalTransition):
        await store.admit(queued, HELD, 1002.0)
    with pytest.raises(IllegalTransition):
        await store.retry(queued, Event.DECODE_LOST, HELD, 1002.0)
    assert (queued.state, queued.attempt) == (State.CREATED, 1)


async def test_concurrent_ends_have_one_winner(make_store: MakeStore, clock: Clock) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    await ready_to_reap(there, clock)
    for number in range(10):
        record = await decoding(here, f"end-{number}")
        await here.leave()
        result, report = await asyncio.gather(here.finish(finished(record)), there.reap(1020.0))
        stored = await there.get(record.request_id)
        assert stored is not None
        assert result.record == stored
        assert result.won is (report.ended == ()) is (stored.state is State.FINISHED)
        assert (await here.finish(record)).won is result.won
        await here.heartbeat()
    books = await here.books()
    assert (books.reserved, books.live_requests, books.faults) == ({}, 0, ())


async def test_dead_routers_are_reaped_and_their_late_writes_lose(make_store: MakeStore, clock: Clock) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    plain, _ = await decoding(here, "plain"), await decoding(here, "flagged")
    await there.request_cancel("flagged", "enough", 1006.0)
    await ready_to_reap(there, clock)
    assert (await there.reap(1008.0)).ended == ()
    await here.leave()
    report = await there.reap(1009.0)
    assert (sorted(report.ended), report.dead_routers) == (["flagged", "plain"], ("router-a",))
    lost, cancelled = await there.get("plain"), await there.get("flagged")
    assert lost is not None
    assert cancelled is not None
    assert (lost.state, lost.ending) == (State.FAILED, Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST))
    assert (cancelled.state, cancelled.ending) == (State.CANCELLED, Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))
    assert (cancelled.cancel_observed_at, cancelled.cancel_effective_at) == (1009.0, 1009.0)
    assert (await there.books()).reserved == {}
    late = await here.advance(plain)
    assert (late.outcome, late.ending) == (WriteOutcome.ENDED, lost.ending)
    assert (await here.assert_live([LiveRequest(plain, HELD)]))["plain"].outcome is WriteOutcome.ENDED
    second = await here.finish(finished(plain))
    assert (second.won, second.outcome, second.record) == (False, WriteOutcome.ENDED, lost)
    await there.reap(1010.0)
    books = await there.books()
    assert (books.reserved, books.live_requests, set(books.routers), books.faults) == ({}, 0, {"router-b"}, ())


async def test_requests_that_may_have_their_seat_are_spared_and_taken_over_once(make_store: MakeStore, clock: Clock) -> None:
    """The reservations stay with the request, and a router that was only frozen learns that it owns it no more."""
    here, there = make_store("router-a"), make_store("router-b")
    for store in (here, there):
        await store.heartbeat(f"{store.router}.example:1")
    record = await decoding(here, "seated")
    record.decode_incarnation, record.detach_s, record.rpc_bound = "boot-7", 12.5, True
    record.final_only = True
    assert (await here.assert_live([LiveRequest(record, HELD)]))["seated"].applied
    await decoding(here, "no-seat-known")
    await there.request_cancel("seated", "enough", 1006.0)
    orphan = Orphan("seated", "router-a")
    await ready_to_reap(there, clock)
    assert (await there.adopt(orphan)).outcome is AdoptOutcome.ALIVE, "its owner lives"
    assert await there.owner("router-a") == Owner(True, "router-a.example:1")
    await here.leave()
    assert await there.owner("router-a") == Owner(False, "router-a.example:1")
    report = await there.reap(1009.0, spare_seated=True)
    assert (report.ended, report.seated) == (("no-seat-known",), (orphan,))
    assert (await there.adopt(orphan, seatless=True)).outcome is AdoptOutcome.GONE
    taken = await there.adopt(orphan)
    assert taken.outcome is AdoptOutcome.ADOPTED and taken.record is not None and taken.holds is not None
    assert (taken.record.router, taken.record.decode_incarnation, taken.record.detach_s) == ("router-b", "boot-7", 12.5)
    assert taken.record.cancel_requested_at == 1006.0 and taken.record.rpc_bound and taken.holds.placement == HELD.placement
    assert taken.record.final_only
    assert [(claim.budget.label, claim.amount) for claim in taken.holds.claims] == [("pages:member:decode-0", 5)]
    assert await there.adopt(orphan) == taken, "an answer that was lost"
    assert (await make_store("router-c").adopt(orphan)).outcome is AdoptOutcome.UNTIMELY, "it holds no lease of its own"
    await here.heartbeat()
    assert (await here.advance(record)).outcome is WriteOutcome.OTHER_OWNER
    assert (await here.finish(finished(record))).outcome is WriteOutcome.OTHER_OWNER
    assert await there.heartbeat() == {"seated"}, "the flag came along"
    assert (await there.assert_live([LiveRequest(taken.record, taken.holds)]))["seated"].applied
    books = await there.books()
    assert (books.reserved, books.live_requests, books.faults) == ({"pages:member:decode-0": 5}, 1, ())
    assert (await there.finish(finished(taken.record))).won
    assert (await there.adopt(orphan)).outcome is AdoptOutcome.GONE
    assert (await there.books()).reserved == {}
    assert await there.owner("nobody") == Owner(False, "")


async def test_what_the_steps_were_about_is_kept(make_store: MakeStore) -> None:
    store = make_store("router-a")
    record = await decoding(store, "r1")
    await store.retry(record, Event.DECODE_LOST, None, 1009.0, "decode_lost")
    stored = await store.get("r1")
    assert stored is not None and stored == record and stored.terminal_sequence_no is None
    details = {step.event: step.detail for step in stored.transitions if step.event}
    assert details[Event.TICKET] == "decode=decode-0 prefill=prefill-0" and details[Event.DECODE_LOST] == "decode_lost"
    record.advance(Event.FAIL, 1010.0)
    record.ending, record.terminal_sequence_no = Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST), 7
    assert (await store.finish(record)).record == record


async def test_after_an_outage_nobody_ends_the_others_requests(make_store: MakeStore, clock: Clock) -> None:
    """All leases ran out while the store was away; the first router that is back waits until the others can be."""
    here, there = make_store("router-a"), make_store("router-b")
    await decoding(here, "one")
    await ready_to_reap(there, clock)
    for store in (here, there):
        await store.leave()
    assert (await make_store("router-c").reap(1.0)).dead_routers == ()
    clock.now += 60.0
    assert (await there.reap(1.0)).ended == ()
    await there.heartbeat()
    assert (await there.reap(1.0)).ended == ()
    clock.now += there.settings.lease_s
    assert (await there.reap(1.0)).ended == ()
    await here.heartbeat()
    await ready_to_reap(there, clock)
    assert (await there.reap(1.0)).ended == ()
    await here.leave()
    assert (await there.reap(1.0)).ended == ("one",)


async def test_after_an_outage_shorter_than_a_lease_nobody_ends_the_others_requests(make_store: MakeStore, clock: Clock) -> None:
    """One router renewed just before the outage, the others' leases ran out in it."""
    here, there = make_store("router-a"), make_store("router-b")
    await decoding(here, "one")
    await ready_to_reap(there, clock)
    clock.now += 0.6 * there.settings.lease_s
    await here.leave()
    await there.heartbeat()
    assert (await there.reap(1.0)).ended == ()
    clock.now += 0.4 * there.settings.lease_s
    await there.heartbeat()
    assert (await there.reap(1.0)).ended == ()
    await here.heartbeat()
    await ready_to_reap(there, clock)
    assert (await there.reap(1.0)).dead_routers == ()


async def test_a_lease_that_a_create_began_is_no_reason_to_judge_others(make_store: MakeStore) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    await decoding(here, "one")
    await here.leave()
    await there.create(new_record("two", "router-b"))
    await there.heartbeat()
    assert (await there.reap(1.0)).dead_routers == ()


async def test_a_lapsed_lease_is_counted(make_store: MakeStore) -> None:
    store = make_store()
    await store.heartbeat()
    assert store.statistics().lease_lapses == 0
    await store.leave()
    await store.heartbeat()
    assert store.statistics().lease_lapses == 1


async def test_a_router_knows_since_when_its_lease_holds_without_a_gap(make_store: MakeStore, clock: Clock) -> None:
    store = make_store()
    assert store.leased_since is None
    await store.heartbeat()
    since = clock.now
    for _ in range(3):
        clock.now += store.settings.lease_s / 2
        assert store.leased_since == since
        await store.heartbeat()
    clock.now += store.settings.lease_s / 2 + 0.1
    assert store.leased_since is None, "others may have held it to be dead before this one knows"
    await store.heartbeat()
    assert store.leased_since == clock.now
    clock.now += 1.0
    await store.leave()
    await store.heartbeat()
    assert store.leased_since == clock.now, "it had run out by the server's clock"


async def test_transitions_are_bounded_and_the_newest_stay(make_store: MakeStore) -> None:
    store = make_store()
    record = new_record("long")
    await store.create(record)
    advance(record, Event.ACCEPTED)
    for number in range(50):
        assert (await store.admit(record, HELD, 2000.0 + number)).applied
        advance(record, Event.REFUSED, at=2000.5 + number)
        assert (await store.advance(record)).applied
    stored = await store.get("long")
    assert stored is not None
    assert stored.transitions == record.transitions[-64:]
    advance(record, Event.FAIL, at=3000.0)
    record.ending = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.QUEUE_DEADLINE)
    assert (await store.finish(record)).won


async def test_misuse_is_told_before_anything_is_sent(make_store: MakeStore) -> None:
    store = make_store()
    record = new_record("one")
    with pytest.raises(ValueError, match="must not be empty"):
        await store.request_cancel("", "reason", 1.0)
    with pytest.raises(ValueError, match="created with ending None"):
        await store.finish(record)
    advance(record, Event.ACCEPTED)
    with pytest.raises(ValueError, match="not created"):
        await store.create(record)
    with pytest.raises(ValueError, match="name each budget once"):
        await store.admit(record, holds(pages(1, 2), pages(1, 2)), 1.0)
    advance(record, Event.FAIL)
    with pytest.raises(ValueError, match="use finish"):
        await store.advance(record)
