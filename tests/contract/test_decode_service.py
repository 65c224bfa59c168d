"""A decode member over the wire: conformance, prompts computed here and handed over, refusals, ends."""

import asyncio

import grpc
import pytest

from rpc.details import details_from
from tandem.pools.v1 import decode_pb2, grant_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import Member, Seat, decode_member

PROMPT = tuple(b"prompt")


async def test_a_prompt_computed_here_is_answered() -> None:
    async with decode_member({PROMPT: b"hello"}) as member:
        seat = await (await member.open(PROMPT, max_output_tokens=5)).finish()
        assert seat.order[:2] == ["granted", "committed"]
        assert not seat.granted.HasField("grant")
        assert seat.text == "hello"
        assert seat.deltas[0].sequence_no == 1
        assert [token for output in seat.outputs for token in output.selected_token_ids] == list(b"hello")
        ended = seat.ended
        assert ended.finish_reason == v1.FINISH_REASON_MAX_OUTPUT_TOKENS
        usage = ended.usage
        assert (usage.prompt_tokens, usage.selected_tokens, usage.processed_tokens) == (6, 5, 10)
        assert (usage.returned_tokens, usage.billed_tokens) == (5, 5)
        assert dict(ended.released) == {"pages": 3, "batch_places": 1, "streams": 1}
        assert not ended.HasField("cancel_observed_s")
        await member.assert_empty()


async def test_conformance_a_stop_over_two_tokens() -> None:
    """Tokens "AB", "CD", stop "BCD": text is exactly "A"."""
    async with decode_member(words=(b"AB", b"CD", b"EF")) as member:
        ab, cd, ef = (member.tokenizer.word(word) for word in (b"AB", b"CD", b"EF"))
        member.runner.outputs[PROMPT] = [ab, cd, ef]
        seat = await (await member.open(PROMPT, stop=v1.StopParams(sequences=["BCD"]))).finish()
        assert seat.texts == ["A"]
        assert seat.ended.finish_reason == v1.FINISH_REASON_STOP_SEQUENCE
        assert seat.ended.matched_stop == "BCD"
        assert seat.ended.usage.selected_tokens == 2
        assert seat.order == ["granted", "committed", "output", "ended"]
        await member.assert_empty()


async def test_conformance_b_cancel_between_start_and_end_of_a_step() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        member.runner.gate.hold()
        seat = await member.open(PROMPT)
        member.runner.gate.step(3)  # prompt, decode 1, decode 2; decode 3 waits inside the model
        await member.runner.gate.entered(4)
        while seat.text != "abc":
            await seat.until("output")
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await member.until_noted()
        member.runner.gate.release()
        await seat.finish()
        assert seat.text == "abc"
        assert seat.ended.finish_reason == v1.FINISH_REASON_CANCELLED
        assert seat.ended.cause == "client_cancel"
        assert seat.ended.usage.selected_tokens == 3
        assert seat.ended.usage.processed_tokens == len(PROMPT) + 3
        assert dict(seat.ended.released) == {"pages": 3, "batch_places": 1, "streams": 1}
        assert 0 <= seat.ended.cancel_observed_s <= seat.ended.cancel_effective_s
        await member.assert_empty()


async def test_conformance_c_characters_cut_by_tokens() -> None:
    async with decode_member({PROMPT: bytes.fromhex("e4bda0e5a5bd454e44")}) as member:
        seat = await (await member.open(PROMPT, max_output_tokens=16, stop=v1.StopParams(sequences=["END"]))).finish()
        assert seat.text == "你好"
        assert seat.ended.finish_reason == v1.FINISH_REASON_STOP_SEQUENCE
        await member.assert_empty()


async def test_final_only_has_no_output_and_the_whole_text() -> None:
    async with decode_member({PROMPT: b"hello"}) as member:
        seat = await (
            await member.open(PROMPT, max_output_tokens=5, output_mode=v1.OUTPUT_MODE_FINAL_ONLY, first_sequence_no=7)
        ).finish()
        assert seat.order == ["granted", "committed", "ended"]
        assert seat.ended.text == "hello"
        assert seat.ended.next_sequence_no == 7
        assert seat.ended.usage.returned_tokens == 5
        await member.assert_empty()


async def handed_over(member: Member, prompt: tuple[int, ...], **changes: object) -> Seat:
    seat = await member.open(prompt, prefill=member.writer.peer, **changes)
    granted = await seat.until("granted")
    member.writer.fill(granted.grant, prompt)
    return seat


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
async def test_a_prompt_that_is_handed_over_goes_on_as_if_it_were_computed_here(length: int) -> None:
    prompt = tuple(range(1, length + 1))
    async with decode_member() as member:
        seat = await (await handed_over(member, prompt, max_output_tokens=9)).finish()
        assert [t for o in seat.outputs for t in o.selected_token_ids] == member.runner.said(prompt, 9)
        assert seat.order[:2] == ["granted", "committed"]
        assert seat.granted.grant.token_count == length
        assert seat.ended.released["landing_rows"] == 1
        here = await (await member.open(prompt, max_output_tokens=9)).finish()
        assert here.text == seat.text
        await member.assert_empty()


async def test_the_first_token_of_a_handover_may_end_it() -> None:
    async with decode_member() as member:
        member.runner.outputs[PROMPT] = [member.tokenizer.eos_id]
        member.writer._runner.outputs[PROMPT] = [member.tokenizer.eos_id]
        seat = await (await handed_over(member, PROMPT)).finish()
        assert seat.order == ["granted", "committed", "ended"]
        assert seat.ended.finish_reason == v1.FINISH_REASON_EOS
        assert seat.ended.matched_token_id == member.tokenizer.eos_id
        assert (seat.ended.usage.selected_tokens, seat.ended.usage.billed_tokens) == (1, 1)
        await member.assert_empty()


async def test_many_at_once_each_get_their_own_text() -> None:
    async with decode_member(total_pages=400, step_sequences=8, max_step_tokens=32) as member:
        prompts = [tuple(range(1 + index, 8 + index)) for index in range(16)]
        opened = [
            await (handed_over(member, prompt) if index % 2 else member.open(prompt)) for index, prompt in enumerate(prompts)
        ]
        seats = await asyncio.gather(*(seat.finish() for seat in opened))
        for prompt, seat in zip(prompts, seats, strict=True):
            assert seat.text == bytes(member.runner.said(prompt, 8)).decode()
        for batch in member.runner.batches:
            names = [rows.sequence for rows in batch.rows]
            assert len(names) == len(set(names))
            assert batch.scheduled_tokens <= 32
            assert sum(len(rows.token_ids) == 1 for rows in batch.rows) <= 8 + 4
        await member.assert_empty()


@pytest.mark.parametrize(
    ("changes", "reason", "retryable"),
    [
        ({"incarnation": "other"}, "wrong_incarnation", True),
        ({"model_snapshot": "other"}, "unknown_model", True),
        ({"adapter": grant_pb2.Adapter(name="polite", identity="aa")}, "unknown_adapter", True),
        ({"max_output_tokens": 1000}, "too_long", False),
    ],
)
async def test_what_does_not_fit_is_refused(changes: dict[str, object], reason: str, retryable: bool) -> None:
    async with decode_member() as member:
        seat = await (await member.open(PROMPT, **changes)).finish()
        assert seat.order == ["refused"]
        assert (seat.refused.reason, seat.refused.retryable) == (reason, retryable)
        assert seat.refused.detail
        assert await seat.call.code() is grpc.StatusCode.OK
        await member.assert_empty()


async def test_bounds_are_told() -> None:
    async with decode_member(max_sequences=2, total_pages=9) as member:
        gate = member.runner.gate
        gate.hold()
        first = await member.open(PROMPT, max_output_tokens=15)
        await first.until("granted")

        async def refused(**changes: object) -> str:
            await gate.stopped()
            seat = await member.open(PROMPT, **changes)
            await member.step_with()
            return (await seat.finish()).refused.reason

        assert await refused(max_output_tokens=15) == "no_pages"
        key = grant_pb2.AttemptKey(request_id="same", attempt=1)
        await gate.stopped()
        second = await member.open(PROMPT, key=key, max_output_tokens=4)
        await member.step_with()
        await second.until("granted")
        assert await refused(key=key) == "duplicate_attempt"
        assert await refused(max_output_tokens=1) == "too_many_sequences"
        gate.release()
        await asyncio.gather(first.finish(), second.finish())
        await member.assert_empty()


BAD = [
    ({"key": grant_pb2.AttemptKey(request_id="", attempt=1)}, "open.key.request_id"),
    ({"key": grant_pb2.AttemptKey(request_id="x", attempt=0)}, "open.key.attempt"),
    ({"prompt_token_ids": []}, "open.prompt_token_ids"),
    ({"prompt_token_ids": [99999]}, "open.prompt_token_ids"),
    ({"max_output_tokens": 0}, "open.max_output_tokens"),
    ({"sampling": v1.SamplingParams(temperature=0.0)}, "open.sampling.seed"),
    ({"sampling": v1.SamplingParams(temperature=-1.0, seed=1)}, "open.sampling.temperature"),
    ({"sampling": v1.SamplingParams(top_p=float("nan"), seed=1)}, "open.sampling.top_p"),
    ({"stop": v1.StopParams(sequences=[""])}, "open.stop.sequences"),
    ({"stop": v1.StopParams(sequences=["x"] * 17)}, "open.stop.sequences"),
    ({"stop": v1.StopParams(token_ids=[99999])}, "open.stop.token_ids"),
    ({"sampling": v1.SamplingParams(seed=1, logit_bias={99999: 1.0})}, "open.sampling.logit_bias"),
    ({"priority": 11}, "open.priority"),
    ({"overall_remaining_s": float("nan")}, "open.overall_remaining_s"),
    ({"inter_token_s": -1.0}, "open.inter_token_s"),
    ({"prefill": grant_pb2.Peer(member="p", incarnation="", address="a:1")}, "open.prefill.incarnation"),
]


async def test_a_bad_open_names_its_field_and_leaves_nothing_behind() -> None:
    async with decode_member() as member:
        for changes, field in BAD:
            prompt = changes.pop("prompt_token_ids", PROMPT)
            seat = await member.open(prompt, **changes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await seat.next()
            details = details_from(caught.value)
            assert details.code is grpc.StatusCode.INVALID_ARGUMENT, field
            assert [violation.field for violation in details.violations] == [field]
        await member.assert_empty()


async def test_a_call_that_does_not_begin_with_an_open_is_an_error() -> None:
    async with decode_member() as member:
        seat = Seat(member.stub.Decode())
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await seat.next()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        member.runner.gate.hold()
        second = await member.open(PROMPT)
        await second.until("granted")
        await second.send(open=member.message(PROMPT))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.finish()
        member.runner.gate.release()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await member.assert_empty()


async def test_bytes_that_are_no_message_end_the_call() -> None:
    async with decode_member() as member:
        member.runner.gate.hold()
        call = member.channel.stream_stream("/tandem.pools.v1.DecodeService/Decode")()
        await call.write(decode_pb2.DecodeRequest(open=member.message(PROMPT)).SerializeToString())
        assert decode_pb2.DecodeResponse.FromString(await call.read()).WhichOneof("event") == "granted"
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        member.runner.gate.release()
        await member.assert_empty()


async def test_a_member_that_computes_no_prompts_says_so() -> None:
    async with decode_member(computes_prompts=False) as member:
        seat = await member.open(PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await seat.next()
        assert details_from(caught.value).violations[0].field == "open.prefill"
        handed = await (await handed_over(member, PROMPT)).finish()
        assert handed.ended.usage.selected_tokens == 8
        await member.assert_empty()


async def test_a_model_error_ends_its_step_and_the_member_goes_on() -> None:
    async with decode_member({PROMPT: b"abcdefgh"}) as member:
        member.runner.fail_when = lambda history: bytes(history[len(PROMPT) :]) == b"ab"
        seat = await (await member.open(PROMPT)).finish()
        assert seat.text == "ab"
        assert seat.ended.finish_reason == v1.FINISH_REASON_MODEL_ERROR
        assert seat.ended.cause == "model_failed"
        member.runner.fail_when = lambda history: False
        member.runner.poison_when = lambda history: bytes(history[len(PROMPT) :]) == b"abc"
        poisoned, other = await asyncio.gather(
            *(seat.finish() for seat in [await member.open(PROMPT), await member.open(tuple(b"other"))])
        )
        assert (poisoned.text, poisoned.ended.cause) == ("abc", "model_failed")
        assert other.ended.usage.selected_tokens == 8
        await member.assert_empty()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"first_token_remaining_s": 0.05}, "first_token_deadline"), ({"overall_remaining_s": 0.05}, "overall_deadline")],
)
async def test_clocks_run_out_over_the_wire(changes: dict[str, float], cause: str) -> None:
    async with decode_member(release_wait_s=0.05) as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer, **changes)
        await seat.finish()
        assert seat.ended.finish_reason == v1.FINISH_REASON_DEADLINE_EXCEEDED
        assert seat.ended.cause == cause
        assert member.writer.drains == [seat.granted.grant.grant_id.hex()]
        await member.assert_empty()
