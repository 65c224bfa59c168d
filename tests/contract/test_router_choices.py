"""Several choices as a router's clients see them: limits, events, ends, cancels, members and routers that are lost."""

import asyncio

import grpc
import pytest

from tandem.v1 import inference_pb2 as pb
from tests.contract.test_router_adoption import _adopted, cut_off
from tests.contract.test_router_failover import seated
from tests.fake_choices import text
from tests.redis_server import cell, redis_url
from tests.router_world import Answer, request, router_world, until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow

DELTA, FINAL_ONLY, CUMULATIVE = pb.OUTPUT_MODE_DELTA, pb.OUTPUT_MODE_FINAL_ONLY, pb.OUTPUT_MODE_CUMULATIVE


def texts(events: list[pb.GenerateResponse]) -> dict[int, str]:
    """All text of each choice; a cumulative Delta holds everything so far."""
    found: dict[int, str] = {}
    for event in events:
        kind = event.WhichOneof("event")
        if kind in ("delta", "choice_ended"):
            told = getattr(event, kind)
            whole = kind == "delta" and told.cumulative
            found[told.index] = told.text if whole else found.get(told.index, "") + told.text
    return found


def ends(answer: Answer) -> list[int]:
    """Which choices have ended, in that order."""
    return [event.choice_ended.index for event in answer.events if event.HasField("choice_ended")]


def whole(count: int, tokens: int = 3) -> dict[int, str]:
    return {index: text(index, range(tokens + index)) for index in range(count)}


@pytest.mark.parametrize("mode", [DELTA, FINAL_ONLY, CUMULATIVE])
async def test_each_is_told_by_its_index_and_ends_once(redis_url: str, cell: str, mode: int) -> None:
    async with router_world(redis_url, cell) as world:
        answer = await world.client.generate(request("r1", choices=3, output_mode=mode))
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK
        assert sorted(ends(answer)) == [0, 1, 2]
        if mode == CUMULATIVE:  # the last event of each has all of it
            last = {e.choice_ended.index: e.choice_ended.text for e in answer.events if e.HasField("choice_ended")}
            assert last == whole(3)
        else:
            assert texts(answer.events) == whole(3)
        done = answer.completed
        assert (done.finish_reason, done.state) == (pb.FINISH_REASON_MAX_OUTPUT_TOKENS, pb.REQUEST_STATE_FINISHED)
        assert (done.usage.prompt_tokens, done.usage.selected_tokens, done.usage.returned_tokens) == (5, 12, 12)
        assert done.usage.processed_tokens == 5 + 2 + 3 + 4 and not done.text
        (opening,) = world.decode.opens
        assert [one.index for one in opening.choices] == [0, 1, 2] and not opening.told_choices
        assert len(world.prefill.requests) == 1
        for first in range(len(answer.events)):
            again = await world.client.attach("r1", first)
            assert again.events == answer.events[first:]
        await world.at_rest()


async def test_one_choice_is_the_request_that_it_was(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        plain = await world.client.generate(request("r1", sampling=pb.SamplingParams(seed=1)))
        one = await world.client.generate(request("r2", choices=1, sampling=pb.SamplingParams(seed=1)))
        assert [event.WhichOneof("event") for event in one.events] == [event.WhichOneof("event") for event in plain.events]
        assert one.text == plain.text and not world.decode.opens[-1].choices
        await world.at_rest()


async def test_only_the_best_are_told(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        answer = await world.client.generate(request("r1", choices=2, best_of=4, output_mode=FINAL_ONLY))
        answer.check_order()
        assert (ends(answer), texts(answer.events)) == ([0, 1], whole(2))
        assert (answer.completed.usage.selected_tokens, answer.completed.usage.returned_tokens) == (3 + 4 + 5 + 6, 3 + 4)
        (opening,) = world.decode.opens
        assert (len(opening.choices), opening.told_choices, opening.ranks_only) == (4, 2, True)
        assert opening.HasField("log_probabilities") and opening.log_probabilities.top == 0
        await world.at_rest()


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"choices": 9}, "choices", "from 1 to 8"),
        ({"choices": 0}, "choices", "from 1 to 8"),
        ({"best_of": 9, "output_mode": FINAL_ONLY}, "best_of", "from 1 to 8"),
        ({"choices": 3, "best_of": 2}, "best_of", "at least choices, 3"),
        ({"best_of": 2}, "best_of", "OUTPUT_MODE_FINAL_ONLY"),
        ({"choices": 8, "max_output_tokens": 64}, "max_output_tokens", "for each of 8 choices"),
    ],
)
async def test_what_is_out_of_range_is_named(redis_url: str, cell: str, changes: dict[str, int], field: str, words: str) -> None:
    async with router_world(redis_url, cell, decode_info={"total_pages": 24}) as world:
        refused = await world.client.generate(request("r1", **changes))
        assert refused.error is not None and refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [one.field for one in refused.error.violations] == [field]
        assert words in refused.error.violations[0].description
        await world.at_rest()


async def test_a_choice_is_cancelled_through_any_router_and_the_others_go_on(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, routers=2) as world:
        world.decode.script.output.hold()
        running = world.clients[0].begin(request("r1", choices=3))
        await until(lambda: seats(world), 1)
        await world.clients[0].until_state("r1", "decoding")
        for client in (*world.clients, world.clients[1]):
            answer = await client.stub.Cancel(pb.CancelRequest(request_id="r1", choice=1))
            assert answer.outcome == pb.CANCEL_OUTCOME_ACCEPTED and answer.state == pb.REQUEST_STATE_DECODING
        await until(lambda: heard(world, "choice 1"), 3)
        world.decode.script.output.release()
        told = await asyncio.wait_for(running, 5)
        told.check_order()
        reasons = {e.choice_ended.index: e.choice_ended.finish_reason for e in told.events if e.HasField("choice_ended")}
        assert reasons[1] == pb.FINISH_REASON_CANCELLED
        assert texts(told.events) == {**whole(3), 1: text(1, range(1))}
        assert told.code is grpc.StatusCode.OK and told.completed.finish_reason == pb.FINISH_REASON_MAX_OUTPUT_TOKENS
        over = await world.clients[1].stub.Cancel(pb.CancelRequest(request_id="r1", choice=0))
        assert over.outcome == pb.CANCEL_OUTCOME_ALREADY_ENDED
        await world.at_rest()


async def test_the_request_ends_with_the_last_of_its_choices(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.output.hold()
        running = world.client.begin(request("r1", choices=2))
        await world.client.until_state("r1", "decoding")
        for index in (0, 1):
            await world.client.stub.Cancel(pb.CancelRequest(request_id="r1", choice=index))
        await until(lambda: heard(world, "choice 1"), 1)
        world.decode.script.output.release()
        told = await asyncio.wait_for(running, 5)
        assert (told.code, told.completed.state) == (grpc.StatusCode.CANCELLED, pb.REQUEST_STATE_CANCELLED)
        assert sorted(ends(told)) == [0, 1]
        await world.at_rest()


async def test_a_cancel_of_a_choice_that_is_not_there_says_so(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await world.client.stub.Cancel(pb.CancelRequest(request_id="r1", choice=0))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        world.decode.script.output.hold()
        running = world.client.begin(request("r1", choices=2))
        await world.client.until_state("r1", "decoding")
        with pytest.raises(grpc.aio.AioRpcError) as beyond:
            await world.client.stub.Cancel(pb.CancelRequest(request_id="r1", choice=2))
        assert beyond.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 1" in (beyond.value.details() or "")
        world.decode.script.output.release()
        assert (await running).code is grpc.StatusCode.OK


async def seats(world: object) -> int:
    return len(world.decode.seats)  # type: ignore[attr-defined]


async def heard(world: object, what: str) -> int:
    return world.decode.heard.count(what)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [DELTA, FINAL_ONLY, CUMULATIVE])
@pytest.mark.parametrize("after", [0, 1, 5, 8, 10, 12])
async def test_another_member_goes_on_with_each_from_its_own_tokens(redis_url: str, cell: str, mode: int, after: int) -> None:
    """The fake checks what it is told of earlier attempts; choices that had ended are not made again."""
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.cut_after = after
            decode.script.grant.hold()
        running = world.client.begin(request("r1", choices=3, output_mode=mode))
        member, other = await seated(world)
        other.script.cut_after = None
        for decode in world.decodes:
            decode.script.grant.release()
        answer = await asyncio.wait_for(running, 10)
        answer.check_order()
        assert answer.code is grpc.StatusCode.OK and sorted(ends(answer)) == [0, 1, 2]
        if mode == CUMULATIVE:
            last = {e.choice_ended.index: e.choice_ended.text for e in answer.events if e.HasField("choice_ended")}
            assert last == whole(3)
        else:
            assert texts(answer.events) == whole(3)
        assert answer.completed.usage.selected_tokens == 12
        assert len(other.opens) == (after < 12)
        assert member.opens
        await world.at_rest()


async def test_a_choice_that_was_cancelled_is_so_at_the_next_member_too(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.output.hold()
        running = world.client.begin(request("r1", choices=2))
        member, other = await seated(world)
        await world.client.until_state("r1", "decoding")
        member.script.deaf = True
        await world.client.stub.Cancel(pb.CancelRequest(request_id="r1", choice=0))
        await member.stop()
        await until(lambda: told(other), True)
        other.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        assert texts(answer.events)[0] == text(0, range(1)) and texts(answer.events)[1] == whole(2)[1]
        await world.at_rest()


async def told(member: object) -> bool:
    return "choice 0" in member.heard  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [DELTA, CUMULATIVE])
async def test_another_router_takes_it_over_and_nobody_notices(redis_url: str, cell: str, mode: int) -> None:
    detach = pb.ON_DISCONNECT_DETACH
    async with cut_off(redis_url, cell, choices=2, on_disconnect=detach, output_mode=mode) as (world, call, seen):
        await until(lambda: _adopted(world), 1, 15)
        world.links[0].cut = False
        call.cancel()
        world.decode.script.output.release()
        answer = await world.clients[1].attach("r1", 3)
        assert answer.code is grpc.StatusCode.OK
        events = [*seen, *answer.events]
        assert [event.sequence_no for event in events] == list(range(len(events)))
        expected = {0: text(0, range(8)), 1: text(1, range(9))}
        if mode == CUMULATIVE:
            last = {e.choice_ended.index: e.choice_ended.text for e in events if e.HasField("choice_ended")}
            assert last == expected
        else:
            assert texts(events) == expected
        assert answer.completed.usage.selected_tokens == 17


async def test_choices_stay_at_a_member_that_drains(redis_url: str, cell: str) -> None:
    """They are not stopped to be moved; what has not ended when the member stops goes on at another one."""
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.output.hold()
        running = world.client.begin(request("r1", choices=2))
        member, other = await seated(world)
        await world.client.until_state("r1", "decoding")
        member.load.draining = True
        member.tell()
        for count in range(4):
            await member.script.output.reached_by(count + 1)
            member.script.output.step()
        await member.script.output.reached_by(5)
        assert member.heard == []
        await member.stop()
        other.script.output.release()
        answer = await asyncio.wait_for(running, 5)
        answer.check_order()
        assert (answer.code, texts(answer.events)) == (grpc.StatusCode.OK, whole(2))
        assert [len(one.output_token_ids) for one in other.opens[0].choices] == [2, 2] and not other.opens[0].moved
        await world.at_rest()
