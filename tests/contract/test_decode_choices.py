"""Several outputs of one prompt at a decode member, over the wire: each is what it would be alone."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from rpc.details import details_from
from tandem.pools.v1 import decode_pb2, grant_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import Member, Seat, decode_member

PROMPT = tuple(b"prompt")
DRAWN = v1.SamplingParams(temperature=1.0, seed=11)
TOP = v1.LogProbabilityParams(top=0)


@dataclass
class Family(Seat):
    """A seat of several outputs; what was told of each, by index."""

    texts_of: dict[int, str] = field(default_factory=dict)
    tokens_of: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    told_ends: list[Any] = field(default_factory=list)

    def _take(self, output: Any) -> None:
        self.outputs.append(output)
        index = output.choice
        assert index not in self.ends, f"choice {index} goes on after its end"
        self.tokens_of.setdefault(index, []).extend(output.selected_token_ids)
        event = v1.GenerateResponse.FromString(output.response)
        if output.response:
            assert event.sequence_no + 1 == output.next_sequence_no
            self.deltas.append(event)
            told = getattr(event, event.WhichOneof("event"))
            if event.WhichOneof("event") != "prompt":
                assert told.index == index and output.text_bytes == len(told.text.encode())
                assert output.returned_tokens == len(told.token_ids)
                self.texts_of[index] = self.texts_of.get(index, "") + told.text
            if event.WhichOneof("event") == "choice_ended":
                self.told_ends.append(event.choice_ended)
                assert output.ended.finish_reason == event.choice_ended.finish_reason
        if output.HasField("ended"):
            self.ends[index] = output.ended


def choices(*indexes: int) -> list[Any]:
    return [decode_pb2.Choice(index=index) for index in indexes]


async def family(member: Member, prompt: tuple[int, ...], told: list[Any], **changes: Any) -> Family:
    """Open a seat for several outputs; with `prefill` its prompt is handed over."""
    message = member.message(prompt, **{"sampling": DRAWN, "max_output_tokens": 24, "choices": told, **changes})
    seat = Family(member.stub.Decode(), message.key.request_id, message.hold_s > 0)
    await seat.send(open=message)
    if message.HasField("prefill"):
        granted = await seat.until("granted")
        assert granted.grant.token_count == len(prompt)
        member.writer.fill(granted.grant, prompt)
    return seat


def spread(member: Member) -> None:
    """Draws differ from one index to the next."""
    member.runner.letters = member.writer._runner.letters = 99.0


async def alone(member: Member, prompt: tuple[int, ...], index: int, **changes: Any) -> str:
    seat = await (await family(member, prompt, choices(index), **changes)).finish()
    return seat.texts_of[index]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_each_output_is_what_it_is_alone(length: int, handed_over: bool) -> None:
    prompt = tuple(range(1, length + 1))
    async with decode_member() as member:
        spread(member)
        peer = {"prefill": member.writer.peer} if handed_over else {}
        seat = await (await family(member, prompt, choices(0, 1, 2), **peer)).finish()
        assert seat.order[:2] == ["granted", "committed"] and seat.order.count("committed") == 1
        assert sorted(seat.ends) == [0, 1, 2] and len(seat.told_ends) == 3
        assert len(set(seat.texts_of.values())) == 3, "the draws do not differ"
        for index in range(3):
            assert seat.texts_of[index] == await alone(member, prompt, index)
        single = await (await member.open(prompt, sampling=DRAWN, max_output_tokens=24)).finish()
        assert single.text == seat.texts_of[0]
        usage = seat.ended.usage
        assert (usage.prompt_tokens, usage.selected_tokens) == (length, 3 * 24)
        assert usage.processed_tokens == length + 3 * 23
        await member.assert_empty()


async def test_behind_a_window_too() -> None:
    async with decode_member(window=6) as member:
        spread(member)
        seat = await (await family(member, PROMPT * 3, choices(0, 1, 2), max_output_tokens=40)).finish()
        for index in range(3):
            assert seat.texts_of[index] == await alone(member, PROMPT * 3, index, max_output_tokens=40)
        await member.assert_empty()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_outputs_that_are_preempted_one_by_one_go_on_as_they_were(preemption: str) -> None:
    tight: dict[str, Any] = {"reservation": "expected", "preemption": preemption, "total_pages": 24, "prefix_cache": False}
    async with decode_member(**tight) as member:
        spread(member)
        lengths: dict[str, Any] = {"max_output_tokens": 20}
        texts = [await alone(member, PROMPT, index, **lengths) for index in range(4)]
        families = [await family(member, PROMPT, choices(0, 1, 2, 3), **lengths) for _ in range(3)]
        for one in families:
            seat = await one.finish()
            if seat.refused is None:
                assert [seat.texts_of[index] for index in range(4)] == texts
        await member.assert_empty()


@pytest.mark.parametrize("ended", [0, 1, 2])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_b43_one_that_is_cancelled_leaves_its_siblings_alone(ended: int, handed_over: bool) -> None:
    async with decode_member() as member:
        spread(member)
        texts = [await alone(member, PROMPT, index) for index in range(3)]
        member.runner.gate.hold()
        peer = {"prefill": member.writer.peer} if handed_over else {}
        seat = await family(member, PROMPT, choices(0, 1, 2), **peer)
        member.runner.gate.step(4)
        while len(seat.tokens_of.get(ended, [])) < 3:
            await seat.until("output")
        await member.runner.gate.stopped()
        for _ in range(2):  # any number of times
            await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel", choice=ended))
        await member.step_with()
        member.runner.gate.release()
        await seat.finish()
        assert seat.ends[ended].finish_reason == v1.FINISH_REASON_CANCELLED
        for index in range(3):
            if index == ended:
                assert texts[index].startswith(seat.texts_of[index]) and seat.texts_of[index] != texts[index]
            else:
                assert seat.texts_of[index] == texts[index]
        assert seat.ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
        await member.assert_empty()


@pytest.mark.parametrize("order", [(0,), (1, 0), (0, 1, 2), (2, 1, 0)])
async def test_one_that_is_cancelled_before_the_prompt_is_there(order: tuple[int, ...]) -> None:
    """Also the one that the prompt's KV comes for: the others get it all the same."""
    async with decode_member() as member:
        spread(member)
        texts = [await alone(member, PROMPT, index) for index in range(3)]
        message = member.message(
            PROMPT, sampling=DRAWN, max_output_tokens=24, choices=choices(0, 1, 2), prefill=member.writer.peer
        )
        seat = Family(member.stub.Decode(), message.key.request_id)
        await seat.send(open=message)
        granted = await seat.until("granted")
        for index in order:
            await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel", choice=index))
        if len(order) < 3:
            await member.until_books(lambda books: books["seats"] == 3 - sum(index > 0 for index in order), "they have ended")
            member.writer.fill(granted.grant, PROMPT)
        await seat.finish()
        for index in range(3):
            assert seat.texts_of.get(index, "") == ("" if index in order else texts[index])
            cancelled = seat.ends[index].finish_reason == v1.FINISH_REASON_CANCELLED
            assert cancelled == (index in order)
        await member.assert_empty()


async def test_a_cancel_of_the_request_ends_all() -> None:
    async with decode_member() as member:
        member.runner.gate.hold()
        seat = await family(member, PROMPT, choices(0, 1))
        member.runner.gate.step(3)
        await seat.until("output")
        await member.runner.gate.stopped()
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await member.until_noted()
        member.runner.gate.release()
        await seat.finish()
        assert {end.finish_reason for end in seat.ends.values()} == {v1.FINISH_REASON_CANCELLED}
        assert seat.ended.finish_reason == v1.FINISH_REASON_CANCELLED
        await member.assert_empty()


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("mode", [v1.OUTPUT_MODE_DELTA, v1.OUTPUT_MODE_FINAL_ONLY])
async def test_another_member_goes_on_with_each_from_its_own_tokens(handed_over: bool, mode: int) -> None:
    """0 has ended, 1 is further than 2, 3 has no token yet."""
    async with decode_member() as member:
        spread(member)
        whole = await (await family(member, PROMPT, choices(0, 1, 2, 3))).finish()
        told = [
            decode_pb2.Choice(index=0, ended=decode_pb2.ChoiceEnd(finish_reason=v1.FINISH_REASON_EOS)),
            *(resumed(whole, index, count, mode) for index, count in ((1, 9), (2, 2), (3, 0))),
        ]
        peer = {"prefill": member.writer.peer} if handed_over else {}
        key = grant_pb2.AttemptKey(request_id=whole.request_id, attempt=2)
        seat = await (await family(member, PROMPT, told, key=key, first_sequence_no=12, output_mode=mode, **peer)).finish()
        assert sorted(seat.ends) == [1, 2, 3]
        for choice in told[1:]:
            before = "" if mode == v1.OUTPUT_MODE_FINAL_ONLY else whole.texts_of[choice.index][: choice.sent_text_bytes]
            assert before + seat.texts_of[choice.index] == whole.texts_of[choice.index]
            assert [*choice.output_token_ids, *seat.tokens_of[choice.index]] == whole.tokens_of[choice.index]
        await member.assert_empty()


def resumed(whole: Family, index: int, count: int, mode: int) -> Any:
    sent = 0 if mode == v1.OUTPUT_MODE_FINAL_ONLY else count
    return decode_pb2.Choice(
        index=index, output_token_ids=whole.tokens_of[index][:count], sent_text_bytes=sent, returned_tokens=sent
    )


@pytest.mark.parametrize("events", range(0, 13, 3))
async def test_a_stream_that_breaks_anywhere_is_joined_to_the_undisturbed_one(events: int) -> None:
    async with decode_member() as member:
        spread(member)
        key = grant_pb2.AttemptKey(request_id="held", attempt=1)
        whole = await (await family(member, PROMPT, choices(0, 1, 2), max_output_tokens=6)).finish()
        seat = await family(member, PROMPT, choices(0, 1, 2), max_output_tokens=6, key=key, hold_s=20.0)
        await seat.until("committed")
        while len(seat.deltas) < events and seat.ended is None:
            await seat.next()
        seat.call.cancel()
        await member.until_books(lambda books: books["seats_held"] == 1, "the seat is held")
        next_no = seat.outputs[-1].next_sequence_no if seat.outputs else 1
        again = Family(member.stub.Decode(), "held", True, ends=dict(seat.ends))
        adopt = decode_pb2.Adopt(key=key, incarnation=member.frame.incarnation, next_sequence_no=next_no)
        await again.send(adopt=adopt)
        await again.finish()
        assert again.adopted.next_sequence_no == next_no and len(again.adopted.open.choices) == 3
        for choice in again.adopted.choices:
            index = choice.index
            assert list(choice.output_token_ids) == seat.tokens_of.get(index, [])
            assert choice.sent_text_bytes == len(seat.texts_of.get(index, "").encode())
            assert choice.HasField("ended") == (index in seat.ends)
            assert seat.texts_of.get(index, "") + again.texts_of.get(index, "") == whole.texts_of[index]
        assert sorted(again.ends) == [0, 1, 2]
        await member.assert_empty()


async def test_the_likeliest_are_told_in_their_order() -> None:
    ranked: dict[str, Any] = {"output_mode": v1.OUTPUT_MODE_FINAL_ONLY, "log_probabilities": TOP}
    async with decode_member() as member:
        spread(member)
        every = await (await family(member, PROMPT, choices(0, 1, 2, 3), **ranked)).finish()
        means = {}
        for end in every.told_ends:
            values = [one.log_probability for one in end.log_probabilities]
            assert len(values) == len(end.token_ids)
            means[end.index] = sum(values) / len(values)
        best = sorted(means, key=lambda index: (-means[index], index))[:2]
        seat = await (await family(member, PROMPT, choices(0, 1, 2, 3), told_choices=2, ranks_only=True, **ranked)).finish()
        assert [end.index for end in seat.told_ends] == best
        assert all(not end.log_probabilities for end in seat.told_ends)
        assert [seat.texts_of[index] for index in best] == [every.texts_of[index] for index in best]
        assert sorted(seat.ends) == [0, 1, 2, 3]
        assert {index: end.usage.returned_tokens for index, end in seat.ends.items() if index not in best} == dict.fromkeys(
            set(range(4)) - set(best), 0
        )
        await member.assert_empty()


async def test_a_failure_of_one_is_its_own() -> None:
    async with decode_member() as member:
        spread(member)
        texts = [await alone(member, PROMPT, index) for index in range(3)]
        bad = tuple(texts[1][:5].encode())
        member.runner.poison_when = lambda history: history[len(PROMPT) :] == bad
        seat = await (await family(member, PROMPT, choices(0, 1, 2))).finish()
        assert seat.ends[1].finish_reason == v1.FINISH_REASON_MODEL_ERROR
        assert [seat.texts_of[0], seat.texts_of[1], seat.texts_of[2]] == [texts[0], texts[1][:5], texts[2]]
        assert seat.ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
        await member.assert_empty()


async def test_more_than_the_member_has_places_for_is_refused() -> None:
    async with decode_member(max_sequences=2) as member:
        seat = await (await family(member, PROMPT, choices(0, 1, 2))).finish()
        assert seat.refused.reason == "too_many_sequences" and "3 sequences" in seat.refused.detail
        await member.assert_empty()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"choices": choices(0, 0)}, "choices"),
        ({"choices": choices(128)}, "choices"),
        ({"choices": [decode_pb2.Choice(index=0, ended=decode_pb2.ChoiceEnd())]}, "choices"),
        ({"choices": choices(0), "output_token_ids": [1]}, "output_token_ids"),
        ({"choices": choices(0, 1), "told_choices": 1}, "told_choices"),
        ({"choices": [], "told_choices": 1}, "told_choices"),
        ({"choices": [decode_pb2.Choice(index=0, returned_tokens=1)]}, "choices[0].returned_tokens"),
    ],
)
async def test_what_is_wrong_with_choices_is_named(changes: dict[str, Any], field: str) -> None:
    async with decode_member() as member:
        told = changes.pop("choices")
        seat = await family(member, PROMPT, told, **changes)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await seat.next()
        assert [one.field for one in details_from(failed.value).violations] == [f"open.{field}"]
        await member.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("handed_over", [False, True])
async def test_each_follows_the_grammar_at_its_own_place(handed_over: bool) -> None:
    async with decode_member(total_pages=300, context_tokens=1024) as member:
        peer = {"prefill": member.writer.peer} if handed_over else {}
        drawn = v1.SamplingParams(temperature=10.0, seed=3)
        wanted: dict[str, Any] = {"grammar": v1.Grammar(regex="(ab|cde|f{2,4}){3,6}"), "sampling": drawn, "max_output_tokens": 60}
        seat = await (await family(member, PROMPT, choices(0, 1, 2), **wanted, **peer)).finish()
        for index, end in seat.ends.items():
            assert end.finish_reason in (v1.FINISH_REASON_EOS, v1.FINISH_REASON_GRAMMAR_COMPLETE)
            assert re.fullmatch("(ab|cde|f{2,4}){3,6}", seat.texts_of[index])
            assert seat.texts_of[index] == await alone(member, PROMPT, index, **wanted)
        assert len(set(seat.texts_of.values())) > 1
        await member.assert_empty()


async def test_stops_penalties_and_log_probabilities_are_each_ones_own() -> None:
    async with decode_member() as member:
        spread(member)
        wanted: dict[str, Any] = {
            "sampling": v1.SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.2, presence_penalty=0.5),
            "stop": v1.StopParams(sequences=["e", "xy"], min_output_tokens=3),
            "log_probabilities": v1.LogProbabilityParams(top=2, prompt=True),
            "echo_prompt": True,
            "max_output_tokens": 40,
        }
        seat = await (await family(member, PROMPT, choices(0, 1, 2), **wanted)).finish()
        prompts = [event.prompt for event in seat.deltas if event.HasField("prompt")]
        assert [bytes(prompts[0].token_ids), len(prompts)] == [bytes(PROMPT), 1]
        for index in range(3):
            single = await (await family(member, PROMPT, choices(index), **wanted)).finish()
            assert seat.ends[index].finish_reason == single.ends[index].finish_reason
            assert (seat.texts_of[index], told(seat, index)) == (single.texts_of[index], told(single, index))
        assert len({end.finish_reason for end in seat.ends.values()}) >= 1
        await member.assert_empty()


def told(seat: Family, index: int) -> list[float]:
    """Log-probabilities of a choice, in order."""
    events = [getattr(event, event.WhichOneof("event")) for event in seat.deltas if not event.HasField("prompt")]
    return [one.log_probability for event in events if event.index == index for one in event.log_probabilities]


async def test_drafts_change_no_token_of_any() -> None:
    """What repeats is drafted; each output is checked by its own draws."""
    drafting: dict[str, Any] = {"speculation": "prompt_lookup", "lookup_shortest": 1, "draft_tokens": 4, "context_tokens": 256}
    repeating = {PROMPT: (b"abcabcabd" * 8)}
    async with decode_member(repeating) as plain, decode_member(repeating, **drafting) as member:
        for one in (plain, member):
            one.runner.letters = 97.0
        wanted = await (await family(plain, PROMPT, choices(0, 1, 2), max_output_tokens=60)).finish()
        seat = await (await family(member, PROMPT, choices(0, 1, 2), max_output_tokens=60)).finish()
        assert seat.texts_of == wanted.texts_of
        drafted = [rows.draft_tokens for batch in member.runner.batches for rows in batch.rows]
        assert any(drafted)
        await member.assert_empty()


async def test_a_lost_prefill_ends_all_and_tells_no_end_of_any() -> None:
    """They go on elsewhere: what could be told of them is told there."""
    async with decode_member() as member:
        message = member.message(PROMPT, sampling=DRAWN, choices=choices(0, 1, 2), prefill=member.writer.peer)
        seat = Family(member.stub.Decode(), message.key.request_id)
        await seat.send(open=message)
        await seat.until("granted")
        await seat.send(prefill_lost=decode_pb2.PrefillLost(cause="prefill_lost", drained=True))
        await seat.finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (v1.FINISH_REASON_TRANSPORT_ERROR, "prefill_lost")
        assert not seat.outputs
        await member.assert_empty()


async def test_a_member_that_stops_tells_the_ends_that_there_were() -> None:
    async with decode_member() as member:
        member.runner.gate.hold()
        seat = await family(member, PROMPT, choices(0, 1), stop=v1.StopParams(token_ids=[]), max_output_tokens=24)
        member.runner.gate.step(4)
        while len(seat.tokens_of.get(1, [])) < 2:
            await seat.until("output")
        await member.runner.gate.stopped()
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel", choice=0))
        await member.step_with()
        while 0 not in seat.ends:
            await seat.until("output")
        stopping = asyncio.ensure_future(member.service.stop())
        member.runner.gate.release()
        await seat.finish()
        await stopping
        assert list(seat.ends) == [0]
        assert (seat.ended.finish_reason, seat.ended.cause) == (v1.FINISH_REASON_TRANSPORT_ERROR, "shutting_down")
