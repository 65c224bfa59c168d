"""A decode member whose outputs have grammars, over the wire."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import jsonschema
import pytest

from decode_svc.draft_records import DraftOrigin
from decode_svc.grammar_compiler import CompileLimits
from engine.grammar_library import Vocabulary
from rpc.details import details_from
from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.grammars import CompilerHere, HeldCompiler
from tests.waiting import until

PROMPT = tuple(b"prompt")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
SCHEMA = v1.Grammar(json_schema=json.dumps(PERSON))


def drawn(seed: int = 1) -> v1.SamplingParams:
    """Any token is as likely as any other that is allowed."""
    return v1.SamplingParams(temperature=10.0, seed=seed, logit_bias={})


def whatever(history: tuple[int, ...]) -> int:
    """A token that says nothing about what may follow."""
    return (sum(history) * 31 + 17 * len(history)) % 250


def rules(member: Member) -> list[Any]:
    """What was compiled."""
    assert member.service._grammars is not None
    compiler = member.service._grammars._compiler
    assert isinstance(compiler, CompilerHere)
    return compiler.rules


async def whole(member: Member, prompt: tuple[int, ...] = PROMPT, **changes: Any) -> Seat:
    return await (await member.open(prompt, **changes)).finish()


@pytest.mark.slow
@pytest.mark.parametrize("handed_over", [False, True])
async def test_the_output_is_what_the_schema_asks_for_and_ends_by_itself(handed_over: bool) -> None:
    async with decode_member(otherwise=whatever, total_pages=300, context_tokens=1024) as member:
        writer = {"prefill": member.writer.peer} if handed_over else {}
        for seed in range(2):
            seat = await member.open(PROMPT, grammar=SCHEMA, sampling=drawn(seed), max_output_tokens=500, **writer)
            if handed_over:
                member.writer.fill((await seat.until("granted")).grant, PROMPT)
            await seat.finish()
            jsonschema.validate(json.loads(seat.text), PERSON)
            assert seat.ended.finish_reason == v1.FINISH_REASON_GRAMMAR_COMPLETE
            assert seat.ended.usage.billed_tokens == seat.ended.usage.selected_tokens == len(seat.told)
        await member.assert_empty()


async def test_an_end_token_can_be_chosen_only_where_the_text_is_whole() -> None:
    async with decode_member() as member:
        eos = member.tokenizer.eos_id
        member.runner.outputs[PROMPT] = [eos, *b"bb", eos]
        seat = await whole(member, grammar=v1.Grammar(regex="a+b*"))
        assert (seat.text, seat.ended.finish_reason) == ("abb", v1.FINISH_REASON_EOS)
        ignoring = v1.StopParams(ignore_eos=True)
        seat = await whole(member, grammar=v1.Grammar(regex="a+b*"), stop=ignoring, max_output_tokens=6)
        assert re.fullmatch("a+b*", seat.text) and len(seat.text) == 6
        assert seat.ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
        await member.assert_empty()


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("regex", "a(b", "position 4"),
        ("ebnf", 'root ::= "a" b', "line 1, column 14"),
        ("regex", "()", "empty"),
    ],
)
async def test_a_bad_grammar_gets_no_seat(field: str, text: str, words: str) -> None:
    async with decode_member() as member:
        grammar = v1.Grammar(**{field: text})
        for _ in range(2):
            seat = await whole(member, grammar=grammar)
            assert (seat.refused.reason, seat.refused.retryable) == ("bad_grammar", False)
            assert words in seat.refused.detail
        request = decode_pb2.CheckGrammarRequest(model_snapshot=member.runner.layout.model_snapshot, grammar=grammar)
        answer = await member.stub.CheckGrammar(request)
        assert words in answer.problem and not answer.costly
        assert len(rules(member)) == 1, "what is known to be bad is not compiled again"
        await member.assert_empty()


async def test_a_grammar_that_can_be_seen_to_be_bad_is_an_invalid_argument() -> None:
    async with decode_member() as member:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whole(member, grammar=v1.Grammar(json_schema='{"type": "string", "not": {}}'))
        found = details_from(caught.value)
        assert found.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [one.field for one in found.violations] == ["open.grammar.json_schema"]
        assert rules(member) == []
        await member.assert_empty()


async def test_a_checked_grammar_is_compiled_for_its_seats() -> None:
    async with decode_member() as member:
        snapshot = member.runner.layout.model_snapshot
        request = decode_pb2.CheckGrammarRequest(model_snapshot=snapshot, grammar=v1.Grammar(json_object=v1.JsonObject()))
        assert (await member.stub.CheckGrammar(request)).problem == ""
        seat = await whole(member, grammar=request.grammar, max_output_tokens=4)
        assert seat.text.startswith("{") and len(rules(member)) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await member.stub.CheckGrammar(decode_pb2.CheckGrammarRequest(model_snapshot="other", grammar=request.grammar))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.slow
async def test_tokens_are_the_same_alone_and_in_a_batch() -> None:
    async with decode_member(otherwise=whatever, total_pages=600, context_tokens=128) as member:
        asked = [
            {"grammar": SCHEMA, "sampling": drawn(1)},
            {"grammar": v1.Grammar(regex="[a-f]{5,20}"), "sampling": drawn(2)},
            {"sampling": drawn(3), "utf8_policy": v1.UTF8_POLICY_DROP},
            {"grammar": SCHEMA, "sampling": v1.SamplingParams(temperature=0.0, seed=4, frequency_penalty=0.5)},
        ]
        alone = [await whole(member, max_output_tokens=60, **one) for one in asked]
        together = await asyncio.gather(*(whole(member, max_output_tokens=60, **one) for one in asked * 3))
        for index, seat in enumerate(together):
            assert (seat.text, seat.ended.usage) == (alone[index % 4].text, alone[index % 4].ended.usage)
        await member.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_an_output_goes_on_after_any_of_its_tokens(handed_over: bool, drafting: bool) -> None:
    settings = {"speculation": "prompt_lookup", "lookup_shortest": 1} if drafting else {}
    async with decode_member(otherwise=whatever, total_pages=300, context_tokens=1024, **settings) as member:
        grammar = v1.Grammar(regex='\\{"a":[0-9]{3},"b":"[a-z]{2,6}","a":(10){3,9}\\}')
        changes: dict[str, Any] = {"grammar": grammar, "sampling": drawn(7), "max_output_tokens": 60}
        member.writer._runner._otherwise = whatever
        first = await whole(member, **changes)
        tokens = first.told
        assert first.text == bytes(tokens).decode() and first.ended.finish_reason == v1.FINISH_REASON_GRAMMAR_COMPLETE
        for k in range(1, len(tokens)):
            writer = {"prefill": member.writer.peer} if handed_over else {}
            seat = await member.open(
                PROMPT, output_token_ids=tokens[:k], sent_text_bytes=k, returned_tokens=k, **writer, **changes
            )
            if handed_over:
                member.writer.fill((await seat.until("granted")).grant, (*PROMPT, *tokens[:k]))
            await seat.finish()
            assert first.text[:k] + seat.text == first.text
            assert seat.ended.finish_reason == first.ended.finish_reason and seat.ended.usage == first.ended.usage
        assert any(rows.draft_tokens for batch in member.runner.batches for rows in batch.rows) == drafting
        await member.assert_empty()


@pytest.mark.parametrize("tokens", [b'{"nane"', b'{"name":"a","age":1}'])
async def test_tokens_that_the_grammar_can_not_have_had_are_refused(tokens: bytes) -> None:
    grammar = v1.Grammar(json_schema=json.dumps({**PERSON, "required": ["name", "age", "tags"]}))
    if tokens.endswith(b"}"):
        grammar = v1.Grammar(regex='\\{"name":"a","age":1\\}')
    async with decode_member() as member:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await whole(member, grammar=grammar, output_token_ids=list(tokens), max_output_tokens=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "grammar" in str(caught.value.details())
        await member.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recompute", "swap"])
async def test_a_preempted_output_is_the_undisturbed_one(kind: str) -> None:
    """With drafts where it is preempted, without where it is not."""
    changes: dict[str, Any] = {"grammar": v1.Grammar(regex="([a-f][0-9])*"), "stop": v1.StopParams(ignore_eos=True)}

    def output(member: Member, seed: int) -> Awaitable[Seat]:
        return whole(member, (seed,) * 4, sampling=drawn(seed), max_output_tokens=30, **changes)

    async with decode_member(otherwise=whatever) as member:
        alone = [await output(member, seed) for seed in range(3)]
    drafting = {"speculation": "prompt_lookup", "lookup_shortest": 1}
    settings = {"reservation": "expected", "preemption": kind, "swap_pages": 16, **drafting}
    async with decode_member(otherwise=whatever, total_pages=13, **settings) as member:
        for _ in range(8):  # so that no more than a token is expected of the next ones
            await whole(member, (9,), max_output_tokens=1)
        member.runner.gate.hold()  # until all are there: one after the other they would have room
        running = [asyncio.ensure_future(output(member, seed)) for seed in range(3)]
        await until(lambda: _streams(member, 3), WAIT_S, "all three are there")
        member.runner.gate.release()
        together = await asyncio.gather(*running)
        assert [seat.text for seat in together] == [seat.text for seat in alone]
        assert all(re.fullmatch("([a-f][0-9]){15}", seat.text) for seat in alone)
        await until(lambda: _preempted(member, kind), WAIT_S, "one was preempted")
        assert any(rows.draft_tokens for batch in member.runner.batches for rows in batch.rows)
        await member.assert_empty()


REPEATS = v1.Grammar(regex="(ab|ba|c[0-9])*")
ON = v1.StopParams(ignore_eos=True)
PENALISED = v1.SamplingParams(temperature=10.0, seed=5, repetition_penalty=1.2)
DRAFTED: dict[str, dict[str, Any]] = {
    "greedy": {"grammar": REPEATS, "stop": ON},
    "drawn": {"grammar": REPEATS, "stop": ON, "sampling": drawn(3), "log_probabilities": v1.LogProbabilityParams(top=2)},
    "schema": {"grammar": v1.Grammar(json_schema=json.dumps(PERSON)), "sampling": drawn(4)},
    "penalised": {"grammar": REPEATS, "stop": ON, "sampling": PENALISED},
    "stop": {"grammar": v1.Grammar(regex="(abcabd)*"), "stop": v1.StopParams(sequences=["bdabcabdab"])},
    "at least": {"grammar": v1.Grammar(regex="a(ba)*"), "stop": v1.StopParams(sequences=["aba"], min_output_tokens=20)},
    "complete": {"grammar": v1.Grammar(regex="(ab){12}")},
    "stuck": {"grammar": v1.Grammar(ebnf='root ::= "ababababab" x\nx ::= x "b"')},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAFTED)
async def test_drafts_change_nothing_that_a_grammar_lets_through(case: str) -> None:
    """Alone and beside another one; stops, ends and places without any token are where they are without drafts."""
    changes = {"max_output_tokens": 60, **DRAFTED[case]}
    drafting: dict[str, Any] = {"speculation": "prompt_lookup", "lookup_shortest": 1, "draft_tokens": 6}
    async with decode_member(otherwise=whatever) as plain, decode_member(otherwise=whatever, **drafting) as member:
        wanted = [await whole(plain, prompt, **changes) for prompt in (PROMPT, b"another")]
        found = [await whole(member, PROMPT, **changes)]
        found += await asyncio.gather(whole(member, b"another", **changes), whole(member, PROMPT, **changes))
        for one, other in zip(found, [wanted[0], wanted[1], wanted[0]], strict=True):
            assert one.text == other.text
            assert one.ended.finish_reason == other.ended.finish_reason and one.ended.usage == other.ended.usage
            assert _log_probabilities(one) == _log_probabilities(other)
        assert any(rows.draft_tokens for batch in member.runner.batches for rows in batch.rows)
        await member.assert_empty()


def _log_probabilities(seat: Seat) -> list[Any]:
    return [one for event in seat.deltas for one in event.delta.log_probabilities]


async def test_a_repeating_output_with_a_grammar_takes_fewer_steps() -> None:
    changes: dict[str, Any] = {"max_output_tokens": 30, "stop": v1.StopParams(ignore_eos=True)}
    async with decode_member(otherwise=lambda history: 97 + len(history) % 2, speculation="prompt_lookup") as member:
        free = await whole(member, **changes)
        member.runner.batches.clear()
        seat = await whole(member, grammar=v1.Grammar(regex="(ab|ba)*"), **changes)
        assert seat.text == free.text and len(member.runner.batches) < 20
        await member.assert_empty()


async def test_what_a_schema_forces_is_drafted() -> None:
    named = {"first_and_last_name": {"enum": ["somebody", "nobody"]}, "place_of_birth": {"const": "somewhere else"}}
    text = json.dumps({"type": "object", "properties": named, "required": list(named), "additionalProperties": False})
    changes = {"grammar": v1.Grammar(json_schema=text), "max_output_tokens": 110, "sampling": drawn(3)}
    async with (
        decode_member(otherwise=whatever) as plain,
        decode_member(otherwise=whatever, speculation="prompt_lookup") as member,
    ):
        wanted, seat = await whole(plain, **changes), await whole(member, **changes)
        assert seat.text == wanted.text and json.loads(seat.text)["place_of_birth"] == "somewhere else"
        assert seat.ended.usage == wanted.ended.usage and seat.ended.finish_reason == wanted.ended.finish_reason
        assert len(member.runner.batches) < len(plain.runner.batches) * 2 / 3
        await member.assert_empty()
        assert member.service._worker is not None
        counts = member.service._worker._scheduler.speculation.counts_by_origin()[DraftOrigin.GRAMMAR]
        assert counts.accepted_tokens == counts.drafted_tokens > 20


async def test_a_sequence_that_the_grammar_leaves_no_token_fails_and_no_other() -> None:
    async with decode_member() as member:
        stuck, other = await asyncio.gather(whole(member, grammar=v1.Grammar(ebnf='root ::= "a" x\nx ::= x "b"')), whole(member))
        assert (stuck.ended.finish_reason, stuck.ended.cause) == (v1.FINISH_REASON_MODEL_ERROR, "grammar_failed")
        assert stuck.text == "a" and other.ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
        await member.assert_empty()


class _Held:
    """Makes the compiler whose compiles a test holds."""

    def __call__(self, make: Callable[[], Vocabulary], limits: CompileLimits) -> HeldCompiler:
        self.compiler = HeldCompiler(make, limits)
        return self.compiler


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_a_cancel_is_heard_while_a_grammar_is_compiled(how: str) -> None:
    held = _Held()
    async with decode_member(make_compiler=held) as member:
        seat = await member.open(PROMPT, grammar=SCHEMA)
        await held.compiler.begun.wait()
        if how == "cancel":
            await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
            await seat.finish()
            assert (seat.refused.reason, seat.refused.retryable) == ("cancelled", False)
        else:
            seat.call.cancel()

        async def given_up() -> bool:
            return held.compiler.cancelled == 1

        await until(given_up, 10.0, "the compile is given up")
        await member.assert_empty()


async def test_compiles_that_wait_are_bounded() -> None:
    held = _Held()
    async with decode_member(make_compiler=held, grammar_waiting=1) as member:
        seat = await member.open(PROMPT, grammar=SCHEMA, max_output_tokens=1)
        await held.compiler.begun.wait()
        joined = await member.open(PROMPT, grammar=SCHEMA, max_output_tokens=1)
        other = await whole(member, grammar=v1.Grammar(regex="a"))
        assert (other.refused.reason, other.refused.retryable) == ("grammar_busy", True)
        held.compiler.go.set()
        for one in (seat, joined):
            assert (await one.finish()).text == "{"
        assert len(held.compiler.rules) == 1
        await member.assert_empty()


async def _preempted(member: Member, kind: str) -> bool:
    snapshot = member.service.snapshot
    return snapshot is not None and snapshot.preemptions[kind] >= 1


async def _streams(member: Member, count: int) -> bool:
    return len(member.service.streams) == count
