"""A decode member is lost: another one goes on from what was told, and the client sees only a pause (G4)."""

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


def steps(record: pb.RequestRecord) -> list[tuple[int, str]]:
    return [(one.attempt, one.event) for one in record.transitions if one.event]


async def seated(world: World) -> tuple[FakeDecode, FakeDecode]:
    """The decode member that has the one seat, and the other one."""

    async def holder() -> bool:
        return sum(len(one.seats) for one in world.decodes) == 1

    await until(holder, True)
    first, second = world.decodes
    return (first, second) if first.seats else (second, first)


async def decoding(world: World, tokens: int, **changes: object) -> "tuple[asyncio.Task[Answer], FakeDecode, FakeDecode]":
    """A request that has got so many tokens and waits for the next; its member and the other one."""
    for decode in world.decodes:
        decode.script.tokens = tokens
        decode.script.ending.hold()
    running = world.client.begin(request("r1", **changes))
    member, other = await seated(world)
    await world.client.until_state("r1", "decoding")
    other.script.tokens = 8
    other.script.ending.release()

    async def told() -> int:
        return (await world.client.get("r1")).usage.selected_tokens

    await until(told, tokens)
    return running, member, other


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_b17_another_member_goes_on_where_a_killed_one_was(redis_url: str, cell: str, tokens: int) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        running, member, other = await decoding(world, tokens)
        await member.stop()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        assert answer.completed.usage.returned_tokens == 8
        opening = other.opens[-1]
        assert (opening.key.attempt, list(opening.output_token_ids)) == (2, list(range(tokens)))
        assert (opening.sent_text_bytes, opening.returned_tokens, opening.first_sequence_no) == (3 * tokens, tokens, 1 + tokens)
        assert opening.sampling.seed == answer.events[0].started.seed
        assert opening.HasField("since_last_token_s") == (tokens > 0)
        assert list(world.prefill.requests[-1].prompt_token_ids) == [*b"hello", *range(tokens)]
        record = await world.client.get("r1")
        assert (record.attempt, record.decode_member, record.usage.selected_tokens) == (2, other.name, 8)
        assert steps(record)[3:8] == [
            (1, "committed"),
            (2, "decode_lost"),
            (2, "refused"),
            (2, "ticket"),
            (2, "sent"),
        ]
        await world.at_rest()


async def test_b17_a_frozen_member_is_left(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2, lost_after_s=0.6) as world:
        running, member, other = await decoding(world, 2)
        member.silent = True
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text, len(other.opens)) == (grpc.StatusCode.OK, TEXT, 1)
        member.script.ending.release()


async def test_a_member_that_was_lost_in_the_hand_over(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        world.prefill.script.compute.hold()
        running = world.client.begin(request("r1"))
        member, other = await seated(world)
        await world.client.until_state("r1", "prefilling")
        await member.stop()
        await until(lambda: _opens(other), 1)
        world.prefill.script.compute.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK and not other.opens[0].output_token_ids
        assert (2, "decode_lost") in steps(await world.client.get("r1"))
        await world.at_rest()


async def test_a_member_that_comes_back_in_time_takes_it_up(redis_url: str, cell: str) -> None:
    """The only decode member restarts: the request waits for it, under another incarnation."""
    async with router_world(redis_url, cell) as world:
        world.decode.script.tokens, world.decode.script.cut_after = 8, 3
        running = world.client.begin(request("r1"))
        await until(lambda: _opens(world.decode), 1)
        world.decode.script.cut_after = None
        await world.decode.restart()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.OK, TEXT)
        await world.at_rest()


async def test_a_cancel_while_there_is_no_member(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        running, member, other = await decoding(world, 2)
        await other.stop()
        await member.stop()
        await world.client.until_state("r1", "queued")
        assert (await world.client.cancel("r1", wait=True)).outcome == pb.CANCEL_OUTCOME_ACCEPTED
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.text) == (grpc.StatusCode.CANCELLED, "t0 t1 ")
        assert answer.completed.usage.selected_tokens == 2
        books, faults = await world.client.books()
        assert not any(books.values()) and not faults


@pytest.mark.parametrize(("clock", "cause"), [("overall", "overall_deadline"), ("inter_token", "inter_token_engine_stall")])
async def test_a_clock_that_runs_out_while_there_is_no_member(redis_url: str, cell: str, clock: str, cause: str) -> None:
    """The clocks go on when nobody makes tokens; what was delivered stands, the request did not finish."""
    async with router_world(redis_url, cell, decodes=2) as world:
        limits = pb.Deadlines()
        getattr(limits, clock).FromMilliseconds(900)
        running, member, other = await decoding(world, 2, deadlines=limits)
        await other.stop()
        await member.stop()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.DEADLINE_EXCEEDED, cause)
        assert (answer.text, answer.completed.state) == ("t0 t1 ", pb.REQUEST_STATE_FAILED)


async def test_attempts_after_lost_decode_members_are_bounded(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2, max_attempts=3) as world:
        for decode in world.decodes:
            decode.script.cut_after, decode.script.cut_code = 1, grpc.StatusCode.UNAVAILABLE
        answer = await asyncio.wait_for(world.client.generate(request("r1")), 5)
        answer.check_order()
        assert (answer.code, answer.completed.cause) == (grpc.StatusCode.UNAVAILABLE, "attempts_exhausted")
        assert answer.text == "t0 " and sum(len(one.opens) for one in world.decodes) == 3
        await world.at_rest()


async def _opens(decode: FakeDecode) -> int:
    return len(decode.opens)
