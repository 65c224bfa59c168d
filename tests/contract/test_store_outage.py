"""What a store does when the server is away, slow, forgetful, or when its caller leaves in the middle of a call."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.states import TABLE, TERMINAL, Event, State
from router.embedded import EmbeddedServer, EmbeddedServerError
from router.redis_link import Keys, RedisLink, RedisSettings
from router.redis_scripts import NAMES, rules, script
from router.redis_store import RedisStore
from router.store import CreateOutcome, LiveRequest, Owner, StoreUnavailable, WriteOutcome
from rpc.clocks import STOOD_STILL_S
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
from tests.waiting import until

__all__ = ["cell", "clock", "make_store", "redis_url"]

HELD = holds(pages(5, 10), tokens(50, 100))

#: Commands that scripts may use: all are in Redis 7.2.
COMMANDS = {
    "DEL", "EXISTS", "EXPIRE", "HDEL", "HGET", "HGETALL", "HINCRBY", "HMGET", "HSET", "HSETNX", "PUBLISH", "SADD", "SREM",
    "TIME", "ZADD", "ZCARD", "ZCOUNT", "ZPOPMIN", "ZRANGE", "ZREM", "ZSCORE",
}  # fmt: skip


@pytest_asyncio.fixture
async def own_server() -> AsyncIterator[tuple[EmbeddedServer, RedisStore]]:
    """A server that the test may harm, and a store on it."""
    with EmbeddedServer() as server:
        settings = RedisSettings(url=server.url, socket_timeout_s=0.1, connect_timeout_s=0.1, operation_timeout_s=0.5)
        store = RedisStore(settings, "router-a")
        yield server, store
        await store.close()


async def admitted(store: RedisStore, request_id: str):
    record = new_record(request_id)
    await store.create(record)
    record.advance(Event.ACCEPTED, 1001.0)
    assert (await store.admit(record, HELD, 1002.0)).applied
    return record


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["stopped", "frozen"])
async def test_an_absent_server_is_told_within_the_limit(own_server: tuple[EmbeddedServer, RedisStore], harm: str) -> None:
    server, store = own_server
    record = await admitted(store, "one")
    if harm == "stopped":
        server.stop()
    else:
        os.killpg(server.process_group, signal.SIGSTOP)
    began = time.monotonic()
    for call in (
        lambda: store.get("one"),
        lambda: store.create(new_record("two")),
        lambda: store.advance(record),
        lambda: store.request_cancel("one", "reason", 1.0),
        store.heartbeat,
        lambda: store.reap(1.0),
        store.books,
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await call()
        assert caught.value.retry_after_s > 0
    health = await store.health()
    assert (health.ok, health.error != "") == (False, True)
    assert time.monotonic() - began < 8 * 1.0
    statistics = store.statistics()
    assert not statistics.available
    assert statistics.operations["get"].errors == 1
    if harm == "frozen":
        os.killpg(server.process_group, signal.SIGCONT)
        assert await store.get("one") == record
        assert store.statistics().available


async def test_a_retry_whose_answer_is_lost_leaves_the_request_queued(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    server, store = own_server
    record = await admitted(store, "one")
    os.killpg(server.process_group, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        await store.retry(record, Event.REFUSED, HELD, 1003.0)
    assert (record.state, record.attempt) == (State.QUEUED, 2)
    os.killpg(server.process_group, signal.SIGCONT)
    assert (await store.advance(record)).applied
    books = await store.books()
    assert (books.reserved, books.faults) == ({}, ())
    assert await store.get("one") == record


async def test_an_admission_whose_answer_is_lost_can_be_given_up(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    server, store = own_server
    first = await admitted(store, "first")
    first.advance(Event.REFUSED, 1002.0)
    await store.advance(first)
    record = new_record("one")
    await store.create(record)
    record.advance(Event.ACCEPTED, 1001.0)
    os.killpg(server.process_group, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        await store.admit(record, HELD, 1002.0)
    os.killpg(server.process_group, signal.SIGCONT)

    async def taken() -> bool:
        return (await store.books()).reserved != {}

    await until(taken, 5.0, "taken")
    record.advance(Event.FAIL, 1003.0)
    record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
    assert (await store.finish(record)).won
    books = await store.books()
    assert (books.reserved, books.live_requests, books.faults) == ({}, 1, ())


@pytest.mark.parametrize("stands_still", [1, 2])
async def test_a_call_of_a_process_that_stood_still_is_made_once_more(make_store: MakeStore, stands_still: int) -> None:
    """Its time is over as it wakes, whatever the server has done. Who stands still in both is told that the server is away."""
    settings = replace(make_store("router-a").settings, operation_timeout_s=0.05)
    link = RedisLink(settings)
    calls = 0

    async def ask() -> int:
        nonlocal calls
        calls += 1
        if calls <= stands_still:
            time.sleep(settings.operation_timeout_s + STOOD_STILL_S)  # noqa: ASYNC251  (nothing else runs meanwhile, either)
            await asyncio.Event().wait()
        return calls

    if stands_still == 1:
        assert await link.call("test", ask) == 2
    else:
        with pytest.raises(StoreUnavailable):
            await link.call("test", ask)
    statistics = link.statistics().operations["test"]
    assert (calls, statistics.calls, statistics.errors) == (2, 1, stands_still - 1)
    await link.close()


async def test_a_server_that_forgot_scripts_gets_them_again(make_store: MakeStore, redis_url: str) -> None:
    store = make_store()
    link = RedisLink(RedisSettings(url=redis_url))
    record = await admitted(store, "one")
    await link.command("test", "SCRIPT FLUSH")
    assert (await store.advance(record)).applied
    await link.close()


@pytest.mark.slow
async def test_a_link_that_is_closed_under_a_call_leaves_no_connection(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    """The library connects again for a call that was broken off; nobody would close that connection."""
    server, store = own_server
    link = RedisLink(RedisSettings(url=server.url, socket_timeout_s=5.0, operation_timeout_s=5.0))
    others = await clients(store)
    await store._link.command("test", "CLIENT", "PAUSE", 60_000, "WRITE")
    written = asyncio.create_task(link.command("test", "SET", "key", "value"))
    await until(lambda: connected(store, others + 1), 5.0, "the call waits at the server")
    await link.close()
    await until(lambda: connected(store, others + 1), 5.0, "the call is made once more")
    await store._link.command("test", "CLIENT", "UNPAUSE")
    assert await written
    await until(lambda: connected(store, others), 5.0, "its connection is closed")
    with pytest.raises(StoreUnavailable, match="closed on this side"):
        await link.command("test", "PING")
    assert await clients(store) == others


async def clients(store: RedisStore) -> int:
    """Connections that the server has."""
    return len(str(await store._link.command("test", "CLIENT", "LIST")).splitlines())


async def connected(store: RedisStore, count: int) -> bool:
    return await clients(store) == count


async def test_a_server_that_lost_its_memory_is_healed_by_the_owners(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    _, store = own_server
    record, ending = await admitted(store, "one"), await admitted(store, "two")
    before = await store.books()
    link = RedisLink(store.settings)
    await link.command("test", "FLUSHALL")
    await link.close()
    assert (await store.advance(record)).outcome is WriteOutcome.UNKNOWN
    assert (await store.assert_live([LiveRequest(record, HELD), LiveRequest(ending, HELD)]))["one"].applied
    await store.heartbeat()
    after = await store.books()
    assert (after.reserved, after.live_requests, after.faults) == (before.reserved, 2, ())
    assert await store.get("one") == record


async def a_lease_later(store: RedisStore, clock: Clock) -> None:
    """The store's router renews its lease all the time."""
    for _ in range(4):
        clock.now += 0.25 * store.settings.lease_s
        await store.heartbeat("here:1")


async def test_a_server_that_lost_its_memory_knows_no_router_for_a_while(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    """A router without a lease may live, from the loss on until all have had the time to take theirs again."""
    _, store = own_server
    clock = Clock()
    here = RedisStore(store.settings, "router-here", clock=clock)
    await here.heartbeat("here:1")
    await store.heartbeat("there:1")
    assert await here.owner("nobody") == Owner(False, "")
    link = RedisLink(store.settings)
    await link.command("test", "FLUSHALL")
    await link.close()
    assert await here.owner(store.router) == Owner(False, "", unsure=True), "its own lease is gone too"
    await here.assert_live([LiveRequest(new_record("one", "router-here"))])
    assert await here.owner(store.router) == Owner(False, "", unsure=True), "a request's lease is no heartbeat"
    await here.heartbeat("here:1")
    assert await here.owner(store.router) == Owner(False, "", unsure=True), "the other one has not come yet"
    await store.heartbeat("there:1")
    assert await here.owner(store.router) == Owner(True, "there:1")
    await a_lease_later(here, clock)
    assert await here.owner("nobody") == Owner(False, ""), "who has not come by now is dead"
    await here.close()


async def test_a_server_that_lost_its_memory_takes_no_new_id_until_it_was_told_what_runs(
    own_server: tuple[EmbeddedServer, RedisStore],
) -> None:
    """A request that runs elsewhere must not be begun a second time here, nor its id be called unknown."""
    settings = replace(own_server[1].settings, lease_s=0.4)
    here, there, new = (RedisStore(settings, f"router-{name}") for name in ("here", "there", "new"))
    for store in (here, there):
        await store.heartbeat(f"{store.router}:1")
    record = new_record("one", there.router)
    await there.create(record)
    await here.check_settled()
    link = RedisLink(settings)
    await link.command("test", "FLUSHALL")
    for call in (
        here.create(new_record("one", here.router)),
        here.begin(new_record("one", here.router), HELD, 1001.0),
        here.check_settled(),
    ):
        with pytest.raises(StoreUnavailable) as away:
            await call
        assert 0 < away.value.retry_after_s <= settings.settle_s
    await there.heartbeat("there:1")
    await there.assert_live([LiveRequest(record)])
    assert (await here.create(new_record("one", here.router))).outcome is CreateOutcome.EXISTING
    await until(lambda: settled(here), 5.0, "every router had the time")
    assert (await here.create(new_record("two", here.router))).outcome is CreateOutcome.CREATED
    await link.command("test", "FLUSHALL")
    await link.close()
    await new.heartbeat("new:1")
    await new.check_settled()  # a new cell, to who knows nothing of it
    await there.heartbeat("there:1")
    assert not await settled(new), "another router had written there"
    for store in (here, there, new):
        await store.close()


async def test_a_clock_that_is_set_back_makes_no_server_forgetful(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    """What the mark has of times is a second ahead then: in a new cell, and where a loss was made good long ago."""
    settings = replace(own_server[1].settings, lease_s=4.0)
    store, link = RedisStore(settings, "router-here"), RedisLink(settings)
    memory = Keys(settings.cell).memory

    async def set_back(by_s: float) -> None:
        at = float(await link.command("test", "HGET", memory, "settled_at"))
        if at:
            await link.command("test", "HSET", memory, "settled_at", at + by_s)

    await store.heartbeat("here:1")
    await set_back(1.0)
    await store.check_settled()
    await link.command("test", "FLUSHALL")
    assert not await settled(store)
    await set_back(-settings.settle_s)
    assert await settled(store), "every router had the time"
    await set_back(settings.settle_s)
    assert await settled(store)
    await link.close()
    await store.close()


async def settled(store: RedisStore) -> bool:
    await store.heartbeat()
    try:
        await store.check_settled()
    except StoreUnavailable:
        return False
    return True


async def test_who_has_told_a_server_that_lost_its_memory_of_its_requests_can_be_taken_for_dead(
    own_server: tuple[EmbeddedServer, RedisStore],
) -> None:
    """It stops before it has renewed its lease: nobody else would look for its requests. If it goes on, it knows of the loss."""
    _, store = own_server
    clock = Clock()
    there = RedisStore(store.settings, "router-there", clock=clock)
    await store.heartbeat("here:1")
    record = await admitted(store, "one")
    link = RedisLink(store.settings)
    await link.command("test", "FLUSHALL")
    await store.assert_live([LiveRequest(record, HELD)])
    await store.heartbeat("here:1")
    assert store.statistics().forgets == 1
    await link.command("test", "FLUSHALL")
    await link.close()
    await store.assert_live([LiveRequest(record, HELD)])
    await store.leave()
    await ready_to_reap(there, clock)
    assert (await there.reap(1.0)).dead_routers == (store.router,)
    await there.close()


async def test_after_an_outage_a_router_without_a_lease_may_live(make_store: MakeStore, clock: Clock) -> None:
    """Nobody could renew meanwhile: from the first missed renewal until all have had the time to take theirs again."""
    here = make_store("router-here")
    await here.heartbeat("here:1")
    assert await here.owner("nobody") == Owner(False, "")
    clock.now += 0.6 * here.settings.lease_s
    assert await here.owner("nobody") == Owner(False, "", unsure=True), "its own lease waits to be renewed too"
    await here.heartbeat("here:1")
    assert await here.owner("nobody") == Owner(False, "", unsure=True), "the other one has not come yet"
    await a_lease_later(here, clock)
    assert await here.owner("nobody") == Owner(False, ""), "who has not come by now is dead"


async def test_a_server_out_of_memory_changes_nothing_half_way(own_server: tuple[EmbeddedServer, RedisStore]) -> None:
    _, store = own_server
    record, waits = await admitted(store, "one"), new_record("two")
    await store.request_cancel("buried", "reason", 1.0)
    await store.create(waits)
    waits.advance(Event.ACCEPTED, 1001.0)
    before = await store.books()
    link = RedisLink(store.settings)
    await link.command("test", "CONFIG SET", "maxmemory", 1)
    done = await store.get("one")
    assert done is not None
    done.advance(Event.FAIL, 1003.0)
    done.ending = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
    record.advance(Event.REFUSED, 1003.0)
    for call in (
        lambda: store.create(new_record("buried")),
        lambda: store.request_cancel("unseen", "reason", 1.0),
        lambda: store.request_cancel("one", "reason", 1.0),
        lambda: store.admit(waits, holds(pages(1, 10)), 1002.0),
        lambda: store.advance(record),
        lambda: store.assert_live([LiveRequest(record, HELD)]),
        lambda: store.finish(done),
        store.heartbeat,
    ):
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await call()
    after = await store.books()
    assert (after.reserved, after.live_requests, after.tombstones, after.faults) == (before.reserved, 2, 1, ())
    await link.command("test", "CONFIG SET", "maxmemory", 0)
    await link.close()
    assert (await store.finish(done)).won
    assert (await store.create(new_record("buried"))).outcome is CreateOutcome.ALREADY_CANCELLED
    assert (await store.books()).reserved == {}


async def test_an_end_that_the_server_knows_nothing_of_is_written(make_store: MakeStore) -> None:
    store = make_store()
    record = new_record("lost")
    record.advance(Event.FAIL, 1001.0)
    record.ending = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
    result = await store.finish(record)
    assert (result.won, result.record) == (True, record)
    assert (await store.books()).live_requests == 0


async def test_callers_that_leave_in_the_middle_mix_up_no_answers(make_store: MakeStore) -> None:
    store = make_store(max_connections=2)
    names = [f"r{number}" for number in range(8)]
    for name in names:
        await store.create(new_record(name))
    for round_number in range(12):
        tasks = [asyncio.create_task(store.get(name)) for name in names]
        for _ in range(round_number):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        for name, task in zip(names, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if not isinstance(task, asyncio.CancelledError):
                assert not isinstance(task, BaseException)
                assert task is not None
                assert task.request_id == name


async def test_a_cancelled_caller_is_cancelled_at_whatever_moment(make_store: MakeStore) -> None:
    """asyncio.wait_for, which the client library writes with, loses cancels."""
    store = make_store()

    async def for_ever() -> None:
        while True:
            await store.heartbeat()

    for number in range(300):
        task = asyncio.create_task(for_ever())
        await asyncio.sleep(number % 30 * 1e-4)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5.0)
        assert done, f"round {number}: the cancel was lost"


async def test_hints_reach_the_owner_and_come_back_after_a_break(make_store: MakeStore, redis_url: str) -> None:
    here, there = make_store("router-a"), make_store("router-b")
    link = RedisLink(RedisSettings(url=redis_url))
    await here.create(new_record("one"))
    async with aclosing(here.cancel_hints()) as hints:
        for _ in range(2):
            waiting = asyncio.ensure_future(anext(hints))

            async def told() -> bool:
                await there.request_cancel("one", "reason", 1.0)
                return waiting.done()  # noqa: B023

            await until(told, 5.0, "told")
            assert await waiting == "one"
            await link.command("test", "CLIENT KILL", "TYPE", "pubsub")
    await link.close()


async def test_every_key_has_the_cells_tag_and_a_time_to_live(make_store: MakeStore, redis_url: str, cell: str) -> None:
    store, other = make_store("router-a"), make_store("router-b")
    await admitted(store, "live")
    done = await admitted(store, "done")
    await other.request_cancel("live", "reason", 1.0)
    await other.request_cancel("unseen", "reason", 1.0)
    await other.heartbeat()
    done.advance(Event.FAIL, 1003.0)
    done.ending = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
    await store.finish(done)
    link = RedisLink(RedisSettings(url=redis_url))
    _, keys = await link.command("test", "SCAN", 0, "MATCH", f"*{cell}*", "COUNT", 10_000)
    lives = {key: await link.command("test", "TTL", key) for key in keys}
    await link.close()
    assert len(lives) >= 8
    assert all(key.startswith(f"{{{cell}}}:") for key in lives)
    assert all(left_s > 0 for left_s in lives.values()), lives
    assert lives[Keys(cell).record("done")] > 3500
    assert lives[Keys(cell).record("live")] <= 900


async def test_tombstones_are_bounded_and_the_oldest_go(make_store: MakeStore) -> None:
    store = make_store(max_tombstones=3)
    for number in range(5):
        await store.request_cancel(f"t{number}", "reason", float(number))
    assert (await store.books()).tombstones == 3
    assert (await store.create(new_record("t0"))).outcome is CreateOutcome.CREATED
    assert (await store.create(new_record("t4"))).outcome is CreateOutcome.ALREADY_CANCELLED


@pytest.mark.slow
async def test_a_tombstone_lives_as_long_as_it_should(make_store: MakeStore) -> None:
    store = make_store(tombstone_s=1)
    await store.request_cancel("gone", "reason", 1.0)

    async def none_left() -> bool:
        return (await store.books()).tombstones == 0

    assert not await none_left()
    await until(none_left, 5.0, "none_left")
    assert (await store.create(new_record("gone"))).outcome is CreateOutcome.CREATED


async def test_reservations_without_a_record_are_swept(make_store: MakeStore, redis_url: str, cell: str) -> None:
    store = make_store()
    await admitted(store, "gone")
    link = RedisLink(RedisSettings(url=redis_url))
    await link.command("test", "DEL", Keys(cell).record("gone"))
    await link.close()
    assert (await store.books()).faults != ()
    assert (await store.reap(1.0)).released == 2
    assert (await store.books()).reserved == {}


def test_the_table_of_the_scripts_is_the_lifecycles() -> None:
    pairs = dict(re.findall(r"(\w+) = \{ ([^}]*) \}", rules().splitlines()[0].removeprefix("local EDGES = {")))
    edges = {(state, event): target for state, row in pairs.items() for event, target in re.findall(r"(\w+) = '(\w+)'", row)}
    assert edges == {(state.value, event.value): target.value for (state, event), target in TABLE.items()}
    assert set(re.findall(r"(\w+) = true", rules())) == {state.value for state in TERMINAL}


def test_scripts_use_commands_of_redis_7_2_only() -> None:
    for name in NAMES:
        assert set(re.findall(r"redis\.call\('(\w+)'", script(name).text)) <= COMMANDS, name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "http://here"}, "scheme 'http'"),
        ({"url": "redis+sentinel://a,b/name"}, "is not one of redis, rediss, unix"),
        ({"url": "redis-sentinel://a:26379,b:26379"}, "redis url: the name of the master is missing"),
        ({"cell": ""}, "redis cell"),
        ({"cell": "a}b"}, "without braces"),
        ({"lease_s": 0}, "lease_s: must be over 0"),
        ({"max_tombstones": 0}, "max_tombstones: must be at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        RedisSettings(**{"url": "redis://localhost", **settings})


def gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


async def test_the_embedded_server_leaves_nothing_behind() -> None:
    with EmbeddedServer() as server:
        group, folder = server.process_group, Path(server.url.removeprefix("unix://")).parent
        assert folder.is_dir()

    async def nothing_left() -> bool:
        return gone(group)

    assert not folder.exists()
    await until(nothing_left, 5.0, "nothing_left")
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url


def test_an_embedded_server_that_can_not_start_says_why() -> None:
    with pytest.raises(EmbeddedServerError, match="exit code") as caught:
        EmbeddedServer(memory_mib=-1).start()
    assert "maxmemory" in str(caught.value)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that runs an embedded server and tells where."""
    code = (
        "import sys; from router.embedded import EmbeddedServer\n"
        "with EmbeddedServer() as server: print(server.process_group, server.url, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
async def test_the_embedded_server_ends_when_its_owner_is_killed(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    group, url = (await asyncio.to_thread(owner.stdout.readline)).split()
    folder = Path(url.removeprefix("unix://")).parent
    assert folder.is_dir()
    owner.kill()

    async def nothing_left() -> bool:
        return gone(int(group)) and not folder.exists()

    await until(nothing_left, 5.0, "nothing_left")
