"""Cancel in every state, through any router, and clients that leave: what was held is given back, the end is told once."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, World, request, router_world

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

#: Brings request r1 into the state that is its key.
Bring = Callable[[World], Awaitable["asyncio.Task[Answer] | grpc.aio.UnaryStreamCall"]]


async def queued(world: World) -> asyncio.Task[Answer]:
    return world.client.begin(request("r1"))


async def admitted(world: World) -> asyncio.Task[Answer]:
    world.decode.script.grant.hold()
    return world.client.begin(request("r1"))


async def prefilling(world: World) -> asyncio.Task[Answer]:
    world.prefill.script.compute.hold()
    return world.client.begin(request("r1"))


async def decoding(world: World) -> asyncio.Task[Answer]:
    world.decode.script.output.hold()
    return world.client.begin(request("r1"))


async def decoding_last(world: World) -> asyncio.Task[Answer]:
    world.decode.script.ending.hold()
    return world.client.begin(request("r1"))


STAGES = [
    ("queued", queued),
    ("admitted", admitted),
    ("prefilling", prefilling),
    ("decoding", decoding),
    ("decoding", decoding_last),
]
STAGE_IDS = ["queued", "admitted", "prefilling", "decoding", "decoded"]


def room(state: str) -> dict[str, object]:
    """Without room for a sequence a request stays in the queue."""
    return {"max_sequences": 0} if state == "queued" else {}


def release(world: World) -> None:
    world.prefill.script.compute.release()
    for gate in (world.decode.script.grant, world.decode.script.output, world.decode.script.ending):
        gate.release()


@pytest.mark.parametrize("router", [0, 1], ids=["same-router", "other-router"])
@pytest.mark.parametrize(("state", "bring"), STAGES, ids=STAGE_IDS)
async def test_cancel_in_each_state(redis_url: str, cell: str, state: str, bring: Bring, router: int) -> None:
    async with router_world(redis_url, cell, routers=2, decode_info=room(state)) as world:
        running = await bring(world)
        await world.client.until_state("r1", state)
        said = await asyncio.wait_for(world.clients[router].cancel("r1", wait=True, reason="enough"), 5)
        assert said.outcome == pb.CANCEL_OUTCOME_ACCEPTED and said.state == pb.REQUEST_STATE_CANCELLED
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.completed.state) == (grpc.StatusCode.CANCELLED, pb.REQUEST_STATE_CANCELLED)
        assert answer.completed.finish_reason == pb.FINISH_REASON_CANCELLED
        record = await world.clients[1].get("r1")
        assert record.cancel_reason == "enough" and record.cause == "client_cancel"
        requested, observed, effective = (
            getattr(record, f"cancel_{name}_at").ToNanoseconds() for name in ("requested", "observed", "effective")
        )
        assert 0 < requested <= observed <= effective
        assert 0 <= answer.completed.timings.cancel_observed_s <= answer.completed.timings.cancel_effective_s < 5
        again = await world.clients[router].cancel("r1")
        assert again.outcome == pb.CANCEL_OUTCOME_ALREADY_ENDED and again.finish_reason == pb.FINISH_REASON_CANCELLED
        await world.at_rest()
        release(world)


async def test_cancel_while_draining(redis_url: str, cell: str) -> None:
    """Everything is generated, the client has not read it: the cancel still counts."""
    async with router_world(redis_url, cell, buffer_bytes=1_000_000, replay_bytes=2_000_000) as world:
        world.decode.script.tokens, world.decode.script.text = 200, lambda index: "x" * 2000
        call = world.client.stub.Generate(request("r1", max_output_tokens=200))
        await world.client.until_state("r1", "draining")
        said = await world.client.cancel("r1", wait=True)
        assert said.state == pb.REQUEST_STATE_CANCELLED
        kinds = [event.WhichOneof("event") async for event in _events(call)]
        assert kinds[-1] == "completed" and kinds.count("completed") == 1
        assert await call.code() is grpc.StatusCode.CANCELLED
        await world.at_rest()


async def test_cancel_before_generate_is_a_tombstone(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        said = await world.clients[1].cancel("r1", wait=True)
        assert said.outcome == pb.CANCEL_OUTCOME_ACCEPTED and said.state == pb.REQUEST_STATE_UNSPECIFIED
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert len(answer.events) == 1 and answer.code is grpc.StatusCode.CANCELLED
        assert answer.completed.state == pb.REQUEST_STATE_CANCELLED
        assert not world.decode.opens and not world.prefill.requests
        assert (await world.client.cancel("r1")).outcome == pb.CANCEL_OUTCOME_ALREADY_ENDED
        await world.at_rest()


async def test_cancel_after_the_end_changes_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        await world.client.generate(request("r1"))
        before = await world.client.get("r1")
        said = await world.client.cancel("r1", wait=True)
        assert said.outcome == pb.CANCEL_OUTCOME_ALREADY_ENDED
        assert (said.state, said.finish_reason) == (pb.REQUEST_STATE_FINISHED, pb.FINISH_REASON_MAX_OUTPUT_TOKENS)
        assert await world.client.get("r1") == before


async def test_a_member_that_ignores_a_cancel_is_cut(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, cancel_grace_s=0.2, seat_hold_s=0.1) as world:
        world.decode.script.deaf = True
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.client.until_state("r1", "decoding")
        said = await asyncio.wait_for(world.client.cancel("r1", wait=True), 5)
        assert said.state == pb.REQUEST_STATE_CANCELLED
        assert (await running).code is grpc.StatusCode.CANCELLED
        await world.at_rest()


@pytest.mark.parametrize(("state", "bring"), STAGES, ids=STAGE_IDS)
async def test_b09_a_client_that_leaves_frees_everything(redis_url: str, cell: str, state: str, bring: Bring) -> None:
    async with router_world(redis_url, cell, decode_info=room(state)) as world:
        running = await bring(world)
        await world.client.until_state("r1", state)
        running.cancel()
        await world.client.until_state("r1", "cancelled")
        record = await world.client.get("r1")
        assert record.cause == "client_gone" and record.finish_reason == pb.FINISH_REASON_CANCELLED
        await world.at_rest()
        if state in ("prefilling", "decoding"):
            assert world.decode.heard == ["client_gone"]
        release(world)


async def test_b09_a_client_that_leaves_while_draining(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, buffer_bytes=1_000_000, replay_bytes=2_000_000) as world:
        world.decode.script.tokens, world.decode.script.text = 200, lambda index: "x" * 2000
        call = world.client.stub.Generate(request("r1", max_output_tokens=200))
        await world.client.until_state("r1", "draining")
        call.cancel()
        await world.client.until_state("r1", "cancelled")
        await world.at_rest()


async def test_b20_abort_storm_on_a_deep_queue(redis_url: str, cell: str) -> None:
    """Cancels race admission: each request has exactly one end, and nothing is left."""
    async with router_world(redis_url, cell, decode_info={"max_sequences": 2}) as world:
        running = [world.client.begin(request(f"r{number}")) for number in range(40)]
        cancels = [asyncio.create_task(world.client.cancel(f"r{number}")) for number in range(0, 40, 2)]
        await asyncio.gather(*cancels)
        answers = await asyncio.wait_for(asyncio.gather(*running), 20)
        for answer in answers:
            answer.check_order()
        ends = {(answer.code, answer.completed.cause) for answer in answers}
        assert ends <= {(grpc.StatusCode.OK, ""), (grpc.StatusCode.CANCELLED, "client_cancel")}
        assert all(answer.code is grpc.StatusCode.OK for answer in answers[1::2])
        await world.at_rest()


async def test_b35_cancels_at_random_moments_leave_no_count_behind(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2, prefills=2, decodes=2) as world:

        async def one(number: int) -> Answer:
            running = world.client.begin(request(f"r{number}"))
            for _ in range(number % 23):
                await asyncio.sleep(0)
            if number % 3 == 0:
                running.cancel()
            elif number % 3 == 1:
                await world.clients[number % 2].cancel(f"r{number}")
            try:
                return await running
            except asyncio.CancelledError:
                return Answer()

        answers = await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(90))), 30)
        assert all(answer.code in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED) for answer in answers)
        await world.at_rest()


async def _events(call: grpc.aio.UnaryStreamCall):
    while True:
        try:
            event = await call.read()
        except grpc.aio.AioRpcError:
            return
        if event is grpc.aio.EOF:
            return
        yield event
