"""What ends by itself: requests of routers that died, cancels that met them, and everything that a cell has left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.states import Event, State
from router.cancelling import Canceller
from router.keeping import AcceptedCancels
from router.redis_link import RedisSettings
from router.redis_store import RedisStore
from router.store import CancelOutcome, LiveRequest, WriteOutcome
from tests.contract.test_store import HELD, decoding, finished
from tests.redis_server import cell, new_record, redis_url
from tests.waiting import until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

LEASE_S = 0.3
CANCELLED = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


@pytest_asyncio.fixture
async def stores(redis_url: str, cell: str) -> AsyncIterator[tuple[RedisStore, RedisStore]]:
    """Two routers with short leases by the real clock, and short lives of everything else."""
    settings = RedisSettings(redis_url, cell, lease_s=LEASE_S, live_ttl_s=1, retention_s=1, tombstone_s=1)
    here, there = RedisStore(settings, "router-a"), RedisStore(settings, "router-b")
    yield here, there
    await here.close()
    await there.close()


@asynccontextmanager
async def alive(store: RedisStore) -> AsyncIterator[list[str]]:
    """The router renews its lease and reaps, as upkeep does; the list is of what it has ended."""
    ended: list[str] = []

    async def live() -> None:
        while True:
            await store.heartbeat()
            ended.extend((await store.reap(1020.0)).ended)
            await asyncio.sleep(LEASE_S / 5)

    task = asyncio.create_task(live())
    try:
        yield ended
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_cancel_of_a_request_whose_router_is_dead_is_effective(stores: tuple[RedisStore, RedisStore]) -> None:
    here, there = stores
    await decoding(here, "one")
    routes = SimpleNamespace(cell=SimpleNamespace(store=there, unwritten={}, cancels=AcceptedCancels(there)), get=lambda _: None)
    async with alive(there):
        answer = await Canceller(routes, 10.0).cancel("one", "enough", wait=True)
    assert (answer.already_ended, answer.state) == (False, State.CANCELLED)
    record = await there.get("one")
    assert record is not None
    assert (record.state, record.ending, record.cancel_reason) == (State.CANCELLED, CANCELLED, "enough")
    assert record.cancel_effective_at == 1020.0
    books = await there.books()
    assert (books.reserved, books.live_requests, books.faults) == ({}, 0, ())


async def test_a_router_that_stood_still_comes_back_to_one_end(stores: tuple[RedisStore, RedisStore]) -> None:
    """It was about to finish; meanwhile its lease ran out and another router ended the request as cancelled."""
    here, there = stores
    record = await decoding(here, "one")
    await here.heartbeat()
    async with alive(there) as ended:
        await there.request_cancel("one", "enough", 1006.0)

        async def over() -> bool:
            return ended == ["one"]

        await until(over, 10.0, "ended")
        assert (await here.advance(record)).outcome is WriteOutcome.ENDED
        assert (await here.assert_live([LiveRequest(record, HELD)]))["one"].outcome is WriteOutcome.ENDED
        lost = await here.finish(finished(record))
        assert (lost.won, lost.record and lost.record.ending) == (False, CANCELLED)
        assert await here.heartbeat() == frozenset()
        assert here.statistics().lease_lapses == 1
        assert (await here.request_cancel("one", "again", 1030.0)).outcome is CancelOutcome.ALREADY_ENDED
        assert ended == ["one"]
    books = await there.books()
    assert (books.reserved, books.live_requests, books.faults) == ({}, 0, ())


async def test_a_router_that_comes_back_in_time_ends_its_request_itself(stores: tuple[RedisStore, RedisStore]) -> None:
    here, there = stores
    record = await decoding(here, "one")
    async with alive(there) as ended, alive(here):
        await there.request_cancel("one", "enough", 1006.0)
        await asyncio.sleep(2 * LEASE_S)
        assert (await here.advance(record)).cancel_requested
        for event in (Event.CANCEL, Event.RELEASED):
            record.advance(event, 1007.0)
        record.ending = CANCELLED
        assert (await here.finish(record)).won
        assert await there.wait_ended("one", 1.0) == record
        assert ended == []


async def test_nothing_of_a_cell_stays_for_ever(stores: tuple[RedisStore, RedisStore], redis_url: str, cell: str) -> None:
    """Ended requests, abandoned ones, cancels, tombstones, reservations, leases: all of it goes when nobody is left."""
    here, there = stores
    done, flagged = await decoding(here, "done"), await decoding(here, "flagged")
    await here.create(new_record("abandoned"))
    for number in range(20):
        await there.request_cancel(f"never-{number}", "reason", 1.0)
    await there.request_cancel("flagged", "reason", 1.0)
    await here.heartbeat("127.0.0.1:1")
    await there.heartbeat("127.0.0.1:2")
    assert (await here.finish(finished(done))).won
    assert flagged.state is State.DECODING
    async with Redis.from_url(redis_url, decode_responses=True) as server:
        assert len(await server.keys(f"{{{cell}}}:*")) >= 8

        async def nothing() -> bool:
            return await server.keys(f"{{{cell}}}:*") == []

        await until(nothing, 10.0, "nothing left")


async def test_books_are_right_while_everything_runs_out(stores: tuple[RedisStore, RedisStore]) -> None:
    """A router that lives on, and writes nothing: its requests' records go, and with them what they held."""
    here, there = stores
    await decoding(there, "forgotten")
    async with alive(there):

        async def empty() -> bool:
            books = await there.books()
            return (books.reserved, books.live_requests, books.tombstones, books.faults) == ({}, 0, 0, ())

        await until(empty, 10.0, "empty")
    assert await here.get("forgotten") is None
