"""What a router keeps of the last while."""

import asyncio
from typing import cast

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.keeping import Keeper, Recent, UnwrittenEnds
from router.store import FinishResult, Store, WriteOutcome, WriteResult


class CountingStore:
    """Notes the state that each write brought."""

    def __init__(self) -> None:
        self.written: list[State] = []
        self.wrote = asyncio.Event()

    async def advance(self, record: RequestRecord) -> WriteResult:
        self.written.append(record.state)
        self.wrote.set()
        return WriteResult(WriteOutcome.APPLIED)


def kept() -> tuple[CountingStore, RequestRecord, Keeper]:
    store = CountingStore()
    record = RequestRecord("request-1", "tenant", "model", "snapshot", "body", 0, "router-0", "", 1.0)
    return store, record, Keeper(store, record, lambda _: None)


async def test_changes_that_follow_one_another_are_one_write_and_it_comes_by_itself() -> None:
    store, record, keeper = kept()
    for event in (Event.ACCEPTED, Event.TICKET, Event.SENT):
        record.advance(event, 1.0)
        keeper.touch()
        await asyncio.sleep(0)
    assert not store.written, "the first token does not wait for this"
    await store.wrote.wait()
    record.advance(Event.COMMITTED, 2.0)
    keeper.touch()
    await keeper.flushed()
    assert store.written == [State.PREFILLING, State.DECODING]
    await keeper.close()


async def test_what_waits_to_be_written_is_left_to_the_end() -> None:
    store, record, keeper = kept()
    record.advance(Event.ACCEPTED, 1.0)
    keeper.touch()
    await keeper.close()
    keeper.touch()
    await keeper.flushed()
    assert not store.written


class SlowStore:
    """Takes ends one by one, each when `taking` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.taking = asyncio.Event()
        self.attempts: list[int] = []

    async def finish(self, record: RequestRecord) -> FinishResult:
        self.asked.set()
        await self.taking.wait()
        self.attempts.append(record.attempt)
        return FinishResult(won=True, outcome=WriteOutcome.APPLIED, record=record)


def ended(attempt: int) -> RequestRecord:
    record = RequestRecord("request-1", "tenant", "model", "snapshot", "body", 0, "router-0", "", 1.0, attempt=attempt)
    record.advance(Event.FAIL, 2.0)
    record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
    return record


async def test_a_later_attempts_end_that_comes_while_another_one_is_written_is_written_too() -> None:
    store = SlowStore()
    ends = UnwrittenEnds(cast(Store, store))
    ends.add(ended(1))
    writing = asyncio.create_task(ends.write())
    await store.asked.wait()
    ends.add(ended(2))
    ends.add(ended(1))
    store.taking.set()
    assert await writing and len(ends) == 0
    assert store.attempts == [1, 2]


def test_recent_things_are_bounded_in_time_and_number() -> None:
    recent: Recent[str] = Recent(keep_s=10.0, most=2)
    recent.add("a", "first", 0.0)
    recent.add("b", "second", 4.0)
    recent.add("a", "first again", 9.0)
    assert recent.values(9.9) == ["first again", "second"]
    assert recent.values(10.0) == ["second"], "being added again is no reason to stay"
    for number in range(5):
        recent.add(str(number), str(number), 11.0)
    assert recent.values(11.0) == ["3", "4"] and len(recent) == 2
