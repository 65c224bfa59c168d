"""Log-probabilities and output modes as a router's clients see them, with members and routers that are lost (C8)."""

import asyncio

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.contract.test_router_adoption import _adopted, _rest, cut_off
from tests.contract.test_router_failover import seated
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

TEXT = "t0 t1 t2 t3 t4 t5 t6 t7 "
WANTED = pb.LogProbabilityParams(top=0)
#: What the fake member tells of eight tokens.
VALUES = [-(token + 1.0) for token in range(8)]
CUMULATIVE, FINAL_ONLY = pb.OUTPUT_MODE_CUMULATIVE, pb.OUTPUT_MODE_FINAL_ONLY


def values(answer: Answer) -> list[float]:
    """All that came, in order; each event has one for each of its tokens."""
    found = []
    for event in answer.events:
        part = event.delta if event.HasField("delta") else event.completed
        assert len(part.token_ids) == len(part.log_probabilities)
        found += [one.log_probability for one in part.log_probabilities]
    return found


def check_whole(answer: Answer, first: int = 0) -> None:
    """Each Delta holds everything so far, whichever event the answer begins with."""
    deltas = [event for event in answer.events if event.HasField("delta")]
    assert [event.sequence_no for event in deltas] == list(range(max(1, first), 9))
    for event in deltas:
        count = event.sequence_no
        assert event.delta.cumulative and event.delta.text == "".join(f"t{index} " for index in range(count))
        assert list(event.delta.token_ids) == list(range(count))
        assert [one.log_probability for one in event.delta.log_probabilities] == VALUES[:count]


async def test_they_are_passed_on_as_they_are_and_belong_to_the_body(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.tokens = 8
        answer = await world.client.generate(request("r1", log_probabilities=WANTED))
        answer.check_order()
        assert (answer.code, answer.text, values(answer)) == (grpc.StatusCode.OK, TEXT, VALUES)
        assert (await world.client.attach("r1", 0)).events == answer.events
        for other in ({}, {"log_probabilities": pb.LogProbabilityParams(top=1)}, {"output_mode": CUMULATIVE}):
            again = await world.client.generate(request("r1", **other))
            assert again.code is grpc.StatusCode.ALREADY_EXISTS
        whole = await world.client.generate(request("r2", log_probabilities=WANTED, output_mode=FINAL_ONLY))
        assert (whole.completed.text, values(whole)) == (TEXT, VALUES)
        assert list(whole.completed.token_ids) == list(range(8))
        plain = await world.client.generate(request("r3", output_mode=FINAL_ONLY))
        assert list(plain.completed.token_ids) == list(range(8)) and not plain.completed.log_probabilities
        assert not world.decode.opens[-1].HasField("log_probabilities")
        await world.at_rest()


@pytest.mark.parametrize("mode", [FINAL_ONLY, CUMULATIVE])
async def test_what_one_event_can_not_hold_is_refused_with_the_limit(redis_url: str, cell: str, mode: int) -> None:
    async with router_world(redis_url, cell, max_whole_log_probabilities=30, max_log_probabilities=4) as world:
        wanted = request("r1", output_mode=mode, log_probabilities=pb.LogProbabilityParams(top=4))
        refused = await world.client.generate(wanted)
        assert refused.error is not None and refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.error.violations[0].field == "max_output_tokens"
        assert "at most 6" in refused.error.violations[0].description
        wanted.max_output_tokens = 6
        assert (await world.client.generate(wanted)).code is grpc.StatusCode.OK


@pytest.mark.parametrize("mode", [pb.OUTPUT_MODE_DELTA, FINAL_ONLY, CUMULATIVE])
async def test_b17_another_member_goes_on_with_what_was_recorded(redis_url: str, cell: str, mode: int) -> None:
    """The fake member checks that each token that it goes on from came with its own."""
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.tokens = 5
            decode.script.ending.hold()
        running = world.client.begin(request("r1", log_probabilities=WANTED, output_mode=mode))
        member, other = await seated(world)
        other.script.tokens = 8
        other.script.ending.release()

        async def told() -> int:
            return (await world.client.get("r1")).usage.selected_tokens

        await until(told, 5)
        await member.stop()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, answer.completed.usage.returned_tokens) == (grpc.StatusCode.OK, 8)
        if mode == CUMULATIVE:
            check_whole(answer)
            returned = pb.Delta.FromString(other.opens[-1].returned)
            assert (returned.text, list(returned.token_ids)) == ("t0 t1 t2 t3 t4 ", [0, 1, 2, 3, 4])
        else:
            assert values(answer) == VALUES
        assert len(other.opens[-1].held_log_probabilities) == (5 if mode == FINAL_ONLY else 0)
        await world.at_rest()


@pytest.mark.parametrize("first", [0, 1, 4, 8, 9])
async def test_a_cumulative_stream_can_be_taken_up_anywhere(redis_url: str, cell: str, first: int) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        world.decode.script.tokens = 8
        whole = await world.client.generate(request("r1", output_mode=CUMULATIVE, log_probabilities=WANTED))
        whole.check_order()
        check_whole(whole)
        for client in world.clients:
            again = await client.attach("r1", first)
            assert again.events == whole.events[first:]


async def test_events_that_a_router_dropped_are_in_later_cumulative_ones(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, buffer_bytes=1024, replay_bytes=2048) as world:
        world.decode.script.tokens, world.decode.script.text = 8, lambda index: f"{index}" + "x" * 600
        whole = await world.client.generate(request("r1", output_mode=CUMULATIVE))
        gone = await world.client.attach("r1", 1)
        assert gone.code is grpc.StatusCode.OUT_OF_RANGE and gone.error is not None
        first = int(gone.error.metadata["firstSequenceNo"])
        again = await world.client.attach("r1", first)
        assert first > 1 and again.events == whole.events[first:]
        assert again.events[0].delta.text.count("x") == 600 * first


async def test_a_prompt_that_is_to_be_told_with_its_own_is_computed_by_decode(redis_url: str, cell: str) -> None:
    """Prefill members have nothing to do with it, and the event with the prompt has a number before all output."""
    wanted = {"log_probabilities": pb.LogProbabilityParams(top=2, prompt=True), "echo_prompt": True}
    async with router_world(redis_url, cell, decode_info={"computes_prompts": True}) as world:
        answer = await world.client.generate(request("r1", **wanted))
        answer.check_order()
        (opening,) = world.decode.opens
        assert answer.code is grpc.StatusCode.OK and not world.prefill.requests and not opening.HasField("prefill")
        assert (opening.log_probabilities.prompt, opening.echo_prompt, opening.first_sequence_no) == (True, True, 1)
        await world.client.generate(request("r2", echo_prompt=True))
        assert len(world.prefill.requests) == 1 and world.decode.opens[-1].echo_prompt
        await world.at_rest()


async def test_a_member_that_goes_on_gets_a_prefill_once_the_prompt_was_told(redis_url: str, cell: str) -> None:
    wanted = {"log_probabilities": pb.LogProbabilityParams(top=0, prompt=True)}
    async with router_world(redis_url, cell, decodes=2, decode_info={"computes_prompts": True}) as world:
        for decode in world.decodes:
            decode.script.tokens = 8
            decode.script.output.hold()
        running = world.client.begin(request("r1", **wanted))

        async def opens() -> int:
            return sum(len(one.opens) for one in world.decodes)

        await until(opens, 1)
        first = next(decode for decode in world.decodes if decode.opens)
        first.script.cut_after = 3
        for decode in world.decodes:
            decode.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert answer.text == TEXT and len(world.prefill.requests) == 1
        await world.at_rest()


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"log_probabilities": pb.LogProbabilityParams(top=0, prompt=True)}, "log_probabilities.prompt", "computes prompts"),
        ({"log_probabilities": pb.LogProbabilityParams(top=20, prompt=True), "text": "x" * 90}, "text", "at most 47"),
    ],
)
async def test_a_prompt_that_can_not_be_told_with_its_own_is_refused(
    redis_url: str, cell: str, changes: dict[str, object], field: str, says: str
) -> None:
    async with router_world(redis_url, cell, max_whole_log_probabilities=1000) as world:
        refused = await world.client.generate(request("r1", **changes))
        assert refused.error is not None and refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.error.violations[0].field == field and says in refused.error.violations[0].description
        assert not world.decode.opens


async def test_a_cumulative_request_of_a_dead_router_goes_on_whole(redis_url: str, cell: str) -> None:
    async with cut_off(redis_url, cell, output_mode=CUMULATIVE, log_probabilities=WANTED) as (world, call, seen):
        back = asyncio.create_task(world.clients[1].attach("r1", 2))
        await until(lambda: _adopted(world), 1, 15)
        world.links[0].cut = False
        world.decode.script.output.release()
        answer = await back
        assert answer.code is grpc.StatusCode.OK
        check_whole(answer, 2)
        rest = Answer([*seen, *[event async for event in _rest(call)]])
        check_whole(rest)
        assert rest.events[2:] == answer.events
