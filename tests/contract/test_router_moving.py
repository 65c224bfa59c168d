"""A decode member drains: its sequences go on at another one, whose KV it writes itself (G6)."""

import asyncio

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.fake_members import FakeDecode
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, World, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

TEXT = "".join(f"t{index} " for index in range(8))


def events(record: pb.RequestRecord) -> list[tuple[int, str]]:
    return [(one.attempt, one.event) for one in record.transitions if one.event]


async def decoding(world: World, tokens: int) -> "tuple[asyncio.Task[Answer], FakeDecode, FakeDecode]":
    """A request that has got so many tokens of 8 and waits for the next; its member and the other one."""
    for decode in world.decodes:
        decode.script.tokens = 8
        decode.script.output.hold()
    running = world.client.begin(request("r1"))
    await until(lambda: _seats(world), 1)
    member, other = sorted(world.decodes, key=lambda one: -len(one.seats))
    for count in range(tokens):
        await member.script.output.reached_by(count + 1)
        member.script.output.step()
        await member.script.output.reached_by(count + 2)
    return running, member, other


def drain(member: FakeDecode) -> None:
    member.load.draining = True
    member.tell()


async def test_a_sequence_leaves_a_draining_member(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        running, member, other = await started(world)
        for decode in (member, other):
            decode.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        opening = other.opens[0]
        told = len(opening.output_token_ids)
        assert opening.moved and opening.key.attempt == 2 and 0 < told < 8
        assert list(opening.output_token_ids) == list(range(told))
        assert (opening.prefill.member, opening.prefill.incarnation) == (member.name, member.incarnation)
        assert member.heard == ["pause", "push", "moved"]
        assert len(world.prefill.requests) == 1
        record = await world.client.get("r1")
        assert (record.attempt, record.decode_member) == (2, other.name)
        assert (2, "decode_lost") in events(record) and record.usage.returned_tokens == 8
        await world.at_rest()


@pytest.mark.parametrize("how", ["not_pushable", "push_fails", "source_dies"])
async def test_what_can_not_be_moved_is_computed_again(redis_url: str, cell: str, how: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.pushable = how != "not_pushable"
            decode.script.push_failure = "transfer_failed" if how == "push_fails" else ""
            if how == "source_dies":
                decode.script.push.hold()
        running, member, other = await started(world)
        member.script.output.release()
        other.script.output.release()
        if how == "source_dies":
            await member.script.push.reached_by(1)
            await member.stop()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        assert not other.opens[-1].moved and len(world.prefill.requests) == 2
        assert list(world.prefill.requests[-1].prompt_token_ids) == [*b"hello", *other.opens[-1].output_token_ids]
        await world.at_rest()


async def test_a_cancel_while_the_kv_is_on_its_way(redis_url: str, cell: str) -> None:
    """Both seats end, with the cancel's own label."""
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.push.hold()
        running, member, other = await started(world)
        member.script.output.release()
        await member.script.push.reached_by(1)
        await world.client.cancel("r1", wait=True)
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert answer.code is grpc.StatusCode.CANCELLED and TEXT.startswith(answer.text)
        assert member.heard == ["pause", "push", "client_cancel"]
        assert len(other.heard) == 1
        await world.at_rest()


async def test_with_nowhere_to_go_a_sequence_stays(redis_url: str, cell: str) -> None:
    """The drain of the last member lets what runs run on."""
    async with router_world(redis_url, cell) as world:
        world.decode.script.tokens = 8
        world.decode.script.output.hold()
        running = world.client.begin(request("r1"))
        await world.decode.script.output.reached_by(1)
        drain(world.decode)
        await until(lambda: _draining(world), True)
        world.decode.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        assert world.decode.heard == [] and len(world.decode.opens) == 1
        await world.at_rest()


async def started(world: World) -> "tuple[asyncio.Task[Answer], FakeDecode, FakeDecode]":
    """A request in the middle of its output whose member drains; the router knows it, and has stopped the sequence."""
    running, member, other = await decoding(world, 2)
    drain(member)
    await until(lambda: _draining(world), True)
    member.script.output.step()
    await until(lambda: _stopped(member), True)
    return running, member, other


async def _stopped(member: FakeDecode) -> bool:
    return member.heard[:1] == ["pause"]


async def _draining(world: World) -> bool:
    models = (await world.client.stub.ListModels(pb.ListModelsRequest())).models
    return models[0].decode_members == len(world.decodes) - 1


async def _seats(world: World) -> int:
    return sum(len(one.seats) for one in world.decodes)
