"""CellService: views of the cell, through real routers with fake members."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from router.cell_watch import MAX_WATCHERS
from rpc.status import details_from
from tandem.pools.v1 import member_pb2
from tandem.v1 import cell_pb2 as pb
from tandem.v1 import cell_pb2_grpc, inference_pb2
from tests.fake_member import Gate
from tests.redis_server import cell, redis_url
from tests.router_world import Client, World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

#: As often as a watcher may look.
FAST = 200_000_000


def watch(client: Client, **fields: object) -> "grpc.aio.UnaryStreamCall":
    asked = pb.WatchRequest(**fields)
    if not asked.HasField("period"):
        asked.period.FromNanoseconds(FAST)
    return cell_pb2_grpc.CellServiceStub(client.channel).Watch(asked)


async def seen(client: Client, wanted: Callable[[pb.CellView], bool], timeout_s: float = 20.0) -> pb.CellView:
    """The first view that is as wanted."""
    call = watch(client)
    try:
        async with asyncio.timeout(timeout_s):
            async for answer in call:
                if wanted(answer.view):
                    return answer.view
    finally:
        call.cancel()
    raise AssertionError("the watch ended")


async def refused(call: "grpc.aio.UnaryStreamCall") -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while await call.read() is not grpc.aio.EOF:
            pass
    return error.value


@asynccontextmanager
async def decoding(world: World, request_id: str) -> AsyncIterator[None]:
    """A request that makes tokens inside."""
    world.decode.script.output.hold()
    running = world.client.begin(request(request_id))
    await world.client.until_state(request_id, "decoding")
    yield
    world.decode.script.output.release()
    assert (await running).code is grpc.StatusCode.OK


async def test_a_view_has_members_requests_budgets_and_ends(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        pages = member_pb2.PagesByState(free=990, owned=7, cached=2, quarantined=1)
        load = member_pb2.MemberLoad(free_pages=990, running_sequences=1, paused_sequences=1, steps=10, tokens=10, pages=pages)
        world.decode.load.CopyFrom(load)
        world.decode.tell()
        # The prompt's tokens come back a moment after its pages are taken.
        held = {"prefill-0": 0, "decode-0": 1}
        async with decoding(world, "r1"):
            one = await seen(
                world.client,
                lambda view: (
                    view.pools[1].members[0].pages.owned == 7
                    and len(view.routers) == 2
                    and {budget.name: budget.used for budget in view.budgets} == held
                ),
            )
            prefill, decode = one.pools
            assert (prefill.role, prefill.members[0].name, decode.role, decode.members[0].name) == (
                *("prefill", "prefill-0", "decode", "decode-0"),
            )
            member = decode.members[0]
            assert (member.state, member.pages.quarantined, member.paused_sequences) == (pb.MEMBER_STATE_READY, 1, 1)
            assert (member.address, member.incarnation) == (world.decode.address, world.decode.incarnation)
            (running,) = one.requests
            assert (running.request_id, running.tenant, running.attempt, running.readers) == ("r1", "default", 1, 1)
            assert (running.state, running.stage) == (inference_pb2.REQUEST_STATE_DECODING, pb.REQUEST_STAGE_DECODE)
            assert (running.prefill_member, running.decode_member) == ("prefill-0", "decode-0")
            assert running.prompt_tokens == running.computed_prompt_tokens == 5 and running.age_s > 0
            assert [(router.tells, router.address != "") for router in one.routers].count((True, True)) == 1
            assert {budget.name: budget.resource for budget in one.budgets}["decode-0"] == "pages"
            other = await seen(world.clients[1], lambda view: {budget.name: budget.used for budget in view.budgets} == held)
            assert not other.requests and other.running_requests == 0, "each router tells its own requests"
        after = await seen(world.client, lambda view: bool(view.ended))
        assert not after.requests and after.ended_requests == 1
        (ended,) = after.ended
        assert (ended.request_id, ended.state) == ("r1", inference_pb2.REQUEST_STATE_FINISHED)
        assert ended.finish_reason == inference_pb2.FINISH_REASON_MAX_OUTPUT_TOKENS
        assert ended.timings.total_s > 0 and ended.usage.returned_tokens == 3
        await world.at_rest()


async def test_what_waits_and_what_is_cut(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, total_pages=1) as world:
        async with decoding(world, "r0"):
            waiting = [world.client.begin(request(f"w{number}", priority=number)) for number in range(3)]
            view = await seen(world.client, lambda view: view.queue.requests == 3)
            assert [(lane.priority, lane.requests) for lane in view.queue.lanes] == [(2, 1), (1, 1), (0, 1)]
            assert view.running_requests == 4 and {one.stage for one in view.requests[1:]} == {pb.REQUEST_STAGE_QUEUE}
            call = watch(world.client, max_requests=1, max_ended=0)
            cut = (await call.read()).view
            call.cancel()
            assert [one.request_id for one in cut.requests] == ["r0"] and cut.running_requests == 4
        await asyncio.gather(*waiting)
        await world.at_rest()


async def test_members_that_drain_and_members_that_are_lost_are_told(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2, stale_after_s=0.5, lost_after_s=1.5) as world:
        world.decodes[0].load.draining = True
        world.decodes[0].tell()
        await world.decodes[1].stop()
        view = await seen(
            world.client,
            lambda view: [one.state for one in view.pools[1].members] == [pb.MEMBER_STATE_DRAINING, pb.MEMBER_STATE_LOST],
        )
        assert "no sign of life" in view.pools[1].members[1].reason


async def test_without_the_store_a_router_tells_what_it_knows(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world, decoding(world, "r1"):
        world.links[0].cut = True
        view = await seen(world.client, lambda view: not view.store_available)
        assert [router.tells for router in view.routers] == [True] and any(budget.used for budget in view.budgets)
        world.links[0].cut = False
        assert len((await seen(world.client, lambda view: view.store_available)).routers) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("period", 0.1), ("period", 61), ("period", -1), ("max_requests", 1001), ("max_ended", 201)],
)
async def test_bounds_are_named(redis_url: str, cell: str, field: str, value: float) -> None:
    async with router_world(redis_url, cell) as world:
        asked = pb.WatchRequest()
        if field == "period":
            asked.period.FromNanoseconds(int(value * 1e9))
        else:
            setattr(asked, field, int(value))
        error = details_from(await refused(cell_pb2_grpc.CellServiceStub(world.client.channel).Watch(asked)))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and [one.field for one in error.violations] == [field]


async def test_watchers_are_bounded_and_end_with_the_router(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        calls = [watch(world.client) for _ in range(MAX_WATCHERS)]
        for call in calls:
            assert (await call.read()).view.router
        assert (await world.client.books())[0]["cell_watchers"] == MAX_WATCHERS
        error = details_from(await refused(watch(world.client)))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
        assert error.retry_after_s
        for call in calls[1:]:
            call.cancel()

        async def watchers() -> int:
            return (await world.client.books())[0]["cell_watchers"]

        await until(watchers, 1)
        ending = asyncio.create_task(refused(calls[0]))
        assert await world.routers[0].drain() == 0
        told = details_from(await asyncio.wait_for(ending, 10))
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_store_that_does_not_answer_holds_up_no_view(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        assert (await seen(world.client, lambda view: view.store_available)).routers
        gate = world.links[0].gates["totals"] = Gate()
        gate.hold()
        held = await seen(world.client, lambda view: not view.store_available)
        assert [router.tells for router in held.routers] == [True] and held.pools[1].members
        call = watch(world.client)
        assert not (await call.read()).view.store_available
        ending = asyncio.create_task(refused(call))
        assert await world.routers[0].drain() == 0
        assert details_from(await asyncio.wait_for(ending, 20)).reason == "DRAINING"
        gate.release()
