"""A decode member that goes on with an output that another attempt began, over the wire."""

import grpc
import pytest

from rpc.details import details_from
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import Member, Seat, decode_member

PROMPT = tuple(b"prompt")


async def whole(member: Member, prompt: tuple[int, ...], **changes: object) -> Seat:
    return await (await member.open(prompt, **changes)).finish()


async def resumed(member: Member, prompt: tuple[int, ...], tokens: list[int], handed_over: bool, **changes: object) -> Seat:
    if not handed_over:
        return await member.open(prompt, output_token_ids=tokens, **changes)
    seat = await member.open(prompt, prefill=member.writer.peer, output_token_ids=tokens, **changes)
    granted = await seat.until("granted")
    assert granted.grant.token_count == len(prompt) + len(tokens)
    member.writer.fill(granted.grant, (*prompt, *tokens))
    return seat


@pytest.mark.parametrize("handed_over", [False, True])
async def test_every_split_of_an_output_joins_to_the_undisturbed_one(handed_over: bool) -> None:
    stop = v1.StopParams(sequences=["END"], min_output_tokens=4)
    async with decode_member(total_pages=128) as member:
        said = b"ENDe\xe4\xbd\xa0 EN eEND"
        member.runner.outputs[PROMPT] = said
        member.writer._runner.outputs[PROMPT] = said
        first = await whole(member, PROMPT, max_output_tokens=30, stop=stop)
        assert first.text == "ENDe你 EN e"
        tokens = list(said)
        for k in range(len(tokens)):
            # What an attempt that was cut after k tokens had delivered: everything but what a stop or a character held.
            shown = [d for d in first.deltas if sum(len(o.selected_token_ids) for o in first.outputs[: d.sequence_no]) <= k]
            text = "".join(delta.delta.text for delta in shown)
            told = sum(len(output.selected_token_ids) for output in first.outputs[: len(shown)])
            seat = await resumed(
                member,
                PROMPT,
                tokens[:told],
                handed_over,
                max_output_tokens=30,
                stop=stop,
                sent_text_bytes=len(text.encode()),
                returned_tokens=sum(len(delta.delta.token_ids) for delta in shown),
                first_sequence_no=len(shown) + 1,
            )
            await seat.finish()
            assert text + seat.text == first.text
            ids = [token for delta in (*shown, *seat.deltas) for token in delta.delta.token_ids]
            assert ids == [token for delta in first.deltas for token in delta.delta.token_ids]
            assert (seat.ended.finish_reason, seat.ended.matched_stop) == (v1.FINISH_REASON_STOP_SEQUENCE, "END")
            assert seat.ended.usage == first.ended.usage
            assert [delta.sequence_no for delta in seat.deltas] == [len(shown) + 1 + i for i in range(len(seat.deltas))]
        await member.assert_empty()


async def test_final_only_tells_its_tokens_and_goes_on_with_the_whole_text() -> None:
    async with decode_member(otherwise=lambda history: 97 + len(history) % 26) as member:
        quiet = {"output_mode": v1.OUTPUT_MODE_FINAL_ONLY, "max_output_tokens": 40}
        first = await whole(member, PROMPT, **quiet)
        told = [token for output in first.outputs for token in output.selected_token_ids]
        assert 16 <= len(told) <= 40 and told == list(first.ended.text.encode())[: len(told)]
        assert {output.next_sequence_no for output in first.outputs} == {1} and first.deltas == []
        seat = await resumed(member, PROMPT, told, False, **quiet)
        await seat.finish()
        assert seat.ended.text == first.ended.text and seat.ended.next_sequence_no == 1
        assert seat.ended.usage == first.ended.usage
        await member.assert_empty()


async def test_metrics_count_the_tokens_of_an_earlier_attempt_once() -> None:
    async with decode_member() as member:
        said = member.runner.said(PROMPT, 8)
        seat = await resumed(member, PROMPT, said[:5], False, sent_text_bytes=5, returned_tokens=5, since_last_token_s=0.5)
        await seat.finish()
        assert bytes(said[5:]).decode() == seat.text
        await member.assert_empty()
        text = member.frame.metrics.text()
        for kind in ("selected", "returned", "billed"):
            assert f'tandem_decode_tokens_total{{kind="{kind}"}} 3.0' in text


async def test_a_clock_of_the_earlier_attempt_goes_on() -> None:
    async with decode_member() as member:
        seat = await member.open(
            PROMPT,
            prefill=member.writer.peer,
            output_token_ids=list(b"ab"),
            sent_text_bytes=2,
            inter_token_s=60.0,
            since_last_token_s=59.95,
            first_token_remaining_s=0.0,
        )
        await seat.finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (
            v1.FINISH_REASON_DEADLINE_EXCEEDED,
            "inter_token_engine_stall",
        )
        assert (seat.ended.usage.selected_tokens, seat.ended.usage.returned_tokens) == (2, 2)
        await member.assert_empty()


BAD = [
    ({"output_token_ids": list(b"abcdefgh")}, "open.output_token_ids"),
    ({"output_token_ids": [99999]}, "open.output_token_ids"),
    ({"output_token_ids": [256]}, "open.output_token_ids"),
    ({"output_token_ids": [0xFF]}, "open.output_token_ids"),
    ({"output_token_ids": list(b"xEND"), "stop": v1.StopParams(sequences=["END"])}, "open.output_token_ids"),
    ({"output_token_ids": list(b"ab"), "sent_text_bytes": 3}, "open.sent_text_bytes"),
    ({"sent_text_bytes": 1}, "open.sent_text_bytes"),
    ({"output_token_ids": [0xE4, 0xBD, 0xA0], "sent_text_bytes": 1}, "open.sent_text_bytes"),
    ({"output_token_ids": list(b"ab"), "returned_tokens": 3}, "open.returned_tokens"),
    ({"since_last_token_s": -1.0}, "open.since_last_token_s"),
]


async def test_what_can_not_be_gone_on_with_names_its_field_and_leaves_nothing_behind() -> None:
    async with decode_member() as member:
        for changes, field in BAD:
            seat = await member.open(PROMPT, **changes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await seat.next()
            details = details_from(caught.value)
            assert details.code is grpc.StatusCode.INVALID_ARGUMENT, field
            assert [violation.field for violation in details.violations] == [field]
        await member.assert_empty()
