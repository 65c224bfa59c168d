"""Keeping records up to date over a real store: outages, answers that were lost, creates that nobody came back for."""

import pytest

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.states import Event, State
from router.keeping import Keeper, UnansweredCreates, UnwrittenEnds
from router.store import CreateOutcome, WriteResult
from tests.redis_server import MakeStore, cell, clock, holds, make_store, new_record, pages, redis_url

__all__ = ["cell", "clock", "make_store", "redis_url"]

pytestmark = pytest.mark.slow


async def test_the_latest_state_is_written_in_the_background(make_store: MakeStore) -> None:
    store, heard = make_store("router-a"), list[WriteResult]()
    record = new_record("r1")
    await store.create(record)
    keeper = Keeper(store, record, heard.append)
    for event in (Event.ACCEPTED, Event.CANCEL):
        record.advance(event, 1001.0)
        keeper.touch()
    await keeper.flushed()
    stored = await store.get("r1")
    assert stored is not None and stored.state is State.CANCEL_REQUESTED and heard[-1].applied
    await keeper.close()


async def test_ends_that_could_not_be_written_are_written_later(make_store: MakeStore) -> None:
    store, ends = make_store("router-a"), UnwrittenEnds(make_store("router-a"), most=2)
    for number in range(3):
        record = new_record(f"r{number}")
        await store.create(record)
        record.advance(Event.FAIL, 1001.0)
        record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
        ends.add(record)
    assert len(ends) == 2 and ends.get("r0") is None and ends.get("r2") is not None
    assert await ends.write() and len(ends) == 0
    states = [(await store.get(f"r{number}")).state for number in range(3)]  # type: ignore[union-attr]
    assert states == [State.CREATED, State.FAILED, State.FAILED]


async def test_of_two_ends_of_one_id_the_later_attempt_is_written(make_store: MakeStore) -> None:
    """The store is away as a request ends and comes again; its second run has fewer attempts behind it than the record has."""
    store, ends = make_store("router-a"), UnwrittenEnds(make_store("router-a"))
    for request_id, attempts in (("earlier last", (2, 1)), ("earlier first", (1, 2))):
        record = new_record(request_id)
        await store.begin(record, holds(pages(2, 10)), 1001.0)
        await store.retry(record, Event.REFUSED, holds(pages(2, 10)), 1002.0)
        for attempt in attempts:
            end = new_record(request_id)
            end.attempt = attempt
            end.advance(Event.FAIL, 1003.0)
            end.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
            ends.add(end)
    assert len(ends) == 2 and await ends.write() and len(ends) == 0
    for request_id in ("earlier last", "earlier first"):
        stored = await store.get(request_id)
        assert stored is not None and (stored.state, stored.attempt) == (State.FAILED, 2)
    assert not (await store.books()).reserved


async def test_a_create_that_nobody_came_back_for_is_ended(make_store: MakeStore) -> None:
    store = make_store("router-a")
    lost = UnansweredCreates(store, keep_s=0.0)
    for request_id in ("left", "again", "gone"):
        lost.add(request_id)
    await store.create(new_record("left"))
    await store.create(new_record("again"))
    lost.taken_over("again")
    await lost.settle()
    assert len(lost) == 0 and await store.get("gone") is None
    left, again = await store.get("left"), await store.get("again")
    assert left is not None and left.state is State.FAILED and left.ending is not None
    assert left.ending.cause is Cause.STORE_LOST
    assert again is not None and again.state is State.CREATED


async def test_what_a_begin_without_an_answer_holds_is_given_back_at_once(make_store: MakeStore) -> None:
    store = make_store("router-a")
    lost = UnansweredCreates(store, keep_s=60.0)
    for request_id in ("left", "again", "late"):
        lost.add(request_id)
    left, again, late = new_record("left"), new_record("again"), new_record("late")
    for record in (left, again):
        assert (await store.begin(record, holds(pages(2, 10)), 1002.0)).created.outcome is CreateOutcome.CREATED
    assert lost.may_have_left(left)
    lost.taken_over("again")
    assert not lost.may_have_left(again), "it runs, or its end is still to be written"
    await lost.settle()
    assert (await store.books()).reserved == {"pages:member:decode-0": 2}
    stored = await store.get("left")
    assert stored is not None and stored.state is State.QUEUED and len(lost) == 2
    await store.begin(late, holds(pages(2, 10)), 1002.0)  # a call that was on its way all the time
    await lost.settle()
    books = await store.books()
    assert books.reserved == {"pages:member:decode-0": 2} and not books.faults


async def test_a_create_is_kept_for_a_client_that_tries_again(make_store: MakeStore) -> None:
    store = make_store("router-a")
    lost = UnansweredCreates(store, keep_s=60.0)
    await store.create(new_record("r1"))
    lost.add("r1")
    await lost.settle()
    assert len(lost) == 1
