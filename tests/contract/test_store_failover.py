"""Masters that die, freeze or move while requests run: owners write again what was lost, and every request ends once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import pytest
from redis.crc import key_slot

from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.keeping import UnwrittenEnds
from router.redis_link import Keys
from router.redis_store import RedisStore
from router.store import LiveRequest, StoreUnavailable, WriteOutcome, WriteResult
from tests.contract.test_store import finished
from tests.redis_server import Clock, MakeStore, cell, clock, holds, new_record, pages, stores_at, tokens
from tests.redis_sets import DATA, HOST, PASSWORD, ClusterSet, SentinelSet, Server, cluster_set, sentinel_set, server
from tests.waiting import until

__all__ = ["cell", "clock"]

pytestmark = pytest.mark.slow

Answer = TypeVar("Answer")

HELD = holds(pages(5, 10_000), tokens(50, 100_000))
#: Requests of each router.
REQUESTS = 12
#: Most time that a router tries, in seconds.
LONGEST_S = 60.0


@pytest.fixture
def sentinels() -> Iterator[SentinelSet]:
    with sentinel_set() as servers:
        yield servers


@pytest.fixture
def cluster() -> Iterator[ClusterSet]:
    with cluster_set() as servers:
        yield servers


async def answered(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Calls until the store answers, as routers do."""
    last: StoreUnavailable | None = None
    try:
        async with asyncio.timeout(LONGEST_S):
            while True:
                try:
                    return await call()
                except StoreUnavailable as away:
                    last = away
                    await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"no answer within {LONGEST_S:g} s, at last: {last}") from None


async def written(store: RedisStore, record: RequestRecord, call: Callable[[], Awaitable[WriteResult]]) -> None:
    """A write that must hold: a store that forgot the record gets it again first."""

    async def anew() -> object:
        return await store.assert_live([LiveRequest(record, None if record.state is State.QUEUED else HELD)])

    while (await answered(call)).outcome is WriteOutcome.UNKNOWN:
        await answered(anew)


class Harmed:
    """Requests of two routers that are all under way when a harm is done; half of them write all through it."""

    def __init__(self, make_store: MakeStore) -> None:
        self.stores = [make_store("router-a"), make_store("router-b")]
        self.ends = {store.router: UnwrittenEnds(store) for store in self.stores}
        self.begun = 0
        self.over = asyncio.Event()

    async def serve(self, store: RedisStore, number: int) -> RequestRecord:
        record = new_record(f"{store.router}-{number}", store.router)
        await answered(lambda: store.create(record))
        record.advance(Event.ACCEPTED, 1001.0)
        await written(store, record, lambda: store.admit(record, HELD, 1002.0))
        self.begun += 1
        if number % 2:
            await self.over.wait()
        while not self.over.is_set():
            record.sent_bytes += 1
            await written(store, record, lambda: store.advance(record))
        for event in (Event.SENT, Event.COMMITTED):
            record.advance(event, 1003.0)
            await written(store, record, lambda: store.advance(record))
        finished(record)
        result = await answered(lambda: store.finish(record))
        assert (result.won, result.record) == (True, record)
        self.ends[store.router].written(record)
        return record

    async def remind(self, store: RedisStore) -> None:
        """A call that was under way can have been answered by the former master: what it wrote is gone."""

        async def noticed() -> bool:
            await answered(store.heartbeat)  # a thawed one may answer until it is told that it is no master any more
            return store.statistics().forgets == 1

        await until(noticed, LONGEST_S, "noticed")
        self.ends[store.router].doubt()
        assert await self.ends[store.router].write()

    async def run(self, harm: Callable[[], Awaitable[None]]) -> None:
        """Everything has ended once, and nothing is held, afterwards."""
        for store in self.stores:
            await store.heartbeat()
        tasks = [asyncio.create_task(self.serve(store, number)) for store in self.stores for number in range(REQUESTS)]

        async def all_begun() -> bool:
            return self.begun == len(tasks) or any(task.done() for task in tasks)

        await until(all_begun, LONGEST_S, "begun")
        await harm()
        self.over.set()
        records = await asyncio.gather(*tasks)
        for store in self.stores:
            await self.remind(store)
        for record in records:
            assert await self.stores[0].get(record.request_id) == record
            assert (await self.stores[1].request_cancel(record.request_id, "late", 2000.0)).ending == record.ending
        books = await self.stores[0].books()
        assert (books.reserved, books.live_requests, books.faults) == ({}, 0, ())


async def happened(condition: Callable[[], object], what: str) -> None:
    """Waits for something that servers do."""

    async def look() -> object:
        return await asyncio.to_thread(condition)

    await until(look, LONGEST_S, what)


@pytest.mark.parametrize("harm", ["killed", "frozen"])
async def test_requests_live_through_a_failover(sentinels: SentinelSet, cell: str, clock: Clock, harm: str) -> None:
    async def hurt() -> None:
        if harm == "killed":
            sentinels.master.kill()
        else:
            sentinels.master.freeze()
        await happened(sentinels.failed_over, "failed over")
        if harm == "frozen":
            sentinels.master.thaw()  # and takes itself for the master until the Sentinel tells it

    async with stores_at(sentinels.settings(), cell, clock) as make_store:
        await Harmed(make_store).run(hurt)
    assert sentinels.replica.command("KEYS", "*") != []


async def test_a_cancel_reaches_its_owner_after_a_failover(sentinels: SentinelSet, cell: str, clock: Clock) -> None:
    async with stores_at(sentinels.settings(), cell, clock) as make_store:
        await _hint_before_and_after(make_store, lambda: _promote(sentinels))


async def _promote(sentinels: SentinelSet) -> None:
    sentinels.master.kill()
    await happened(sentinels.failed_over, "failed over")


async def _hint_before_and_after(make_store: MakeStore, harm: Callable[[], Awaitable[None]]) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    await here.create(new_record("one"))
    async with aclosing(here.cancel_hints()) as hints:
        for harmed in (False, True):
            if harmed:
                await harm()
                await answered(lambda: here.assert_live([LiveRequest(new_record("one"))]))
            waiting = asyncio.ensure_future(anext(hints))

            async def told(waiting: "asyncio.Future[str]" = waiting) -> bool:
                await answered(lambda: there.request_cancel("one", "reason", 1.0))
                return waiting.done()

            await until(told, LONGEST_S, "told")
            assert await waiting == "one"
    assert await answered(here.heartbeat) == frozenset({"one"})


async def test_a_wrong_password_is_told_as_what_it_is(sentinels: SentinelSet, cell: str, clock: Clock) -> None:
    wrong = [{"sentinel_password": "wrong"}, {"url": sentinels.url.replace("c%3A", "d%3A")}]
    async with stores_at(sentinels.settings(), cell, clock) as make_store:
        for change in wrong:
            health = await make_store(**change).health()
            assert not health.ok and "password" in health.error.lower(), health


async def test_requests_live_through_the_loss_of_a_cluster_node(cluster: ClusterSet, cell: str, clock: Clock) -> None:
    owner = cluster.owner(Keys(cell).reserved)

    async def hurt() -> None:
        cluster.masters[owner].kill()
        await _taken_over(cluster, owner)

    async with stores_at(cluster.settings(), cell, clock) as make_store:
        await Harmed(make_store).run(hurt)
    assert len(await asyncio.to_thread(cluster.replicas[owner].command, "KEYS", "*")) >= 2 * REQUESTS


async def _taken_over(cluster: ClusterSet, owner: int) -> None:
    """Of two masters one cannot vote a replica in, so it is told."""
    replica, other = cluster.replicas[owner], cluster.masters[1 - owner]
    await asyncio.to_thread(replica.command, "CLUSTER", "FAILOVER", "TAKEOVER")
    await happened(lambda: "cluster_state:ok" in other.command("CLUSTER", "INFO"), "whole again")


async def test_requests_live_through_a_move_of_their_slot(cluster: ClusterSet, cell: str, clock: Clock) -> None:
    slot = key_slot(Keys(cell).reserved.encode())
    owner = cluster.owner(Keys(cell).reserved)
    source, target = cluster.masters[owner], cluster.masters[1 - owner]

    def move() -> None:
        ids = {one: one.command("CLUSTER", "MYID") for one in (source, target)}
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            source.command("MIGRATE", HOST, target.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)
        for one in (target, source):
            one.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    async with stores_at(cluster.settings(), cell, clock) as make_store:
        await Harmed(make_store).run(lambda: asyncio.to_thread(move))
    assert len(await asyncio.to_thread(target.command, "KEYS", "*")) >= 2 * REQUESTS


async def test_a_cancel_reaches_its_owner_after_the_loss_of_a_node(cluster: ClusterSet, cell: str, clock: Clock) -> None:
    owner = cluster.owner(Keys(cell).reserved)

    async def hurt() -> None:
        cluster.masters[owner].kill()
        await _taken_over(cluster, owner)

    async with stores_at(cluster.settings(), cell, clock) as make_store:
        await _hint_before_and_after(make_store, hurt)


@asynccontextmanager
async def name_that_moves(target: list[Server]) -> AsyncIterator[int]:
    """A port that leads to the first server of the list, as a DNS name does: open connections stay where they are."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(HOST, target[0].port)
        await asyncio.gather(pipe(reader, back_writer), pipe(back_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(serve, HOST, 0)
    yield listener.sockets[0].getsockname()[1]
    listener.close()


async def test_a_plain_address_that_leads_to_another_master_now_is_followed(cell: str, clock: Clock) -> None:
    with server(**DATA) as old, server(**DATA) as new:
        target = [old]
        async with (
            name_that_moves(target) as port,
            stores_at({"url": f"redis://:se%2Fc%3Ar%40t@{HOST}:{port}"}, cell, clock) as make_store,
        ):
            store = make_store()
            await store.create(new_record("one"))
            old.command("REPLICAOF", HOST, new.port)
            with pytest.raises(StoreUnavailable, match="read only"):
                await store.create(new_record("two"))
            target[0] = new
            await store.create(new_record("three"))
            assert (await store.get("three")) == new_record("three")
            assert new.command("EXISTS", Keys(cell).record("three")) == 1
