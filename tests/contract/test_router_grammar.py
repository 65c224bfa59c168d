"""Requests with a grammar at a router: refused before they begin, or carried to every seat."""

import json
import time

import grpc
import pytest

from router.adopted_request import adopted_request
from router.pool_messages import grammar_message
from router.request import ServedModel
from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as pb
from tests.redis_server import cell, new_record, redis_url
from tests.router_world import World, request, router_world, until
from text.grammar_rule import GrammarKind, GrammarRule, rule_from

__all__ = ["cell", "redis_url"]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
REGEX = pb.Grammar(regex="[a-z]+")


async def assert_nothing_began(world: World) -> None:
    """No record, no seat, nothing held."""
    assert await world.client.state("r1") == ""
    assert not world.decode.opens and not world.prefill.requests
    await world.at_rest()


@pytest.mark.slow
async def test_a_grammar_that_can_be_seen_to_be_bad_is_refused_here(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        for grammar, field, says in (
            (pb.Grammar(), "grammar.rule", "one of"),
            (pb.Grammar(regex=""), "grammar.regex", "1 to 65536"),
            (pb.Grammar(ebnf="x" * 65_537), "grammar.ebnf", "got 65537"),
            (pb.Grammar(json_schema='{"type":\n "string",}'), "grammar.json_schema", "line 2, column 11"),
            (pb.Grammar(json_schema='{"items": 3, "type": "array"}'), "grammar.json_schema", "#/items"),
        ):
            answer = await world.client.generate(request("r1", grammar=grammar))
            assert answer.error is not None and answer.code is INVALID
            assert [one.field for one in answer.error.violations] == [field]
            assert says in answer.error.violations[0].description
        assert not world.decode.checks
        await assert_nothing_began(world)


@pytest.mark.slow
async def test_what_a_member_finds_wrong_is_told_before_anything_begins(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.verdict = decode_pb2.CheckGrammarResponse(problem="Regex parsing error at position 4")
        for _ in range(2):
            answer = await world.client.generate(request("r1", grammar=REGEX))
            assert answer.error is not None and answer.code is INVALID and not answer.events
            assert [(one.field, one.reason) for one in answer.error.violations] == [("grammar.regex", "BAD_GRAMMAR")]
            assert "position 4" in answer.error.violations[0].description
        assert len(world.decode.checks) == 1, "a verdict is remembered"
        world.decode.script.verdict = decode_pb2.CheckGrammarResponse(problem="takes more than 3 s to compile", costly=True)
        for _ in range(2):
            answer = await world.client.generate(request("r1", grammar=pb.Grammar(json_object=pb.JsonObject())))
            assert answer.error is not None and answer.error.violations[0].reason == "GRAMMAR_TOO_COSTLY"
        assert len(world.decode.checks) == 3, "what took too long once may not do so again"
        await assert_nothing_began(world)


@pytest.mark.slow
async def test_a_grammar_goes_to_every_seat_of_its_request(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        for decode in world.decodes:
            decode.script.tokens = 6
            decode.script.output.hold()
        task = world.client.begin(request("r1", grammar=REGEX))

        async def opens_so_far() -> int:
            return sum(len(decode.opens) for decode in world.decodes)

        await until(opens_so_far, 1)
        first, other = sorted(world.decodes, key=lambda decode: not decode.opens)
        first.script.cut_after = 2
        first.script.output.release()
        other.script.output.release()
        answer = await task
        assert answer.code is grpc.StatusCode.OK and answer.text == "t0 t1 t2 t3 t4 t5 "
        opens = [opening for decode in world.decodes for opening in decode.opens]
        assert len(opens) == 2 and all(opening.grammar == REGEX for opening in opens)
        assert sorted(len(opening.output_token_ids) for opening in opens) == [0, 2]
        assert len([check for decode in world.decodes for check in decode.checks]) == 1
        await world.at_rest()


@pytest.mark.slow
@pytest.mark.slow
async def test_what_the_check_takes_is_told_as_a_phase_of_the_request(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:

        async def checked() -> int:
            return len(world.decode.checks)

        world.decode.script.grammar.hold()
        task = world.client.begin(request("r1", grammar=REGEX))
        await until(checked, 1)
        asked_at = time.monotonic()
        assert await world.client.state("r1") == ""
        held_s = time.monotonic() - asked_at
        world.decode.script.grammar.release()
        timings = (await task).completed.timings
        assert timings.check_s >= held_s > 0
        assert timings.check_s + timings.queue_s <= timings.total_s
        assert (await world.client.get("r1")).timings.check_s == timings.check_s
        assert 'tandem_router_phase_seconds_count{phase="check"} 1.0' in world.routers[0].frame.metrics.text()


async def test_the_grammar_is_part_of_what_an_id_stands_for(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        assert (await world.client.generate(request("r1", grammar=REGEX))).code is grpc.StatusCode.OK
        checks = len(world.decode.checks)
        assert (await world.client.generate(request("r1", grammar=REGEX))).code is grpc.StatusCode.OK
        other = await world.client.generate(request("r1", grammar=pb.Grammar(regex="[a-z]*")))
        assert other.code is grpc.StatusCode.ALREADY_EXISTS
        assert len(world.decode.opens) == 1 and len(world.decode.checks) <= checks + 1


@pytest.mark.slow
async def test_a_member_that_can_not_say_is_passed_over(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell, decodes=2) as world:
        for code, status in (
            (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        ):
            for decode in world.decodes:
                decode.script.verdict = code
            answer = await world.client.generate(request("r1", grammar=REGEX))
            assert answer.code is status
            assert all(decode.checks for decode in world.decodes)
        await assert_nothing_began(world)
        world.decodes[0].script.verdict = decode_pb2.CheckGrammarResponse()
        assert (await world.client.generate(request("r2", grammar=REGEX))).code is grpc.StatusCode.OK


@pytest.mark.slow
async def test_a_client_that_leaves_while_its_grammar_is_checked_leaves_nothing(redis_url: str, cell: str) -> None:
    async with router_world(redis_url, cell) as world:
        world.decode.script.grammar.hold()
        call = world.client.stub.Generate(request("r1", grammar=REGEX))
        await world.decode.script.grammar.reached_by(1)
        call.cancel()

        async def left() -> int:
            return world.decode.checks_left

        await until(left, 1)
        await assert_nothing_began(world)


def test_a_router_that_takes_a_seat_over_has_its_grammar() -> None:
    for rule in (
        GrammarRule(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string"})),
        GrammarRule(GrammarKind.REGEX, "a+"),
        GrammarRule(GrammarKind.EBNF, 'root ::= "a"'),
        GrammarRule(GrammarKind.JSON_OBJECT),
    ):
        assert rule_from(grammar_message(rule)) == rule
        opening = decode_pb2.Open(prompt_token_ids=[1], max_output_tokens=1, grammar=grammar_message(rule))
        assert adopted_request(new_record("r1"), opening, ServedModel("m", "s", 10, 10)).grammar == rule
