"""Messages that cross on the way: what a member has done already goes before what the router believes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

#: For a member to carry out a cancel before its stream is cut, in seconds: short, so that a cut by mistake is seen.
GRACE_S = 0.1


@asynccontextmanager
async def lost_too_late(redis_url: str, cell: str) -> AsyncIterator[tuple[World, "asyncio.Task[Answer]"]]:
    """A request whose prefill member dies after its last write: the router hears of that first, of the commit second."""
    async with router_world(redis_url, cell, cancel_grace_s=GRACE_S) as world:
        world.prefill.script.late_failures.append(grpc.StatusCode.UNAVAILABLE)
        world.decode.script.commit.hold()
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))

        async def heard() -> list[str]:
            return world.decode.heard

        await until(heard, ["prefill_lost"])
        world.decode.script.commit.release()
        await world.client.until_state("r1", "decoding")
        yield world, running
        await world.at_rest()


async def test_b13_a_prefill_lost_after_its_last_write_does_not_cut_the_stream(redis_url: str, cell: str) -> None:
    async with lost_too_late(redis_url, cell) as (world, running):
        await asyncio.wait([running], timeout=3 * GRACE_S)
        assert not running.done(), (await running).error
        world.decode.script.output.release()
        answer = await running
        answer.check_order()
        assert answer.text == "t0 t1 t2 " and answer.completed.state == pb.REQUEST_STATE_FINISHED


async def test_a_router_that_stood_still_does_not_take_its_members_for_lost(redis_url: str, cell: str) -> None:
    """Its timers are due when it wakes up, and what the members said meanwhile is still to be read."""
    async with router_world(redis_url, cell, lost_after_s=0.6) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        time.sleep(0.8)  # noqa: ASYNC251  (the whole process stands still)
        world.decode.script.output.release()
        answer = await running
        assert answer.error is None and answer.completed.state == pb.REQUEST_STATE_FINISHED
        await world.at_rest()


async def test_b17_a_router_that_is_started_again_is_another_router_to_the_store(redis_url: str, cell: str) -> None:
    """Else it would keep the lease of its dead self alive, and nobody would ever reap what that one left."""
    names = set()
    for number in range(2):
        async with router_world(redis_url, cell) as world:
            await world.client.generate(request(f"r{number}"))
            names.add((await world.client.get(f"r{number}")).router)
    assert len(names) == 2 and all(name.startswith("router-0@") for name in names)


async def test_b09_a_cancel_after_a_prefill_that_was_lost_too_late_reaches_the_member(redis_url: str, cell: str) -> None:
    async with lost_too_late(redis_url, cell) as (world, running):
        answer = await world.client.cancel("r1", wait=True)
        assert answer.state == pb.REQUEST_STATE_CANCELLED
        assert world.decode.heard == ["prefill_lost", "client_cancel"]
        ended = await running
        ended.check_order()
        assert ended.completed.finish_reason == pb.FINISH_REASON_CANCELLED
        record = await world.client.get("r1")
        assert record.released["pages"] == 2, "the member has told what it released"
