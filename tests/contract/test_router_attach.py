"""Streams that are taken up again: by Attach, by a second Generate, at this router and at another one, live and after the end."""

import asyncio

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.fake_member import Gate
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

TEXT = "t0 t1 t2 t3 t4 t5 t6 t7 "
DETACH = pb.ON_DISCONNECT_DETACH


def eight(world: World) -> None:
    for decode in world.decodes:
        decode.script.tokens = 8


async def begun(world: World, events: int, **changes: object) -> tuple[object, list[pb.GenerateResponse]]:
    """A request of eight tokens at the first router, whose decode member stands still after `events - 1` of them were read."""
    eight(world)
    gate = world.decode.script.output
    gate.hold()
    call = world.client.stub.Generate(request("r1", **changes))
    found = [await call.read()]
    for _ in range(events - 1):
        gate.step()
        found.append(await call.read())
    return call, found


def joined(*parts: list[pb.GenerateResponse]) -> Answer:
    return Answer([event for part in parts for event in part])


@pytest.mark.parametrize("router", [0, 1])
async def test_a_client_that_comes_back_gets_what_it_had_not_seen(redis_url: str, cell: str, router: int) -> None:
    """Through the same router or another one: nothing twice, nothing missing, and the same status."""
    async with router_world(redis_url, cell, routers=2) as world:
        call, seen = await begun(world, 3, on_disconnect=DETACH)
        call.cancel()
        rest = asyncio.create_task(world.clients[router].attach("r1", 3))
        world.decode.script.output.release()
        answer = await rest
        assert answer.code is grpc.StatusCode.OK
        both = joined(seen, answer.events)
        both.check_order()
        assert both.text == TEXT and len(world.decode.opens) == 1
        assert (await world.client.get("r1")).terminal_sequence_no == both.events[-1].sequence_no == 9
        await world.at_rest()


@pytest.mark.parametrize("router", [0, 1])
async def test_two_connections_read_the_same_request(redis_url: str, cell: str, router: int) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, seen = await begun(world, 2)
        second = asyncio.create_task(world.clients[router].attach("r1", 0))
        await until(lambda: readers(world), 2)
        call.cancel()
        await until(lambda: readers(world), 1)
        world.decode.script.output.release()
        answer = await second
        answer.check_order()
        assert answer.text == TEXT and answer.code is grpc.StatusCode.OK, "the one that is left counts"
        assert answer.events[:2] == seen
        await world.at_rest()


async def test_b09_the_last_reader_that_leaves_cancels_wherever_it_was_connected(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, _ = await begun(world, 2)
        second = asyncio.create_task(world.clients[1].attach("r1", 0))
        await until(lambda: readers(world), 2)
        call.cancel()
        await until(lambda: readers(world), 1)
        second.cancel()
        await world.client.until_state("r1", "cancelled")
        assert (await world.client.get("r1")).cause == "client_gone"
        world.decode.script.output.release()
        await world.at_rest()


@pytest.mark.parametrize("router", [0, 1])
async def test_b18_duplicates_run_once_and_all_get_the_whole_answer(redis_url: str, cell: str, router: int) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        eight(world)
        clients = [world.clients[number % (router + 1)] for number in range(8)]
        answers = await asyncio.gather(*(client.generate(request("r1")) for client in clients))
        for answer in answers:
            answer.check_order()
            assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        assert len(world.decode.opens) == 1
        again = await world.clients[router].generate(request("r1"))
        assert again.events == answers[0].events, "one after the other"
        assert len(world.decode.opens) == 1
        await world.at_rest()


async def test_b18_a_duplicate_joins_a_request_that_waits(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        world.decode.script.grant.hold()
        first = world.client.begin(request("r1"))
        await world.client.until_state("r1", "admitted")
        others = [client.begin(request("r1")) for client in world.clients]
        await until(lambda: readers(world), 3)
        world.decode.script.grant.release()
        texts = {answer.text for answer in await asyncio.gather(first, *others)}
        assert texts == {"t0 t1 t2 "} and len(world.decode.opens) == 1
        await world.at_rest()


async def test_a_detached_request_runs_to_its_end_without_anybody(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, seen = await begun(world, 2, on_disconnect=DETACH)
        call.cancel()
        world.decode.script.output.release()
        await world.client.until_state("r1", "finished")
        await world.at_rest()
        for client in world.clients:
            answer = await client.attach("r1", 2)
            both = joined(seen, answer.events)
            both.check_order()
            assert (both.text, answer.code) == (TEXT, grpc.StatusCode.OK)
            assert answer.completed.state == pb.REQUEST_STATE_FINISHED


async def test_a_detached_request_outlives_the_deadline_of_its_call(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.commit.hold()
        answer = await world.client.generate(request("r1", on_disconnect=DETACH), timeout=0.3)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await world.client.state("r1") == "prefilling"
        world.decode.script.commit.release()
        assert (await world.client.attach("r1", 1)).code is grpc.StatusCode.OK
        await world.at_rest()


async def test_a_detached_request_has_its_time(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        wanted = pb.GenerateRequest(on_disconnect=DETACH)
        wanted.detach_timeout.FromMilliseconds(50)
        call, _ = await begun(world, 2, on_disconnect=DETACH, detach_timeout=wanted.detach_timeout)
        call.cancel()
        await world.client.until_state("r1", "cancelled")
        record = await world.client.get("r1")
        assert (record.cause, record.finish_reason) == ("detach_timeout", pb.FINISH_REASON_CANCELLED)
        world.decode.script.output.release()
        await world.at_rest()


@pytest.mark.parametrize("router", [0, 1])
async def test_a_failure_is_told_again_as_it_was(redis_url: str, cell: str, router: int) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, _ = await begun(world, 2)
        await world.client.cancel("r1", wait=True)
        first = Answer([event async for event in _rest(call)])
        assert await call.code() is grpc.StatusCode.CANCELLED
        again = await world.clients[router].attach("r1", 2)
        assert again.events == first.events and again.error is not None
        assert (again.code, again.error.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_CANCEL")
        world.decode.script.output.release()
        await world.at_rest()


async def test_what_is_not_kept_is_never_told_as_if_it_were_all(redis_url: str, cell: str) -> None:
    """Attach says that the events are gone; a repeated Generate gets the stored end under its own number."""
    async with router_world(redis_url, cell, routers=2, replay_keep_requests=0) as world:
        whole = await world.client.generate(request("r1"))
        for client in world.clients:
            again = await client.generate(request("r1"))
            assert again.events == whole.events[-1:] and again.code is grpc.StatusCode.OK
            for number in (0, 3):
                gone = await client.attach("r1", number)
                assert (gone.events, gone.code) == ([], grpc.StatusCode.OUT_OF_RANGE) and gone.error is not None
                assert (gone.error.reason, gone.error.metadata["firstSequenceNo"]) == ("REPLAY_GONE", "4")
            assert (await client.attach("r1", 4)).events == whole.events[-1:]
            nothing = await client.attach("r1", 5)
            assert (nothing.events, nothing.code) == ([], grpc.StatusCode.OK)
            beyond = await client.attach("r1", 6)
            assert beyond.code is grpc.StatusCode.INVALID_ARGUMENT and beyond.error is not None
            assert beyond.error.violations[0].field == "next_sequence_no" and "at most 5" in beyond.error.message
        assert len(world.decode.opens) == 1


async def test_a_text_that_was_in_the_end_is_not_told_without_it(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, replay_keep_requests=0) as world:
        wanted = request("r1", output_mode=pb.OUTPUT_MODE_FINAL_ONLY)
        assert (await world.client.generate(wanted)).completed.text
        for answer in (await world.client.generate(wanted), await world.client.attach("r1", 1)):
            assert (answer.events, answer.code) == ([], grpc.StatusCode.OUT_OF_RANGE)
        assert len(world.decode.opens) == 1


async def test_events_that_are_sent_and_dropped_are_gone(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, buffer_bytes=1024, replay_bytes=2048) as world:
        world.decode.script.tokens, world.decode.script.text = 8, lambda index: f"{index}" + "x" * 600
        whole = await world.client.generate(request("r1"))
        gone = await world.client.attach("r1", 1)
        assert gone.code is grpc.StatusCode.OUT_OF_RANGE and gone.error is not None
        first = int(gone.error.metadata["firstSequenceNo"])
        assert first > 1 and (await world.client.attach("r1", first)).events == whole.events[first:]


async def test_beyond_the_next_event_there_is_nothing_to_attach_to(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, _ = await begun(world, 3)
        for client in world.clients:
            beyond = await client.attach("r1", 4)
            assert beyond.code is grpc.StatusCode.INVALID_ARGUMENT and beyond.error is not None
            assert "at most 3" in beyond.error.message
        world.decode.script.output.release()
        assert len([event async for event in _rest(call)]) == 7
        await world.at_rest()


async def test_where_a_repeat_just_begins_nobody_is_told_that_his_events_are_still_to_come(redis_url: str, cell: str) -> None:
    """Whether the request runs here or elsewhere is not known before the store has said so."""
    async with router_world(redis_url, cell, routers=2) as world:
        call, seen = await begun(world, 3)
        gate = world.links[1].gates["begin"] = Gate()
        gate.hold()
        again = world.clients[1].begin(request("r1"))
        await until(lambda: _reached(gate), 1)
        rest = asyncio.create_task(world.clients[1].attach("r1", 3))
        await world.clients[1].get("r1")  # a call that came after it has been answered
        gate.release()
        world.decode.script.output.release()
        answer = await rest
        assert (answer.code, joined(seen, answer.events).text) == (grpc.StatusCode.OK, TEXT)
        assert len([event async for event in _rest(call)]) == 7
        assert (await again).text == TEXT and len(world.decode.opens) == 1
        await world.at_rest()


async def test_readers_are_bounded(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, attach_readers=2) as world:
        call, _ = await begun(world, 1)
        second = asyncio.create_task(world.client.attach("r1", 0))
        await until(lambda: readers(world), 2)
        full = await world.client.attach("r1", 0)
        assert full.code is grpc.StatusCode.RESOURCE_EXHAUSTED and full.error is not None
        assert (full.error.reason, full.error.quotas[0].value) == ("TOO_MANY_READERS", 2)
        world.decode.script.output.release()
        assert (await second).text == TEXT
        assert [event async for event in _rest(call)]
        await world.at_rest()


async def test_nobody_attaches_to_what_is_not_there(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2, trust_tenant_header=True) as world:
        unknown = await world.client.attach("r0", 0)
        assert unknown.error is not None and (unknown.code, unknown.error.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "UNKNOWN_REQUEST",
        )
        assert (await world.client.attach("", 0)).code is grpc.StatusCode.INVALID_ARGUMENT
        await world.client.generate(request("r1"), metadata=(("tandem-tenant", "mine"),))
        for client in world.clients:
            theirs = await client.attach("r1", 0, metadata=(("tandem-tenant", "theirs"),))
            assert theirs.code is grpc.StatusCode.NOT_FOUND, "a stream is its tenant's"
            mine = await client.attach("r1", 0, metadata=(("tandem-tenant", "mine"),))
            assert mine.text == "t0 t1 t2 "


async def test_a_call_that_was_passed_on_is_not_passed_on_again(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        call, _ = await begun(world, 1)
        lost = await world.clients[1].attach("r1", 0, metadata=(("tandem-forwarded", "router-0"),))
        assert lost.error is not None and (lost.code, lost.error.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_HERE")
        world.decode.script.output.release()
        assert [event async for event in _rest(call)]
        await world.at_rest()


async def test_b41_a_router_that_stops_lets_go_of_what_it_passes_on(redis_url: str, cell: str) -> None:
    """The request itself runs on at its own router, and the client can take it up there."""
    async with router_world(redis_url, cell, routers=2, drain_timeout_s=0.5) as world:
        call, _ = await begun(world, 2)
        passed_on = asyncio.create_task(world.clients[1].attach("r1", 0))
        await until(lambda: readers(world), 2)
        await world.routers[1].drain()
        answer = await passed_on
        assert answer.error is not None and (answer.code, answer.error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        world.decode.script.output.release()
        rest = await world.client.attach("r1", len(answer.events))
        assert joined(answer.events, rest.events).text == TEXT
        assert [event async for event in _rest(call)]


async def test_b41_what_nobody_reads_outlives_a_router_that_stops(redis_url: str, cell: str) -> None:
    """A request that may go on without a reader is left to another router, seat and all; one that is read ends with a reason."""
    async with router_world(redis_url, cell, routers=2, lease_s=2.5, drain_timeout_s=0.5) as world:
        call, seen = await begun(world, 3, on_disconnect=DETACH)
        read = world.client.begin(request("r2", on_disconnect=DETACH))
        await world.client.until_state("r2", "decoding")
        call.cancel()
        await until(lambda: readers(world), 1)
        await world.routers[0].drain()
        assert (await read).completed.cause == "shutting_down"
        rest = asyncio.create_task(world.clients[1].attach("r1", 3))
        await until(lambda: _adopted(world), ["r1"])
        world.decode.script.output.release()
        answer = await rest
        joined(seen, answer.events).check_order()
        assert joined(seen, answer.events).text == TEXT and answer.code is grpc.StatusCode.OK
        assert [one.key.attempt for one in world.decode.opens if one.key.request_id == "r1"] == [1]


async def test_b41_without_the_store_a_router_that_stops_leaves_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, drain_timeout_s=0.5) as world:
        call, _ = await begun(world, 2, on_disconnect=DETACH)
        call.cancel()
        await until(lambda: readers(world), 0)
        world.links[0].cut = True
        await world.routers[0].drain()
        await until(lambda: _seats(world), 0)


@pytest.mark.parametrize("policy", [pb.SLOW_READER_PAUSE, pb.SLOW_READER_COALESCE, pb.SLOW_READER_FAIL])
async def test_b47_a_slow_reader_gets_what_it_asked_for(redis_url: str, cell: str, policy: int) -> None:
    async with router_world(redis_url, cell, buffer_bytes=1024) as world:
        world.decode.script.tokens, world.decode.script.text = 100, lambda index: f"{index:03d}" + "x" * 2000
        call = world.client.stub.Generate(request("slow", max_output_tokens=100, slow_reader=policy))
        assert (await call.read()).WhichOneof("event") == "started"
        await until(lambda: _paused(world), True)
        assert world.decode.opens[0].slow_reader == policy
        kinds = [event.WhichOneof("event") async for event in _rest(call)]
        assert kinds[-1] == "completed" and kinds.count("completed") == 1
        if policy == pb.SLOW_READER_FAIL:
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and len(kinds) < 101
            record = await world.client.get("slow")
            assert (record.cause, record.finish_reason) == ("slow_consumer", pb.FINISH_REASON_SLOW_CONSUMER)
        else:
            assert await call.code() is grpc.StatusCode.OK and len(kinds) == 101
        await world.at_rest()


async def readers(world: World) -> int:
    return (await world.client.books())[0]["readers"]


async def _adopted(world: World) -> list[str]:
    return [one.key.request_id for one in world.decode.adopts]


async def _seats(world: World) -> int:
    return len(world.decode.seats)


async def _reached(gate: Gate) -> int:
    return gate.reached


async def _rest(call: object):
    try:
        while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            yield event
    except grpc.aio.AioRpcError:
        return


async def _paused(world: World) -> bool:
    before = world.decode.script.output.reached
    await asyncio.sleep(0.1)
    return 1 < before == world.decode.script.output.reached
