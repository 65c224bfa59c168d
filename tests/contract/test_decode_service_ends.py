"""How seats of a decode member end over the wire: cancels, closed calls, lost writers, slow readers, drain, crash."""

import asyncio
import time

import grpc
import pytest

from tandem.pools.v1 import decode_pb2, member_pb2, member_pb2_grpc, prefill_pb2
from tandem.v1 import inference_pb2 as v1
from tests.decode_member import WAIT_S, Member, decode_member
from tests.otlp_collector import OtlpCollector
from tests.waiting import until

PROMPT = tuple(b"prompt")
CANCEL = decode_pb2.CancelSeat(reason="client_cancel")


async def test_cancel_while_the_handover_waits_costs_a_round_trip_to_the_writer() -> None:
    async with decode_member() as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        granted = await seat.until("granted")
        member.writer.fill(granted.grant, PROMPT, parts=1)
        await seat.send(cancel=CANCEL)
        await seat.finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (v1.FINISH_REASON_CANCELLED, "client_cancel")
        assert dict(seat.ended.released) == {"pages": 2, "landing_rows": 1, "streams": 1}
        assert seat.ended.usage.selected_tokens == 0
        assert seat.ended.HasField("cancel_effective_s")
        assert member.writer.drains == [granted.grant.grant_id.hex()]
        await member.assert_empty()


async def test_a_cancel_twice_and_with_a_lost_prefill_is_one_cancel() -> None:
    async with decode_member() as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.until("granted")
        await seat.send(cancel=CANCEL)
        await seat.send(cancel=decode_pb2.CancelSeat(reason="client_gone"))
        await seat.send(prefill_lost=decode_pb2.PrefillLost(cause="transfer_failed"))
        await seat.finish()
        assert seat.ended.cause == "client_cancel"
        await member.assert_empty()


@pytest.mark.parametrize(
    ("reason", "finish_reason", "cause"),
    [
        ("client_gone", v1.FINISH_REASON_CANCELLED, "client_gone"),
        ("moved", v1.FINISH_REASON_CANCELLED, "moved"),
        ("queue_deadline", v1.FINISH_REASON_DEADLINE_EXCEEDED, "queue_deadline"),
        ("overall_deadline", v1.FINISH_REASON_DEADLINE_EXCEEDED, "overall_deadline"),
        ("slow_consumer", v1.FINISH_REASON_SLOW_CONSUMER, "slow_consumer"),
        ("shutting_down", v1.FINISH_REASON_TRANSPORT_ERROR, "shutting_down"),
        ("never heard of", v1.FINISH_REASON_CANCELLED, "client_cancel"),
    ],
)
async def test_reasons_are_kept_apart(reason: str, finish_reason: int, cause: str) -> None:
    async with decode_member() as member:
        member.runner.gate.hold()
        seat = await member.open(PROMPT)
        await seat.until("granted")
        await member.runner.gate.stopped()
        await seat.send(cancel=decode_pb2.CancelSeat(reason=reason))
        await member.step_with()
        await seat.finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (finish_reason, cause)
        assert seat.deltas == []
        await member.assert_empty()


@pytest.mark.parametrize("stage", ["offered", "computing", "running"])
async def test_a_closed_seat_is_a_client_that_left_and_nothing_is_orphaned(stage: str) -> None:
    async with decode_member(otherwise=lambda history: 97, max_step_tokens=40) as member:
        if stage == "offered":
            seat = await member.open(PROMPT, prefill=member.writer.peer)
            await seat.until("granted")
        else:
            if stage == "computing":
                member.runner.gate.hold()
            seat = await member.open(PROMPT * 8, max_output_tokens=70)
            await seat.until("granted" if stage == "computing" else "output")
        seat.call.cancel()
        if stage == "computing":
            await member.until_noted()
            member.runner.gate.release()
        await member.assert_empty()
        assert len(member.writer.drains) == (1 if stage == "offered" else 0)


async def test_a_lost_prefill_is_told_at_once_and_its_pages_wait_for_the_writer() -> None:
    async with decode_member() as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.until("granted")
        await seat.send(prefill_lost=decode_pb2.PrefillLost(cause="prefill_lost"))
        await seat.finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (v1.FINISH_REASON_TRANSPORT_ERROR, "prefill_lost")
        await member.assert_empty()
        assert len(member.writer.drains) == 1


async def test_a_lost_prefill_that_has_stopped_is_not_asked_again() -> None:
    async with decode_member() as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.until("granted")
        await seat.send(prefill_lost=decode_pb2.PrefillLost(cause="transfer_failed", drained=True))
        await seat.finish()
        assert seat.ended.cause == "prefill_failed"
        assert seat.ended.released["pages"] == 2
        await member.assert_empty()
        assert member.writer.drains == []


@pytest.mark.slow
async def test_a_silent_writer_is_fenced_and_its_late_write_lands_nowhere() -> None:
    async with decode_member(drain_call_s=0.05, drain_retry_s=0.01, drain_tries=2) as member:
        member.writer.silent = True
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        granted = await seat.until("granted")
        agent = granted.grant.endpoint.agent
        member.fabric.freeze(agent)
        await seat.send(cancel=CANCEL)
        await seat.finish()
        # Told after the first silent try: without its pages, which are set aside.
        assert seat.ended.finish_reason == v1.FINISH_REASON_CANCELLED
        assert not seat.ended.HasField("cancel_effective_s")
        assert "pages" not in seat.ended.released
        await member.assert_empty()
        assert member.fabric.slabs_of(agent) is None
        # The same incarnation may come back; it gets an agent of another name.
        member.writer.silent = False
        again = await member.open(PROMPT, prefill=member.writer.peer)
        second = await again.until("granted")
        assert second.grant.endpoint.agent != agent
        member.writer.fill(second.grant, PROMPT)
        await again.finish()
        assert again.ended.usage.selected_tokens == 8
        await member.assert_empty()


async def test_another_incarnation_at_the_writers_address_is_fenced_at_once() -> None:
    async with decode_member() as member:
        member.writer.state = prefill_pb2.DRAIN_STATE_WRONG_INCARNATION
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.until("granted")
        await seat.send(cancel=CANCEL)
        await seat.finish()
        await member.assert_empty()
        assert len(member.writer.drains) == 1


async def paused_for_good(member: Member) -> None:
    """Wait until the only sequence is paused and what the transport buffers is full too: nothing moves between two looks."""
    seen = (-1, -1)

    async def still() -> bool:
        nonlocal seen
        before, snapshot = seen, member.service.snapshot
        seen = (len(member.runner.batches), member.service.streams.buffer_bytes)
        return seen == before and snapshot is not None and snapshot.load.paused == 1 and member.service.streams.slow_readers == 1

    await until(still, WAIT_S, "the slow reader's sequence is paused")


@pytest.mark.slow
async def test_a_reader_that_does_not_read_pauses_its_own_sequence_only() -> None:
    async with decode_member(
        otherwise=lambda history: 97, total_pages=20_000, stream_bytes=2048, max_sequences=4, context_tokens=60_000
    ) as member:
        slow = await member.open(PROMPT, max_output_tokens=50_000)
        await slow.until("granted")
        await paused_for_good(member)
        books = await member.books()
        # One window waits or is being written, and a lump of half a window may not have been told yet.
        assert 0 < books["stream_buffer_bytes"] <= 2 * 2048
        fast = await (await member.open(tuple(b"other"), max_output_tokens=20)).finish()
        assert fast.ended.usage.selected_tokens == 20
        await slow.send(cancel=CANCEL)
        await slow.finish()
        assert slow.ended.cause == "client_cancel"
        # Everything that was made before the cancel was delivered, once, in order.
        assert slow.text == "a" * slow.ended.usage.returned_tokens
        assert slow.ended.usage.returned_tokens == slow.ended.usage.selected_tokens
        await member.assert_empty()


@pytest.mark.slow
async def test_the_inter_token_clock_of_a_paused_sequence_names_back_pressure() -> None:
    async with decode_member(
        otherwise=lambda history: 97, total_pages=20_000, stream_bytes=2048, context_tokens=60_000
    ) as member:
        slow = await member.open(PROMPT, max_output_tokens=50_000, inter_token_s=2.0)
        await slow.until("granted")
        await paused_for_good(member)

        async def gone() -> bool:
            return (await member.books())["seats"] == 0

        await until(gone, WAIT_S, "the clock runs out")
        await slow.finish()
        assert slow.ended.finish_reason == v1.FINISH_REASON_DEADLINE_EXCEEDED
        assert slow.ended.cause == "inter_token_backpressure"
        await member.assert_empty()


@pytest.mark.slow
async def test_a_call_that_never_takes_its_end_is_cut_off() -> None:
    async with decode_member(
        otherwise=lambda history: 97, total_pages=20_000, stream_bytes=2048, context_tokens=60_000, linger_s=0.1
    ) as member:
        slow = await member.open(PROMPT, max_output_tokens=50_000)
        await slow.until("granted")
        await paused_for_good(member)
        await slow.send(cancel=CANCEL)
        await member.assert_empty()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await slow.finish()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_drain_refuses_new_seats_and_lets_the_others_finish() -> None:
    async with decode_member({PROMPT: b"abcdef"}) as member:
        member.runner.gate.hold()
        seat = await member.open(PROMPT, max_output_tokens=6)
        await seat.until("granted")
        await member.runner.gate.stopped()
        draining = asyncio.create_task(member.process.drain())

        async def told() -> bool:
            return member.service.inbox.statistics().waiting > 0

        await until(told, WAIT_S, "the engine is told to drain")
        member.runner.gate.step()
        await member.runner.gate.stopped()
        refused = await member.open(PROMPT)
        await member.step_with()
        await refused.finish()
        assert (refused.refused.reason, refused.refused.retryable) == ("draining", True)
        member.runner.gate.release()
        await seat.finish()
        assert seat.text == "abcdef"
        assert await draining == 0


@pytest.mark.slow
async def test_the_end_of_the_drain_budget_ends_streams_with_their_own_cause() -> None:
    def slow_model(history: tuple[int, ...]) -> int:
        time.sleep(0.02)
        return 97

    async with decode_member(otherwise=slow_model, drain_timeout_s=0.5) as member:
        seat = await member.open(PROMPT, max_output_tokens=100)
        offered = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.until("granted")
        await offered.until("granted")
        draining = asyncio.create_task(member.process.drain())
        await asyncio.gather(seat.finish(), offered.finish())
        for one in (seat, offered):
            assert (one.ended.finish_reason, one.ended.cause) == (v1.FINISH_REASON_TRANSPORT_ERROR, "shutting_down")
        assert 0 < seat.ended.usage.selected_tokens < 100
        assert await draining == 75


async def test_a_broken_engine_tells_its_streams_before_the_process_ends() -> None:
    async with decode_member() as member:

        def broken(history: tuple[int, ...]) -> bool:
            raise RuntimeError("a bug")

        member.runner.fail_when = broken
        seat = await (await member.open(PROMPT)).finish()
        assert (seat.ended.finish_reason, seat.ended.cause) == (v1.FINISH_REASON_MODEL_ERROR, "model_failed")
        assert member.service.stalled(0.0)


async def test_watch_tells_what_the_member_is_and_holds() -> None:
    async with decode_member(max_sequences=7) as member:
        watch = member_pb2_grpc.MemberServiceStub(member.channel).Watch(member_pb2.WatchRequest(router="r"))
        first = await watch.read()
        assert first.info.peer.incarnation == member.frame.incarnation
        assert first.info.role == member_pb2.MEMBER_ROLE_DECODE
        assert (first.info.total_pages, first.info.page_tokens, first.info.max_sequences) == (63, 4, 7)
        assert first.info.computes_prompts
        assert first.load.free_pages == 63
        member.runner.gate.hold()
        seat = await member.open(PROMPT, max_output_tokens=7)
        await seat.until("granted")
        async with asyncio.timeout(WAIT_S):
            while (load := (await watch.read()).load).free_pages == 63:
                pass
        assert load.free_pages == 60
        assert load.waiting_sequences == 1
        member.runner.gate.release()
        await seat.finish()
        async with asyncio.timeout(WAIT_S):
            while (load := (await watch.read()).load).free_pages != 63:
                pass
        assert load.steps >= 7
        watch.cancel()


async def test_metrics_and_spans_tell_of_an_attempt() -> None:
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    async with OtlpCollector() as collector, decode_member(otlp_endpoint=collector.endpoint) as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer, traceparent=parent)
        granted = await seat.until("granted")
        member.writer.fill(granted.grant, PROMPT)
        await seat.finish()
        await member.assert_empty()
        await asyncio.to_thread(member.frame.tracing.flush)
        await collector.wait_for(2)
        spans = {span.name: span for span in collector.spans}
        assert set(spans) == {"handover", "decode"}
        for span in spans.values():
            assert (span.trace_id, span.parent_id) == ("ab" * 16, "cd" * 8)
            assert span.ok
            assert span.start_s <= span.end_s
        text = member.frame.metrics.text()
        assert 'tandem_decode_sequences_total{finish_reason="max_output_tokens"} 1.0' in text
        assert 'tandem_decode_grants_total{outcome="committed"} 1.0' in text
        assert 'tandem_decode_pages{state="free"} 63.0' in text
        assert 'tandem_decode_tokens_total{kind="returned"} 8.0' in text
        assert "tandem_telemetry_errors_total" not in text.replace("# HELP tandem_telemetry_errors_total", "").replace(
            "# TYPE tandem_telemetry_errors_total", ""
        )
        assert "prompt" not in str(collector.spans)


@pytest.mark.slow
async def test_a_grant_nobody_fills_is_asked_back_without_any_traffic() -> None:
    async with decode_member(grant_expires_s=0.1, grant_start_s=0.0) as member:
        seat = await member.open(PROMPT, prefill=member.writer.peer)
        await seat.finish()
        assert seat.ended.cause == "handover_failed"
        await member.assert_empty()
        assert member.writer.drains == [seat.granted.grant.grant_id.hex()]
