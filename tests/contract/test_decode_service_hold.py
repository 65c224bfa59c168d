"""Seats that outlive their stream, over the wire: held, adopted, given up; slow readers by policy."""

import asyncio
from typing import Any

import grpc
import pytest

from router.member_link import Member as RouterMember
from router.member_link import MemberInfo
from router.pool_messages import SeatEnd
from router.seat import SeatLimits, seat_stream
from rpc import clocks
from rpc.details import details_from
from tandem.pools.v1 import decode_pb2, grant_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.waiting import until

PROMPT = tuple(b"prompt")
KEY = grant_pb2.AttemptKey(request_id="held", attempt=2)
HELD: dict[str, Any] = {"key": KEY, "hold_s": 20.0}


async def held(member: Member) -> None:
    """Wait until the member has noticed that nobody reads the seat."""
    await member.until_books(lambda books: books["seats_held"] == 1, "the seat is held")


async def abandoned(member: Member, seat: Seat) -> None:
    """The call breaks as when its router dies."""
    seat.call.cancel()
    await held(member)


async def test_a_seat_whose_end_is_taken_leaves_nothing() -> None:
    async with decode_member({PROMPT: b"hello"}) as member:
        seat = await (await member.open(PROMPT, max_output_tokens=5, **HELD)).finish()
        assert seat.text == "hello"
        await member.assert_empty()


@pytest.mark.parametrize("characters", range(7))
async def test_a_stream_that_breaks_anywhere_is_joined_to_the_undisturbed_one(characters: int) -> None:
    """Broken after so many characters were read, the last time after the end; adopted at the number that follows."""
    async with decode_member({PROMPT: "añb你c".encode()}) as member:
        whole = await (await member.open(PROMPT, max_output_tokens=8, hold_s=5.0)).finish()
        seat = await member.open(PROMPT, max_output_tokens=8, **HELD)
        await until_streams(member)
        while len(seat.text) < characters and seat.ended is None:
            await seat.next()
        await abandoned(member, seat)
        next_no = seat.outputs[-1].next_sequence_no if seat.outputs else 1
        again = await (await member.adopt(KEY, next_no)).finish()
        assert again.order[0] == "adopted" and again.adopted.next_sequence_no == next_no
        assert seat.text + again.text == whole.text == "añb你c"
        told = [t for output in seat.outputs for t in output.selected_token_ids]
        assert list(again.adopted.output_token_ids) == told
        assert again.adopted.sent_text_bytes == len(seat.text.encode())
        assert again.adopted.returned_tokens == sum(output.returned_tokens for output in seat.outputs)
        told += [t for output in again.outputs for t in output.selected_token_ids]
        assert bytes(told) == "añb你c".encode()
        assert again.ended.usage == whole.ended.usage and again.ended.finish_reason == whole.ended.finish_reason
        await member.assert_empty()


async def test_what_comes_again_is_what_came_byte_for_byte() -> None:
    async with decode_member({PROMPT: b"hello"}) as member:
        seat = await member.open(PROMPT, max_output_tokens=5, **HELD)
        await seat.until("ended")
        await abandoned(member, seat)
        for wanted in (1, seat.outputs[-1].next_sequence_no - 1, seat.outputs[-1].next_sequence_no):
            again = await member.adopt(KEY, wanted)
            await again.until("ended")
            assert [o.SerializeToString() for o in again.outputs] == [o.SerializeToString() for o in seat.outputs[wanted - 1 :]]
            seat.ended.ClearField("last")  # it comes again as an output, like those before it
            assert again.ended.SerializeToString() == seat.ended.SerializeToString()
            assert again.adopted.open.key == KEY and list(again.adopted.open.prompt_token_ids) == list(PROMPT)
            assert again.adopted.HasField("committed") and again.granted is None and again.committed is None
            await abandoned(member, again)
        await (await member.adopt(KEY, 1)).finish()
        await member.assert_empty()


async def test_adopted_before_the_grant_and_before_the_commit() -> None:
    async with decode_member() as member:
        plain = await member.open(PROMPT, prefill=member.writer.peer, **HELD)
        granted = await plain.until("granted")
        await abandoned(member, plain)
        again = await member.adopt(KEY, 1)
        assert (await again.next(), await again.next()) == ("adopted", "granted")
        assert again.granted == granted and not again.adopted.HasField("committed")
        await abandoned(member, again)
        # The hand-over goes on while nobody reads.
        member.writer.fill(granted.grant, PROMPT)
        await member.until_books(lambda books: books["grants_open"] == 0, "the hand-over is complete")
        last = await (await member.adopt(KEY, 1)).finish()
        assert last.order[:2] in (["adopted", "output"], ["adopted", "granted"])
        assert last.text == bytes(member.runner.said(PROMPT, 8)).decode()
        await member.assert_empty()
        member.runner.gate.hold()
        early = await member.open(PROMPT, **HELD)
        await until_streams(member)
        early.call.cancel()
        await until_held(member)
        member.runner.gate.release()
        found = await (await member.adopt(KEY, 1)).finish()
        assert found.text == bytes(member.runner.said(PROMPT, 8)).decode()
        await member.assert_empty()


async def until_streams(member: Member) -> None:
    async def there() -> bool:
        return len(member.service.streams) > 0

    await until(there, WAIT_S, "the call is there")


async def until_held(member: Member) -> None:
    """As `held`, while the engine stands still and can not recount."""

    async def found() -> bool:
        return member.service.streams.held == 1

    await until(found, WAIT_S, "the seat is held")


async def until_kept(member: Member) -> None:
    async def kept() -> bool:
        return all(stream.kept for stream in member.service.streams._streams.values())

    await until(kept, WAIT_S, "the end is kept")


async def test_a_call_that_looks_open_loses_the_seat_to_the_one_that_adopts() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        member.runner.gate.hold()
        seat = await member.open(PROMPT, max_output_tokens=6, **HELD)
        member.runner.gate.step(3)
        while seat.text != "abc":
            await seat.next()
        again = await member.adopt(KEY, 1)
        await again.until("adopted")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await seat.next()
        details = details_from(caught.value)
        assert (details.code, details.reason) == (grpc.StatusCode.ABORTED, "ADOPTED")
        member.runner.gate.release()
        await again.finish()
        assert again.text == "abcdef" and list(again.adopted.output_token_ids) == []
        await member.assert_empty()


async def test_clocks_and_tokens_of_the_open_are_those_of_now() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        member.runner.gate.hold()
        clocks = {"overall_remaining_s": 50.0, "first_token_remaining_s": 40.0, "inter_token_s": 30.0}
        seat = await member.open(PROMPT, max_output_tokens=8, **clocks, **HELD)
        member.runner.gate.step(2)
        while seat.text != "ab":
            await seat.next()
        seat.call.cancel()
        await until_held(member)
        again = await member.adopt(KEY, seat.outputs[-1].next_sequence_no)
        await again.until("adopted")
        opening = again.adopted.open
        assert 45 < opening.overall_remaining_s < 50 and 35 < opening.first_token_remaining_s < 40
        assert opening.inter_token_s == 30 and 0 < opening.since_last_token_s < 5
        assert opening.hold_s == 20 and opening.max_output_tokens == 8
        member.runner.gate.release()
        await again.finish()
        await member.assert_empty()


async def test_final_only_is_adopted_with_its_whole_text() -> None:
    async with decode_member(otherwise=lambda history: 97 + len(history) % 26) as member:
        quiet = {"output_mode": v1.OUTPUT_MODE_FINAL_ONLY, "max_output_tokens": 40}
        seat = await member.open(PROMPT, **quiet, **HELD)
        await seat.until("output")
        seat.call.cancel()
        await until_held(member)
        again = await (await member.adopt(KEY, 1)).finish()
        said = member.runner.said(PROMPT, 40)
        told = [*again.adopted.output_token_ids, *(t for output in again.outputs for t in output.selected_token_ids)]
        assert len(told) >= 16 and told == said[: len(told)]
        assert again.ended.text == bytes(said).decode()
        await member.assert_empty()


async def test_only_a_seat_that_is_there_for_it_can_be_adopted() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:

        async def refused(key: grant_pb2.AttemptKey, incarnation: str | None = None) -> str:
            return (await (await member.adopt(key, 1, incarnation)).finish()).refused.reason

        assert await refused(KEY) == "unknown_attempt"
        member.runner.gate.hold()
        plain = await member.open(PROMPT, key=KEY)
        member.runner.gate.step(1)
        await plain.until("output")
        assert await refused(KEY) == "unknown_attempt"
        other = grant_pb2.AttemptKey(request_id="held", attempt=3)
        seat = await member.open(PROMPT, key=other, hold_s=5.0)
        await until_streams(member)
        assert await refused(other, "another") == "wrong_incarnation"
        assert await refused(grant_pb2.AttemptKey(request_id="held", attempt=4)) == "unknown_attempt"
        for wanted, field in ((0, "adopt.next_sequence_no"), (9, "adopt.next_sequence_no")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (await member.adopt(other, wanted)).next()
            assert [violation.field for violation in details_from(caught.value).violations] == [field]
        duplicate = await member.open(PROMPT, key=other, hold_s=5.0)
        assert await duplicate.next() == "refused" and duplicate.refused.reason == "duplicate_attempt"
        member.runner.gate.release()
        await asyncio.gather(seat.finish(), plain.finish())
        await member.assert_empty()


async def test_a_routers_seat_says_that_the_end_has_arrived() -> None:
    async with decode_member({PROMPT: b"hello"}) as member:
        info = MemberInfo("decode-0", member.frame.incarnation, member.frame.address, None, "", 4, 63, 128, 64, 0, True)
        known = RouterMember(info, member.channel)
        opening = member.message(PROMPT, max_output_tokens=5, **HELD)
        async with seat_stream(known, SeatLimits(), traceparent="", timeout_s=WAIT_S) as seat:
            seat.open(opening)
            while not isinstance(await seat.read(), SeatEnd):
                pass
            assert len(member.service.streams) == 1
        assert len(member.service.streams) == 0, "it was told before the call ended"
        await member.assert_empty()


async def test_an_end_is_kept_for_as_long_as_a_client_reads() -> None:
    """The router that has it is lost: another one gets everything again. A member that drains does not wait for clients."""
    async with decode_member({PROMPT: b"hello"}) as member:
        seat = await member.open(PROMPT, max_output_tokens=5, **HELD)
        await seat.until("ended")
        await seat.send(keep_end=decode_pb2.KeepEnd())
        await until_kept(member)
        member.service.streams.look_after(clocks.monotonic() + 1000.0, 10.0)
        await abandoned(member, seat)
        again = await member.adopt(KEY, 1)
        await again.until("ended")
        assert again.text == "hello"
        await again.send(keep_end=decode_pb2.KeepEnd())
        await until_kept(member)
        async with asyncio.timeout(WAIT_S):
            assert await member.process.drain() == 0


async def test_a_cancelled_seat_is_not_held() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        member.runner.gate.hold()
        seat = await member.open(PROMPT, **HELD)
        await seat.until("granted")
        await member.runner.gate.stopped()
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await member.until_noted()
        seat.call.cancel()
        member.runner.gate.release()
        await member.assert_empty()


@pytest.mark.slow
async def test_a_seat_that_nobody_adopts_is_given_up_after_its_time() -> None:
    async with decode_member(otherwise=lambda history: 97, hold_most_s=0.3, stream_bytes=256) as member:
        running = await member.open(PROMPT, max_output_tokens=100, **HELD)
        await running.until("output")
        ended = await member.open(PROMPT, key=grant_pb2.AttemptKey(request_id="ended", attempt=1), hold_s=20.0)
        await ended.until("ended")
        ended.call.cancel()
        running.call.cancel()
        await member.assert_empty()


async def test_a_member_that_drains_waits_for_held_seats_no_longer_than_their_hold() -> None:
    async with decode_member({PROMPT: b"abcdef"}, hold_most_s=0.2) as member:
        seat = await member.open(PROMPT, max_output_tokens=6, **HELD)
        await seat.until("ended")
        await abandoned(member, seat)
        async with asyncio.timeout(WAIT_S):
            assert await member.process.drain() == 0


async def test_gauges_tell_of_held_seats_and_adoptions() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        seat = await member.open(PROMPT, max_output_tokens=6, **HELD)
        await seat.until("ended")
        await abandoned(member, seat)
        text = member.frame.metrics.text()
        assert "tandem_decode_seats_held 1.0" in text and "tandem_decode_replay_bytes 0.0" not in text
        await (await member.adopt(KEY, 1)).finish()
        await member.assert_empty()
        text = member.frame.metrics.text()
        assert "tandem_decode_adoptions_total 1.0" in text
        assert "tandem_decode_seats_held 0.0" in text and "tandem_decode_replay_bytes 0.0" in text


def endless(**settings: Any) -> Any:
    return decode_member(otherwise=lambda history: 97, total_pages=20_000, stream_bytes=2048, context_tokens=60_000, **settings)


@pytest.mark.slow
async def test_b47_a_slow_reader_fails_when_it_asked_for_that_and_others_go_on() -> None:
    async with endless() as member:
        slow = await member.open(PROMPT, max_output_tokens=50_000, slow_reader=v1.SLOW_READER_FAIL)
        await slow.until("granted")
        other = await (await member.open(tuple(b"other"), max_output_tokens=20)).finish()
        assert other.ended.usage.selected_tokens == 20
        await member.until_books(lambda books: books["seats"] == 0, "the slow one has ended")
        await slow.finish()
        assert (slow.ended.finish_reason, slow.ended.cause) == (v1.FINISH_REASON_SLOW_CONSUMER, "slow_consumer")
        assert len(slow.text) == slow.ended.usage.returned_tokens == slow.ended.usage.selected_tokens
        await member.assert_empty()


@pytest.mark.slow
async def test_b47_a_reader_that_coalesces_gets_larger_deltas_and_pauses_at_the_bound() -> None:
    async with endless(coalesce_bytes=40_000) as member:
        slow = await member.open(PROMPT, max_output_tokens=5_000, slow_reader=v1.SLOW_READER_COALESCE)
        await slow.until("granted")

        async def paused() -> bool:
            return "tandem_decode_paused_sequences 1.0" in member.frame.metrics.text()

        await until(paused, WAIT_S, "the sequence pauses")
        waiting = member.service.streams.buffer_bytes
        assert 2048 // 17 < waiting <= 40_000
        await slow.finish()
        assert max(len(text) for text in slow.texts) > 2048 // 17
        assert slow.text == "a" * 5_000
        await member.assert_empty()
