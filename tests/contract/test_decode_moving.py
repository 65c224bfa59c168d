"""Sequences move between two whole decode members over gRPC and the memory transport; the test is their router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from kv_transfer.memory import MemoryFabric
from tandem.pools.v1 import decode_pb2, grant_pb2, member_pb2, member_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem.v1 import inference_pb2
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPT = tuple(range(40, 71))


@contextlib.asynccontextmanager
async def members(**settings: Any) -> AsyncIterator[tuple[Member, Member]]:
    """A source and a target on one fabric."""
    fabric = MemoryFabric()
    async with (
        decode_member(name="source", fabric=fabric, **settings) as source,
        decode_member(name="target", fabric=fabric, **settings) as target,
    ):
        yield source, target


async def begun(source: Member, prompt: Sequence[int] = PROMPT, outputs: int = 3, **changes: Any) -> Seat:
    """A seat whose next step is held inside the model after some outputs."""
    source.runner.gate.hold()
    seat = await source.open(prompt, **{"max_output_tokens": 12, **changes})
    for _ in range(outputs):
        source.runner.gate.step()
        await seat.until("output")
    await source.runner.gate.stopped()
    return seat


async def paused(source: Member, seat: Seat, commands: int = 1) -> Any:
    """PauseSeat while a step runs; its answer. The token of that step is kept. `commands`: so many wait for its end by then."""
    await seat.send(pause=decode_pb2.PauseSeat())
    await source.step_with(commands)
    answer = await seat.until("paused")
    source.runner.gate.release()
    return answer


async def goes_on(source: Member, target: Member, seat: Seat, prompt: Sequence[int], **changes: Any) -> Seat:
    """The seat at the target, up to its grant."""
    untold = list(seat.paused.selected_token_ids)
    fields = {
        "key": grant_pb2.AttemptKey(request_id=seat.request_id, attempt=2),
        "prefill": source.peer,
        "moved": True,
        "output_token_ids": [*seat.told, *untold],
        "sent_text_bytes": sum(output.text_bytes for output in seat.outputs),
        "returned_tokens": sum(output.returned_tokens for output in seat.outputs),
        "first_sequence_no": seat.outputs[-1].next_sequence_no if seat.outputs else 1,
        "max_output_tokens": 12,
    }
    there = await target.open(prompt, **{**fields, **changes})
    granted = await there.until("granted")
    assert granted.grant.token_count == seat.paused.cache_tokens and not granted.grant.HasField("landing_row")
    return there


async def push(seat: Seat, there: Seat) -> None:
    """PushSeat."""
    await seat.send(push=decode_pb2.PushSeat(grant=there.granted.grant))


async def expected(source: Member, target: Member) -> tuple[Seat, Seat]:
    """The seat of a sequence that stands still, and the one that waits for it."""
    seat = await begun(source)
    await paused(source, seat)
    return seat, await goes_on(source, target, seat, PROMPT)


async def being_written(source: Member, target: Member) -> tuple[Seat, Seat]:
    """The same, with writes under way that come no further."""
    seat, there = await expected(source, target)
    source.fabric.set_speed(0)
    await push(seat, there)

    async def posted() -> bool:
        return source.fabric.in_flight > 0

    await until(posted, WAIT_S, "a write is under way")
    return seat, there


async def leave(seat: Seat) -> None:
    """The source's seat is not needed any more."""
    await seat.send(cancel=decode_pb2.CancelSeat(reason="moved"))
    await seat.finish()
    assert (seat.ended.finish_reason, seat.ended.cause) == (inference_pb2.FINISH_REASON_CANCELLED, "moved")


async def move(
    source: Member, target: Member, seat: Seat, prompt: Sequence[int] = PROMPT, commands: int = 1, **changes: Any
) -> Seat:
    """The whole move; the target runs on. `commands`: see `paused`."""
    await paused(source, seat, commands)
    there = await goes_on(source, target, seat, prompt, **changes)
    await push(seat, there)
    done = await seat.until("pushed")
    assert done.ok and done.sent_bytes > 0 and done.handover_s >= 0
    await there.until("committed")
    await leave(seat)
    return there


def value(member: Member, name: str) -> float:
    """One metric."""
    lines = member.frame.metrics.text().splitlines()
    return float(next(line for line in lines if line.startswith(f"tandem_{name} ")).split()[1])


async def test_a_sequence_moves_in_the_middle_and_its_client_sees_one_answer() -> None:
    async with members() as (source, target):
        seat = await begun(source)
        neighbour = await source.open((9, 8, 7), max_output_tokens=12)
        there = await move(source, target, seat, commands=2)  # and the neighbour's Open
        await there.finish()
        said = source.runner.said(PROMPT, 12)
        assert seat.text + there.text == bytes(said).decode()
        assert [*seat.told, *there.told] == said
        numbers = [delta.sequence_no for delta in (*seat.deltas, *there.deltas)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert there.ended.usage.returned_tokens == 12
        assert there.ended.finish_reason == inference_pb2.FINISH_REASON_MAX_OUTPUT_TOKENS
        assert seat.order[-3:] == ["paused", "pushed", "ended"]
        await neighbour.finish()
        assert neighbour.text == bytes(source.runner.said((9, 8, 7), 12)).decode()
        assert value(source, 'decode_moves_total{outcome="pushed"}') == 1
        assert value(source, "decode_moved_bytes_total") == seat.pushed.sent_bytes == value(target, "decode_received_bytes_total")
        assert value(source, "decode_move_pause_seconds_count") == 1
        await source.assert_empty()
        await target.assert_empty()


async def test_tokens_that_no_output_has_told_go_along() -> None:
    said = list("aébc".encode())
    async with members(outputs={PROMPT: said}) as (source, target):
        seat = await begun(source, outputs=1, max_output_tokens=5)
        await paused(source, seat)
        assert seat.text == "a" and list(seat.paused.selected_token_ids) == said[1:2]
        assert seat.paused.cache_tokens == len(PROMPT) + 1
        there = await goes_on(source, target, seat, PROMPT, max_output_tokens=5)
        await push(seat, there)
        await seat.until("pushed")
        await leave(seat)
        await there.finish()
        assert seat.text + there.text == "aébc"
        await source.assert_empty()
        await target.assert_empty()


async def test_an_answer_that_comes_at_the_end_only_moves_too() -> None:
    async with members() as (source, target):
        source.runner.gate.hold()
        seat = await source.open(PROMPT, max_output_tokens=12, output_mode=inference_pb2.OUTPUT_MODE_FINAL_ONLY)
        source.runner.gate.step(3)
        await source.runner.gate.stopped()
        there = await move(source, target, seat, output_mode=inference_pb2.OUTPUT_MODE_FINAL_ONLY)
        await there.finish()
        assert there.ended.text == bytes(source.runner.said(PROMPT, 12)).decode()
        await source.assert_empty()
        await target.assert_empty()


async def test_a_member_that_drains_says_so_at_once_and_ends_when_its_sequences_have_moved() -> None:
    async with members(drain_timeout_s=20.0) as (source, target):
        seat = await begun(source)
        watch = member_pb2_grpc.MemberServiceStub(source.channel).Watch(member_pb2.WatchRequest(router="router"))
        assert not (await watch.read()).load.draining
        draining = asyncio.create_task(source.process.drain())
        async with asyncio.timeout(WAIT_S):
            while not (await watch.read()).load.draining:
                pass
        # Two commands: the drain told the scheduler to admit nothing more.
        there = await move(source, target, seat, commands=2)
        async with asyncio.timeout(WAIT_S):
            assert await draining == 0
        await there.finish()
        assert seat.text + there.text == bytes(source.runner.said(PROMPT, 12)).decode()
        await target.assert_empty()


async def test_a_drain_waits_for_writes_that_outlive_their_seat() -> None:
    async with members(drain_timeout_s=20.0, release_wait_s=0.01) as (source, target):
        seat, there = await being_written(source, target)
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await seat.finish()
        assert not seat.ended.HasField("cancel_effective_s")
        draining = asyncio.create_task(source.process.drain())

        async def waits() -> bool:
            return (await source.books())["pushes_in_flight"] > 0 and source.process.draining()

        await until(waits, WAIT_S, "the drain has begun")
        assert not draining.done()
        source.fabric.set_speed(1 << 20)
        async with asyncio.timeout(WAIT_S):
            assert await draining == 0
        await there.finish()  # all of it had been posted: the other member has the sequence


async def test_a_cancel_while_pages_are_written_is_effective_when_the_writes_are_done() -> None:
    async with members(release_wait_s=10.0) as (source, target):
        seat, there = await being_written(source, target)
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await there.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        books = await source.until_books(lambda books: books["pages_owned"] == 0, "the seat ends")
        assert books["pages_pinned"] == 9 and books["drains_waiting"] <= 1
        source.fabric.set_speed(1 << 20)
        await seat.finish()
        assert seat.ended.cause == "client_cancel" and seat.ended.HasField("cancel_effective_s") and seat.pushed is None
        await there.finish()
        assert there.ended.HasField("cancel_effective_s")
        await source.assert_empty()
        await target.assert_empty()


async def test_a_router_that_takes_over_a_sequence_that_stands_still_is_told_so_and_can_move_it() -> None:
    said = list("aébc".encode())
    async with members(outputs={PROMPT: said}) as (source, target):
        seat = await begun(source, outputs=1, max_output_tokens=5, hold_s=10.0)
        await paused(source, seat)
        there = await goes_on(source, target, seat, PROMPT, max_output_tokens=5)
        await push(seat, there)
        assert (await seat.until("pushed")).ok
        for call in (seat.call, there.call):
            call.cancel()
        await target.assert_empty()
        key = grant_pb2.AttemptKey(request_id=seat.request_id, attempt=1)
        again = await source.adopt(key, 1)
        assert (await again.until("paused")) == seat.paused and again.text == "a"
        there = await goes_on(source, target, again, PROMPT, max_output_tokens=5)
        await push(again, there)
        await again.until("pushed")
        await leave(again)
        await there.finish()
        assert again.text + there.text == "aébc"
        assert again.order == ["adopted", "output", "paused", "pushed", "ended"]
        await source.assert_empty()
        await target.assert_empty()


async def test_a_target_that_dies_in_the_middle_is_told_and_the_sequence_can_go_elsewhere() -> None:
    async with members() as (source, target), decode_member(name="third", fabric=source.fabric) as third:
        seat, there = await being_written(source, target)
        source.fabric.kill(there.granted.grant.endpoint.agent)
        failed = await seat.until("pushed")
        assert (failed.ok, failed.cause, failed.sent_bytes) == (False, "transfer_failed", 0)
        source.fabric.set_speed(1 << 20)
        await there.send(prefill_lost=decode_pb2.PrefillLost(cause="prefill_failed", drained=True))
        await there.finish()
        seat.pushed = None
        again = await goes_on(source, third, seat, PROMPT)
        await push(seat, again)
        assert (await seat.until("pushed")).ok
        await again.finish()
        await leave(seat)
        assert seat.text + again.text == bytes(source.runner.said(PROMPT, 12)).decode()

        async def counted() -> bool:
            lines = source.frame.metrics.text().splitlines()
            counts = [line.split()[1] for line in lines if line.startswith("tandem_decode_push_failures_total")]
            return sum(map(float, counts)) == 1  # by whatever of it was noticed first

        await until(counted, WAIT_S, "the failed write is counted")
        for member in (source, target, third):
            await member.assert_empty()


async def test_a_source_that_dies_in_the_middle_costs_the_target_a_fence() -> None:
    async with members(drain_retry_s=0.01, drain_call_s=0.5) as (source, target):
        _, there = await being_written(source, target)
        await source.process.close()
        await there.send(prefill_lost=decode_pb2.PrefillLost(cause="prefill_lost", drained=False))
        await there.finish()
        assert there.ended.cause == "prefill_lost"
        await target.assert_empty()
        assert value(target, "decode_fences_total") == 1


async def test_a_decode_member_computes_no_prompts_for_others_and_answers_drains() -> None:
    async with decode_member() as member:
        stub = prefill_pb2_grpc.PrefillServiceStub(member.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Prefill(prefill_pb2.PrefillRequest())))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "is a decode member" in (caught.value.details() or "")
        wanted = prefill_pb2.DrainRequest(grant_id=b"g" * 16, incarnation=member.frame.incarnation)
        assert (await stub.Drain(wanted)).state == prefill_pb2.DRAIN_STATE_DRAINED
        other = prefill_pb2.DrainRequest(grant_id=b"g" * 16, incarnation="another")
        assert (await stub.Drain(other)).state == prefill_pb2.DRAIN_STATE_WRONG_INCARNATION


@pytest.mark.parametrize(
    ("field", "value", "cause"), [("layout_fingerprint", "0" * 32, "layout_mismatch"), ("grant_id", b"short", "bad_grant")]
)
async def test_a_grant_that_can_not_be_read_is_answered_on_the_seat(field: str, value: object, cause: str) -> None:
    async with members() as (source, target):
        seat, there = await expected(source, target)
        setattr(there.granted.grant, field, value)
        await push(seat, there)
        assert (await seat.until("pushed")).cause == cause
        await leave(seat)
        await there.send(cancel=decode_pb2.CancelSeat(reason="client_cancel"))
        await there.finish()
        await source.assert_empty()


async def test_an_open_that_moves_names_its_source_and_its_tokens() -> None:
    async with decode_member() as member:
        seat = await member.open(PROMPT, moved=True, prefill=member.writer.peer)
        with pytest.raises(grpc.aio.AioRpcError, match="moved"):
            await seat.finish()
