"""A decode member with a draft model, over the wire: what it says is what one without says, and its gauges return to zero."""

import asyncio
from typing import Any

import pytest

from decode_svc.draft_loading import DraftModel
from engine.layout import pages_for
from tandem.pools.v1 import decode_pb2, grant_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from tests.waiting import until

PROMPT = tuple(b"prompt")
DRAFTING: dict[str, Any] = {"speculation": "draft_model", "draft_model": "small", "draft_tokens": 4}
DRAWN = v1.SamplingParams(temperature=1.0, seed=11)


def small(total_pages: int = 64) -> DraftModel:
    """A draft model that says what the member's model says, but at each fifth token."""
    tokenizer = ScriptedTokenizer()
    runner = ScriptedRunner(tokenizer.vocabulary_size, total_pages=total_pages)
    says = runner._otherwise
    runner._otherwise = lambda history: 97 if len(history) % 5 == 0 else says(history)
    return DraftModel("small", runner, tokenizer)


def gauge(member: Member, name: str, **labels: str) -> float:
    value = member.frame.metrics.registry.get_sample_value(f"tandem_decode_{name}", labels)
    return 0.0 if value is None else value


async def accepted(member: Member) -> None:
    """The member says that drafts of its model were right. At first it always asks for some, whatever they cost."""

    async def some() -> bool:
        return gauge(member, "accepted_drafts_total", source="draft_model") > 0

    await until(some, WAIT_S, "drafts were right")


async def settled(member: Member) -> None:
    """Everything is given back, and the gauges say so."""
    await member.assert_empty()

    async def none() -> bool:
        return gauge(member, "draft_pages") == gauge(member, "running_sequences") == gauge(member, "pages", state="owned") == 0

    await until(none, WAIT_S, "the gauges are back at zero")


@pytest.mark.slow
async def test_outputs_are_those_of_a_member_without_one() -> None:
    """Greedy and drawn, alone, beside one another, with a stop, with a grammar."""
    cases: list[dict[str, Any]] = [
        {"max_output_tokens": 40},
        {"max_output_tokens": 40, "sampling": DRAWN, "log_probabilities": v1.LogProbabilityParams(top=1)},
        {"max_output_tokens": 40, "grammar": v1.Grammar(regex="([a-m][n-z]?)*"), "sampling": DRAWN},
    ]
    async with decode_member() as plain, decode_member(drafter=small(), **DRAFTING) as member:
        for one in (plain, member):
            one.runner.letters = 97.0
        cases.append({"max_output_tokens": 40, "stop": v1.StopParams(sequences=[(await whole(plain)).text[7:10]])})
        wanted = [await whole(plain, **case) for case in cases]
        found = [await whole(member, **case) for case in cases]
        found += await asyncio.gather(*(whole(member, **case) for case in cases))
        for seat, other in zip(found, wanted * 2, strict=True):
            assert seat.text == other.text and seat.ended.usage == other.ended.usage
            assert seat.ended.finish_reason == other.ended.finish_reason
        await accepted(member)
        drafts = gauge(member, "drafts_total", source="draft_model")
        assert 0 < gauge(member, "accepted_drafts_total", source="draft_model") < drafts
        assert gauge(member, "draft_tokens_total", outcome="drafted") >= drafts
        await settled(member)


async def whole(member: Member, **changes: Any) -> Seat:
    return await (await member.open(PROMPT, **{"max_output_tokens": 20, **changes})).finish()


async def test_a_cancel_and_a_lost_stream_give_its_pages_back() -> None:
    async with decode_member(drafter=small(), **DRAFTING) as member:
        member.runner.gate.hold()
        seats = [await member.open(PROMPT, max_output_tokens=60, hold_s=30.0), await member.open(PROMPT, max_output_tokens=60)]
        for _ in range(3):
            member.runner.gate.step()
            await member.runner.gate.stopped()
        books = asyncio.ensure_future(member.books())
        await member.step_with()
        assert (await books)["draft_sequences"] and (await books)["draft_pages_used"]
        await seats[0].send(cancel=decode_pb2.CancelSeat(reason="client"))
        seats[1].call.cancel()
        member.runner.gate.release()
        await settled(member)


async def test_an_output_goes_on_behind_tokens_of_another_attempt() -> None:
    """The draft model reads them like a prompt."""
    async with decode_member() as plain, decode_member(drafter=small(), **DRAFTING) as member:
        text = (await whole(plain)).text
        key = grant_pb2.AttemptKey(request_id="again", attempt=2)
        earlier = {"output_token_ids": list(text[:9].encode()), "sent_text_bytes": 9, "returned_tokens": 9}
        seat = await whole(member, key=key, first_sequence_no=10, **earlier)
        assert text[:9] + seat.text == text
        await accepted(member)
        await settled(member)


async def test_with_few_pages_some_go_without() -> None:
    few = 1 + pages_for(len(PROMPT) + 40, 4)
    async with decode_member(drafter=small(few), **DRAFTING) as member:
        one, other = await asyncio.gather(whole(member, max_output_tokens=40), whole(member, max_output_tokens=40))
        assert one.text == other.text and len(one.text) == 40
        await settled(member)


async def test_a_model_with_another_vocabulary_is_refused_at_the_start() -> None:
    other = DraftModel("small", ScriptedRunner(300), ScriptedTokenizer([b"more"]))
    with pytest.raises(ValueError, match="draft_model small has a vocabulary of 258 ids, model scripted one of 257"):
        async with decode_member(drafter=other, **DRAFTING):
            pass
