"""Routers whose store goes away and comes back empty: refusing, or serving without it (`redis_outage`)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import grpc
import pytest

from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell
from tests.redis_sets import DATA, Server, server
from tests.router_world import Answer, Client, World, request, router_world, until

__all__ = ["cell"]

pytestmark = pytest.mark.slow

FINISHED, CANCELLED = pb.REQUEST_STATE_FINISHED, pb.REQUEST_STATE_CANCELLED


class Outages:
    """A server that a test takes away and brings back, empty, at the same address."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.server: Server = stack.enter_context(server(**DATA))

    def begin(self) -> None:
        self.server.kill()

    def end(self) -> None:
        self.server = self._stack.enter_context(server(**DATA, port=self.server.port))


@asynccontextmanager
async def world_with_outages(cell: str, mode: str, **changes: object) -> AsyncIterator[tuple[World, Outages]]:
    """Two routers; at the end nothing is held anywhere."""
    with ExitStack() as stack:
        outages = Outages(stack)
        async with router_world(outages.server.url, cell, routers=2, redis_outage=mode, **changes) as world:
            yield world, outages
            await world.at_rest(10.0)


async def asked(client: Client, wanted: pb.GenerateRequest) -> tuple[Answer, dict[str, str], dict[str, str]]:
    """A request to its end, with the metadata before and after it."""
    answer, call = Answer(), client.stub.Generate(wanted)
    async for event in call:
        answer.events.append(event)
    before, after = await call.initial_metadata(), await call.trailing_metadata()
    return answer, {key: str(value) for key, value in before}, {key: str(value) for key, value in after}


def counted(world: World, record: str) -> float:
    """Requests of all routers that began without the store, by what became of their record."""
    frames = [router.frame for router in world.routers if router.frame is not None]
    lines = [line.rpartition(" ") for frame in frames for line in frame.metrics.text().splitlines()]
    wanted = f'tandem_router_unrecorded_requests_total{{record="{record}"}}'
    return sum(float(value) for name, _, value in lines if name == wanted)


async def until_seen(client: Client, request_id: str, wanted: str) -> None:
    """Asks for a state until it is the wanted one, also while the store is away."""

    async def state() -> str:
        try:
            found = (await client.get(request_id)).state
        except grpc.aio.AioRpcError:
            return ""
        return pb.RequestState.Name(found).removeprefix("REQUEST_STATE_").lower()

    await until(state, wanted, 10.0)


async def test_without_the_store_new_requests_are_refused_and_running_ones_end(cell: str) -> None:
    async with world_with_outages(cell, "refuse") as (world, outages):
        world.decode.script.output.hold()
        running = world.client.begin(request("runs"))
        await world.client.until_state("runs", "decoding")
        outages.begin()
        refused = await world.client.generate(request("new"))
        assert refused.error is not None
        assert (refused.code, refused.error.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
        world.decode.script.output.release()
        assert (await running).completed.state == FINISHED
        outages.end()
        await until_seen(world.clients[1], "runs", "finished")


@pytest.mark.parametrize("ask", ["get", "attach", "generate"])
async def test_a_store_that_comes_back_empty_lets_no_request_run_twice(cell: str, ask: str) -> None:
    """Who comes back to another router before the store was told what runs has to try again, and gets the same events then."""
    async with world_with_outages(cell, "refuse") as (world, outages):
        world.decode.script.output.hold()
        running = world.client.begin(request("runs"))
        await world.client.until_state("runs", "decoding")
        outages.begin()
        outages.end()
        world.decode.script.output.release()
        other = world.clients[1]

        async def answered() -> bool:
            if ask == "get":
                try:
                    await other.get("runs")
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    return False
                return True
            answer = await (other.attach("runs", 0) if ask == "attach" else other.generate(request("runs")))
            if answer.error is not None:
                assert (answer.code, answer.events) == (grpc.StatusCode.UNAVAILABLE, []), answer.error
                return False
            assert answer.events == (await running).events
            return True

        await until(answered, True, 10.0)
        assert (await running).completed.state == FINISHED
        assert len(world.decode.opens) == 1


async def test_without_the_store_new_requests_are_served_and_say_so(cell: str) -> None:
    async with world_with_outages(cell, "serve") as (world, outages):
        answer, before, after = await asked(world.client, request("before"))
        assert answer.completed.state == FINISHED
        assert "tandem-idempotency" not in before | after
        outages.begin()
        answer, before, after = await asked(world.client, request("during"))
        answer.check_order()
        assert answer.completed.state == FINISHED
        assert (before["tandem-idempotency"], after["tandem-idempotency"]) == ("none", "none")
        outages.end()
        await until_seen(world.clients[1], "during", "finished")
        stored = await world.clients[1].get("during")
        assert [step.state for step in stored.transitions][-1] == FINISHED
        again = await world.client.generate(request("during", text="another body"))
        assert again.code is grpc.StatusCode.ALREADY_EXISTS


async def test_without_the_store_a_router_heeds_the_cancels_that_it_has_accepted(cell: str) -> None:
    async with world_with_outages(cell, "serve") as (world, outages):
        await world.client.cancel("early", reason="not wanted")
        outages.begin()
        answer = await world.client.generate(request("early"))
        answer.check_order()
        assert (answer.completed.state, answer.completed.cause) == (CANCELLED, "client_cancel")
        assert answer.code is grpc.StatusCode.CANCELLED and counted(world, "later") == 1
        outages.end()
        await until_seen(world.clients[1], "early", "cancelled")


@pytest.mark.parametrize("mode", ["refuse", "serve"])
async def test_a_request_whose_end_waits_for_the_store_is_not_run_again(cell: str, mode: str) -> None:
    """Its stream is kept no more, its end is known: a repeated Generate gets that, and the record its second attempt's end."""
    async with world_with_outages(cell, mode, replay_keep_requests=0) as (world, outages):
        world.decode.script.refusals.append(decode_pb2.Refused(reason="no_pages", retryable=True))
        world.decode.script.output.hold()
        running = world.client.begin(request("twice"))
        await world.client.until_state("twice", "decoding")
        outages.server.freeze()
        world.decode.script.output.release()
        first = await running
        again = await world.client.generate(request("twice"))
        assert again.events == first.events[-1:] and again.code is grpc.StatusCode.OK
        other = await world.client.generate(request("twice", text="another body"))
        assert other.code is grpc.StatusCode.ALREADY_EXISTS
        outages.server.thaw()
        await world.clients[1].until_state("twice", "finished", 10.0)
        assert (await world.clients[1].get("twice")).attempt == 2


async def test_one_id_served_by_two_routers_meanwhile_has_one_record_and_two_answers(cell: str) -> None:
    async with world_with_outages(cell, "serve") as (world, outages):
        outages.begin()
        world.decode.script.output.hold()
        running = [client.begin(request("twice")) for client in world.clients]
        for client in world.clients:
            await until_seen(client, "twice", "decoding")
        outages.end()

        async def live() -> int:
            return len(await asyncio.to_thread(outages.server.command, "KEYS", "*request:twice"))

        await until(live, 1, 10.0)
        world.decode.script.output.release()
        answers = await asyncio.gather(*running)
        for answer in answers:
            answer.check_order()
            assert answer.completed.state == FINISHED
        for client in world.clients:
            await client.until_state("twice", "finished", 10.0)
        first, second = [await client.get("twice") for client in world.clients]
        assert first.router == second.router
        assert (counted(world, "later"), counted(world, "never")) == (2, 1)


async def test_an_id_of_before_the_outage_keeps_its_record(cell: str) -> None:
    async with world_with_outages(cell, "serve") as (world, outages):
        first = (await world.client.generate(request("old"))).completed
        stored = await world.client.get("old")
        outages.server.freeze()
        answer, before, _ = await asked(world.clients[1], request("old", text="another body"))
        assert (answer.completed.state, before["tandem-idempotency"]) == (FINISHED, "none")
        outages.server.thaw()
        await until(lambda: held(world), 0, 10.0)
        assert await world.clients[1].get("old") == stored
        assert first.state == FINISHED


async def held(world: World) -> int:
    """Ends that are not written yet."""
    return sum([(await client.books())[0].get("unwritten_ends", 0) for client in world.clients])


async def test_a_request_that_runs_apart_can_be_cancelled(cell: str) -> None:
    async with world_with_outages(cell, "serve") as (world, outages):
        assert (await world.client.generate(request("old"))).completed.state == FINISHED
        outages.server.freeze()
        world.decode.script.output.hold()
        running = world.clients[1].begin(request("old", text="another body"))
        await until_seen(world.clients[1], "old", "decoding")
        outages.server.thaw()

        async def apart() -> bool:
            return (await world.clients[1].cancel("old")).outcome == pb.CANCEL_OUTCOME_ACCEPTED

        await until(apart, True, 10.0)
        world.decode.script.output.release()
        assert (await running).completed.state == CANCELLED


async def test_a_store_that_came_back_empty_is_told_what_it_had_known(cell: str) -> None:
    """Of a request that runs, one that has ended, one that was cancelled elsewhere, and one that was cancelled before it came."""
    async with world_with_outages(cell, "refuse") as (world, outages):
        assert (await world.client.generate(request("done"))).completed.state == FINISHED
        done = await world.client.get("done")
        await world.clients[1].cancel("early")
        world.decode.script.output.hold()
        running = world.client.begin(request("runs"))
        await world.client.until_state("runs", "decoding")
        await until_seen(world.clients[1], "runs", "decoding")
        reserved = outages.server.command("HGETALL", f"{{{cell}}}:reserved")
        outages.begin()
        outages.end()
        await until_seen(world.clients[1], "done", "finished")
        await until_seen(world.clients[1], "runs", "decoding")
        assert await world.clients[1].get("done") == done
        assert outages.server.command("HGETALL", f"{{{cell}}}:reserved") == reserved

        async def buried() -> int:
            return int(await asyncio.to_thread(outages.server.command, "ZCARD", f"{{{cell}}}:tombstones"))

        await until(buried, 1, 10.0)
        assert (await world.client.generate(request("early"))).completed.state == CANCELLED
        await world.clients[1].cancel("runs")
        world.decode.script.output.release()
        assert (await running).completed.state == CANCELLED
