"""The four clocks and the RPC's own deadline, each with its label; no work for the dead."""

import asyncio

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, redis_url
from tests.router_world import request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow


def limited(request_id: str, **clocks_ms: int) -> pb.GenerateRequest:
    made = request(request_id)
    for clock, milliseconds in clocks_ms.items():
        getattr(made.deadlines, clock).FromMilliseconds(milliseconds)
    return made


async def test_b40_queue_deadline_does_no_work(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decode_info={"max_sequences": 0}) as world:
        answer = await asyncio.wait_for(world.client.generate(limited("r1", queue=150)), 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.DEADLINE_EXCEEDED, "queue_deadline")
        assert answer.completed.state == pb.REQUEST_STATE_FAILED
        assert answer.completed.timings.queue_s == pytest.approx(0.15, abs=0.2)
        assert not world.decode.opens and not world.prefill.requests
        await world.at_rest()


@pytest.mark.parametrize("clock", ["first_token", "overall"])
async def test_nothing_returned_before_the_deadline(redis_url: str, cell: str, clock: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.prefill.script.compute.hold()
        answer = await asyncio.wait_for(world.client.generate(limited("r1", **{clock: 200})), 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.DEADLINE_EXCEEDED, f"{clock}_deadline")
        assert answer.completed.state == pb.REQUEST_STATE_FAILED and answer.error is not None
        assert answer.error.reason == f"{clock.upper()}_DEADLINE" and world.decode.heard == [f"{clock}_deadline"]
        await world.at_rest()


async def test_a_partial_result_stands_when_the_clock_was_a_field(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.ending.hold()
        answer = await asyncio.wait_for(world.client.generate(limited("r1", overall=300)), 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, "t0 t1 t2 ")
        completed = answer.completed
        assert (completed.state, completed.cause) == (pb.REQUEST_STATE_FINISHED, "overall_deadline")
        assert completed.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED
        await world.at_rest()


async def test_the_rpc_deadline_is_the_overall_clock(redis_url: str, cell: str) -> None:
    """The terminal event reaches a client that still listens, before the status of the deadline."""
    async with router_world(redis_url, cell) as world:
        world.decode.script.ending.hold()
        answer = await asyncio.wait_for(world.client.generate(request("r1"), timeout=2.0), 5)  # its margin is the longest
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        record = await world.client.get("r1")
        assert (record.cause, record.state) == ("rpc_deadline", pb.REQUEST_STATE_FINISHED)
        assert record.finish_reason == pb.FINISH_REASON_DEADLINE_EXCEEDED
        answer.check_order()
        assert answer.completed.cause == "rpc_deadline"
        assert world.decode.opens[0].overall_remaining_s < 2.0
        await world.at_rest()


async def test_an_rpc_deadline_in_the_queue(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decode_info={"max_sequences": 0}) as world:
        answer = await asyncio.wait_for(world.client.generate(request("r1"), timeout=0.4), 5)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: world.client.state("r1"), "failed")
        assert (await world.client.get("r1")).cause == "rpc_deadline"
        await world.at_rest()


async def test_an_inter_token_deadline_that_a_member_tells(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.ended = {
            "finish_reason": pb.FINISH_REASON_DEADLINE_EXCEEDED,
            "cause": "inter_token_engine_stall",
        }
        answer = await world.client.generate(request("r1"))
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK and answer.completed.cause == "inter_token_engine_stall"
        assert answer.completed.state == pb.REQUEST_STATE_FINISHED


async def test_b24_first_token_is_a_stop_token(redis_url: str, cell: str) -> None:
    """Nothing is shown, nobody waits, and the reason is the model's own."""
    async with router_world(redis_url, cell) as world:
        world.decode.script.tokens = 0
        world.decode.script.ended = {"finish_reason": pb.FINISH_REASON_STOP_TOKEN, "matched_token_id": 9}
        answer = await asyncio.wait_for(world.client.generate(request("r1")), 5)
        answer.check_order()
        completed = answer.completed
        assert (completed.finish_reason, completed.matched_token_id) == (pb.FINISH_REASON_STOP_TOKEN, 9)
        assert completed.state == pb.REQUEST_STATE_FINISHED and answer.text == ""
