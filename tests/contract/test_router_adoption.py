"""Requests whose router the store holds to be dead: another one takes over the seat and goes on, and nobody notices twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.states import Event, State
from router.cell import Cell
from router.following import LOST_TERMINAL_NO
from router.keeping import UnansweredCreates, UnwrittenEnds
from router.ledger import KnownRequest, Ledger
from router.redis_link import RedisSettings
from router.redis_store import RedisStore
from router.stop import Stop
from router.store import Orphan
from router.without_store import Outage
from rpc.status import StatusError
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc, grant_pb2
from tandem.v1 import inference_pb2 as pb
from telemetry.registry import MetricsRegistry
from telemetry.router_metrics import RouterMetrics
from tests.fake_member import Gate
from tests.redis_server import Clock, MakeStore, cell, clock, holds, make_store, new_record, pages, ready_to_reap, redis_url
from tests.router_world import Link, World, request, router_world, until

__all__ = ["cell", "clock", "make_store", "redis_url"]

pytestmark = pytest.mark.slow

#: Short, so that a test need not wait for long; over twice the time between two heartbeats.
LEASE_S = 2.5
TEXT = "t0 t1 t2 t3 t4 t5 t6 t7 "


@asynccontextmanager
async def cut_off(redis_url: str, cell: str, **changes: object) -> AsyncIterator[tuple[World, "grpc.aio.Call", list[object]]]:
    """A request that decodes at a router which then loses its store: two deltas were read. The other router lives."""
    async with router_world(redis_url, cell, routers=2, lease_s=LEASE_S) as world:
        world.decode.script.tokens = 8
        gate = world.decode.script.output
        gate.hold()
        call = world.client.stub.Generate(request("r1", **changes))
        seen = [await call.read()]
        for _ in range(2):
            gate.step()
            seen.append(await call.read())
        await until(lambda: stored_state(world), "decoding")
        world.links[0].cut = True
        yield world, call, seen
        world.links[0].cut = False
        gate.release()
        await world.at_rest()


async def stored_state(world: World) -> str:
    return await world.clients[1].state("r1")


async def test_b17_a_router_that_only_lost_its_store_hands_its_readers_over(redis_url: str, cell: str) -> None:
    """The other router adopts the seat, also from a call that still looks open; both clients get every event once, and there
    is one terminal, by the new owner."""
    async with cut_off(redis_url, cell) as (world, call, seen):
        back = asyncio.create_task(world.clients[1].attach("r1", 0))
        await until(lambda: _adopted(world), 1, 15)
        world.links[0].cut = False
        await until(lambda: _readers(world), 2)
        world.decode.script.output.release()
        answer = await back
        assert answer.error is None, answer.error
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        rest = [event async for event in _rest(call)]
        assert [*seen, *rest] == answer.events and await call.code() is grpc.StatusCode.OK
        record = await world.clients[1].get("r1")
        assert record.router.startswith("router-1@") and record.attempt == 1
        assert record.sent_bytes == len(TEXT) and record.usage.returned_tokens == 8
        assert len(world.decode.opens) == 1
        assert (await world.client.get("r1")) == record


async def test_a_router_that_did_not_hear_that_it_owns_a_request_asks_again(redis_url: str, cell: str) -> None:
    """The store has carried the adoption out and its answer was lost: a living router owns the record, so nobody else comes."""
    async with cut_off(redis_url, cell) as (world, call, seen):
        world.links[1].lost.add("adopt")
        await until(lambda: _adopted(world), 1, 15)
        assert not world.links[1].lost
        world.links[0].cut = False
        world.decode.script.output.release()
        rest = [event async for event in _rest(call)]
        assert [event.sequence_no for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
        record = await world.client.get("r1")
        assert (record.state, record.attempt) == (pb.REQUEST_STATE_FINISHED, 1) and record.router.startswith("router-1@")


async def test_a_reaper_adopts_and_a_client_that_does_not_come_back_has_left(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2, lease_s=LEASE_S, attach_grace_s=0.2) as world:
        world.decode.script.output.hold()
        call = world.client.stub.Generate(request("r1"))
        await call.read()
        await until(lambda: stored_state(world), "decoding")
        world.links[0].cut = True
        await until(lambda: _adopted(world), 1, 15)
        await world.clients[1].until_state("r1", "cancelled")
        assert (await world.clients[1].get("r1")).cause == "client_gone"
        world.links[0].cut = False
        world.decode.script.output.release()
        await world.at_rest()


async def test_b09_a_cancel_that_its_dead_router_never_saw_is_carried_out(redis_url: str, cell: str) -> None:
    async with cut_off(redis_url, cell) as (world, _, _):
        said = await world.clients[1].cancel("r1", reason="enough", wait=True)
        assert said.state == pb.REQUEST_STATE_CANCELLED
        record = await world.clients[1].get("r1")
        assert (record.cause, record.cancel_reason) == ("client_cancel", "enough")
        assert record.HasField("cancel_effective_at") and dict(record.released) == {"pages": 2}
        assert world.decode.heard == ["client_cancel"]


async def test_a_seat_that_is_gone_too_ends_the_request(redis_url: str, cell: str) -> None:
    async with cut_off(redis_url, cell) as (world, _, _):
        await world.decode.restart()
        await until(lambda: stored_state(world), "failed", 15)
        answer = await world.clients[1].attach("r1", 3)
        assert answer.error is not None and answer.code is grpc.StatusCode.UNAVAILABLE
        assert [event.completed.cause for event in answer.events] == ["router_lost"]
        assert answer.events[0].sequence_no == 3, "what this client has stands"
        assert not answer.events[0].completed.HasField("usage"), "nobody knows what the lost router counted"
        gone = await world.clients[1].attach("r1", 0)
        assert (gone.events, gone.code) == ([], grpc.StatusCode.OUT_OF_RANGE)
        again = await world.clients[1].generate(request("r1"))
        assert [event.completed.cause for event in again.events] == ["router_lost"]
        assert again.events[0].sequence_no > 8, "no number that its lost router can have given"


async def test_a_router_that_is_lost_while_a_slow_client_reads_takes_nothing_with_it(redis_url: str, cell: str) -> None:
    """Decode has said everything; it keeps that until the request's end stands. Both clients get every event once."""
    room = {"buffer_bytes": 512 * 1024, "replay_bytes": 1024 * 1024}
    async with router_world(redis_url, cell, routers=2, lease_s=LEASE_S, **room) as world:
        world.decode.script.tokens, world.decode.script.text = 100, lambda index: f"{index:03d}" + "x" * 2000
        call = world.client.stub.Generate(request("r1", max_output_tokens=100))
        seen = [await call.read()]
        await until(lambda: stored_state(world), "draining")
        await until(lambda: _heard(world), ["keep_end"])
        world.links[0].cut = True
        await until(lambda: _adopted(world), 1, 15)
        answer = await world.clients[1].attach("r1", 0)
        assert answer.error is None, answer.error
        answer.check_order()
        assert (answer.code, len(answer.events)) == (grpc.StatusCode.OK, 102)
        world.links[0].cut = False
        rest = [event async for event in _rest(call)]
        assert [*seen, *rest] == answer.events and await call.code() is grpc.StatusCode.OK
        record = await world.clients[1].get("r1")
        assert (record.state, record.attempt) == (pb.REQUEST_STATE_FINISHED, 1) and record.router.startswith("router-1@")
        await world.at_rest()


async def test_a_router_that_was_taken_for_dead_tells_the_end_that_others_have_told(redis_url: str, cell: str) -> None:
    """It stands still before the store knows of a seat: its request is ended for dead, and no token is told after that."""
    stuck = ("advance", "assert_live", "finish", "heartbeat")
    async with router_world(redis_url, cell, routers=2, lease_s=LEASE_S) as world:
        world.decode.script.tokens = 8
        world.decode.script.output.hold()
        gates = world.links[0].gates
        gates.update((name, Gate()) for name in stuck)
        gates["advance"].hold()
        running = world.client.begin(request("r1"))
        await gates["advance"].reached_by(1)
        for gate in gates.values():
            gate.hold()
        world.decode.script.output.release()
        await until(lambda: stored_state(world), "failed", 15)
        told = [await client.generate(request("r1"), timeout=5) for client in (world.clients[1], world.client)]
        for gate in gates.values():
            gate.release()
        had_all = await running
        told += [await client.generate(request("r1")) for client in (world.clients[1], world.client)]
        for answer in told:
            assert [event.completed.cause for event in answer.events] == ["router_lost"]
            assert answer.events[0].sequence_no == LOST_TERMINAL_NO, "Started had number 0, perhaps"
        had_all.check_order()
        assert had_all.completed.cause == "router_lost", "who has read there all the time has one end too"
        await world.at_rest()


async def test_who_asks_for_a_request_that_is_just_being_adopted_waits_for_that(redis_url: str, cell: str) -> None:
    """The store goes away while the decode member is asked for the seat: a router that serves without it runs no second one."""
    async with router_world(redis_url, cell, routers=2, lease_s=LEASE_S, redis_outage="serve") as world:
        script = world.decode.script
        script.tokens = 8
        script.output.hold()
        script.adopting.hold()
        first = world.client.stub.Generate(request("r1"))
        seen = [await first.read()]
        await until(lambda: stored_state(world), "decoding")
        world.links[0].cut = True
        await script.adopting.reached_by(1, 15)
        world.links[1].cut = True
        second = world.clients[1].begin(request("r1"))
        script.output.release()
        for _ in range(3):  # by their answers it has come through the door
            assert (await world.clients[1].generate(request("r2", model="none"))).code is grpc.StatusCode.NOT_FOUND
        script.adopting.release()
        answer = await second
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        world.links[0].cut = world.links[1].cut = False
        seen += [event async for event in _rest(first)]
        assert seen[:-1] == answer.events[:-1] and seen[-1].completed.usage == answer.completed.usage
        assert len(world.decode.opens) == 1
        await world.at_rest(15)


async def test_an_adopted_request_survives_its_decode_member_too(redis_url: str, cell: str) -> None:
    """And keeps its adapter, which its new router knows from the seat alone."""
    adapters = {name: {"polite": "aa"} for name in ("decode-0", "decode-1", "prefill-0")}
    async with router_world(redis_url, cell, routers=2, decodes=2, lease_s=LEASE_S, adapters=adapters) as world:
        for decode in world.decodes:
            decode.script.tokens = 8
            decode.script.output.hold()
        call = world.client.stub.Generate(request("r1", on_disconnect=pb.ON_DISCONNECT_DETACH, adapter="polite"))
        await call.read()
        await until(lambda: stored_state(world), "decoding")
        first = next(one for one in world.decodes if one.opens)
        for _ in range(3):
            first.script.output.step()
            await call.read()
        world.links[0].cut = True
        back = asyncio.create_task(world.clients[1].attach("r1", 0))
        await until(lambda: _adopted(world), 1, 15)
        await first.stop()
        for decode in world.decodes:
            decode.script.output.release()
        answer = await back
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        record = await world.clients[1].get("r1")
        assert (record.attempt, record.adapter) == (2, "polite")
        meant = grant_pb2.Adapter(name="polite", identity="aa")
        assert [opening.adapter for decode in world.decodes for opening in decode.opens] == [meant] * 2
        assert world.prefill.requests[-1].adapter == meant
        world.links[0].cut = False


async def test_a_seat_that_a_router_takes_after_it_has_lost_the_record_costs_an_attempt(redis_url: str, cell: str) -> None:
    """A router that took a request over and stood still comes for the seat when another one has the request."""
    async with router_world(redis_url, cell, seat_hold_s=5.0) as world:
        world.decode.script.tokens = 8
        gate = world.decode.script.output
        gate.hold()
        call = world.client.stub.Generate(request("r1"))
        seen = [await call.read()]
        gate.step()
        seen.append(await call.read())
        async with grpc.aio.insecure_channel(world.decode.address) as channel:
            late = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
            key = grant_pb2.AttemptKey(request_id="r1", attempt=1)
            adopt = decode_pb2.Adopt(key=key, incarnation=world.decode.incarnation, next_sequence_no=1)
            await late.write(decode_pb2.DecodeRequest(adopt=adopt))
            assert (await late.read()).HasField("adopted")
            gate.release()
            events = [*seen, *[event async for event in _rest(call)]]
            late.cancel()
        assert [event.sequence_no for event in events] == list(range(len(events)))
        assert "".join(event.delta.text + event.completed.text for event in events) == TEXT
        record = await world.client.get("r1")
        assert (record.state, record.attempt) == (pb.REQUEST_STATE_FINISHED, 2)
        await world.at_rest(15)


@pytest.mark.parametrize("room", [False, True])
async def test_b18_a_request_that_never_got_a_seat_is_begun_anew_by_who_asks_again(
    make_store: MakeStore, clock: Clock, *, room: bool
) -> None:
    """What its dead router held goes back, and the next attempt has a number of its own."""
    here, there = make_store("router-a"), make_store("router-b")
    for request_id, steps in (("created", ()), ("queued", (Event.ACCEPTED,)), ("admitted", (Event.ACCEPTED,))):
        record = new_record(request_id)
        await here.create(record)
        for step in steps:
            record.advance(step, 1001.0)
        await here.advance(record)
        if request_id == "admitted":
            assert (await here.admit(record, holds(pages(5, 10)), 1002.0)).applied
    await here.leave()
    with pytest.raises(KnownRequest):
        await ledger(there, "queued").create()
    await ready_to_reap(there, clock)
    for request_id, attempt in (("created", 1), ("queued", 1), ("admitted", 2)):
        taken = ledger(there, request_id)
        if room:
            assert await taken.begin(holds(pages(2, 10))) is None
        else:
            await taken.create()
        assert taken.created
        assert (taken.record.state, taken.record.attempt) == (State.ADMITTED if room else State.QUEUED, attempt)
        await taken.close()
        with pytest.raises(KnownRequest):
            await ledger(here, request_id).create()
    books = await there.books()
    assert (books.reserved, books.live_requests, books.faults) == ({"pages:member:decode-0": 6} if room else {}, 3, ())


async def test_a_request_that_was_taken_over_unheard_runs_when_it_is_asked_for_again(
    make_store: MakeStore, redis_url: str, cell: str, clock: Clock
) -> None:
    """The store has made this router its owner, and the answer was lost: nobody else would come for it."""
    here = make_store("router-a")
    await here.create(new_record("r1"))
    await here.leave()
    link = Link(RedisSettings(url=redis_url, cell=cell), lambda *_: None)
    there = RedisStore(link.settings, "router-b", link=link, clock=clock)
    await ready_to_reap(there, clock)
    link.lost.add("adopt")
    unanswered = UnansweredCreates(there)
    with pytest.raises(StatusError):
        await ledger(there, "r1", unanswered).create()
    again = ledger(there, "r1", unanswered)
    await again.create()
    assert again.created and again.record.router == "router-b"
    await again.close()
    await there.close()


async def test_an_end_that_an_adopter_wrote_is_not_told_to_readers_who_lack_what_came_before(
    make_store: MakeStore, clock: Clock
) -> None:
    """A router that stood still for long: by the time it looks, the request has been run to its end elsewhere."""
    here, there = make_store("router-a"), make_store("router-b")
    late = ledger(here, "r1")
    await late.create()
    await late.close()
    await here.leave()
    await ready_to_reap(there, clock)
    taken = (await there.adopt(Orphan("r1", "router-a"))).record
    assert taken is not None
    for record in (taken, late.record):
        record.advance(Event.FAIL, 1003.0)
        record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.NO_MEMBER)
    assert (await there.finish(taken)).won
    await late.finish()
    assert late.disowned and late.goes_on


def ledger(store: RedisStore, request_id: str, unanswered: UnansweredCreates | None = None) -> Ledger:
    """Of a router that was asked for this request."""
    adoptions = RouterMetrics(MetricsRegistry("router", "1", "boot")).adoptions
    cell = SimpleNamespace(
        store=store,
        outage=Outage.REFUSE,
        unwritten=UnwrittenEnds(store),
        unanswered=unanswered or UnansweredCreates(store),
        metrics=SimpleNamespace(adoptions=adoptions),
    )
    return Ledger(cast(Cell, cell), new_record(request_id, store.router), Stop())


async def _heard(world: World) -> list[str]:
    return world.decode.heard


async def _readers(world: World) -> int:
    """Of the router that adopts."""
    return (await world.clients[1].books())[0]["readers"]


async def _adopted(world: World) -> int:
    return len(world.decode.adopts) if len(world.decodes) == 1 else sum(len(one.adopts) for one in world.decodes)


async def _rest(call: object) -> AsyncIterator[pb.GenerateResponse]:
    while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        yield event
