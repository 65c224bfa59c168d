"""Cancel through another router, before the request arrives, twice, after the end, and when the client leaves."""

import asyncio

import grpc
import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, at_rest, fresh_id, greedy_request, read, stub_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LONG = 600


async def _first_delta(call: grpc.aio.UnaryStreamCall) -> None:
    while (await call.read()).WhichOneof("event") != "delta":
        pass


async def _rest(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateResponse]:
    """What a stream still brings before its status CANCELLED."""
    events = []
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            events.append(await call.read())
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    return events


async def test_cancel_through_another_router(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    request = greedy_request(tokenizer.encode("A long story about a river:"), LONG)
    async with stub_of(exact_cell, 0) as streaming, stub_of(exact_cell, 1) as other:
        call = streaming.Generate(request, timeout=60)
        await _first_delta(call)
        answer = await other.Cancel(pb.CancelRequest(request_id=request.request_id, reason="enough", wait=True), timeout=20)
        assert answer.outcome == pb.CANCEL_OUTCOME_ACCEPTED and answer.state == pb.REQUEST_STATE_CANCELLED
        events = await _rest(call)
        completed = events[-1].completed
        assert completed.finish_reason == pb.FINISH_REASON_CANCELLED and completed.state == pb.REQUEST_STATE_CANCELLED
        assert 0 < completed.usage.selected_tokens < LONG
        again = await other.Cancel(pb.CancelRequest(request_id=request.request_id), timeout=10)
        assert again.outcome == pb.CANCEL_OUTCOME_ALREADY_ENDED and again.finish_reason == pb.FINISH_REASON_CANCELLED
        record = (await other.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
    assert record.state == pb.REQUEST_STATE_CANCELLED and record.cancel_reason == "enough"
    moments = [record.cancel_requested_at, record.cancel_observed_at, record.cancel_effective_at]
    times = [moment.ToNanoseconds() for moment in moments]
    assert all(times) and times == sorted(times)
    await at_rest(exact_cell)


async def test_cancel_before_generate_leaves_a_tombstone(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    request = greedy_request(tokenizer.encode("Never computed"), 8, request_id=fresh_id("early"))
    async with stub_of(exact_cell, 1) as other, stub_of(exact_cell, 0) as stub:
        answer = await other.Cancel(pb.CancelRequest(request_id=request.request_id), timeout=10)
        assert answer.outcome == pb.CANCEL_OUTCOME_ACCEPTED
        ended = await ask(stub, request)
    assert ended.reason == "cancelled" and ended.status is grpc.StatusCode.CANCELLED
    assert ended.completed.usage.selected_tokens == 0 and ended.text == ""
    await at_rest(exact_cell)


@pytest.mark.parametrize("delay_tokens", [0, 1, 200])
async def test_cancels_at_different_moments_leave_nothing(exact_cell: Cell, tokenizer: Tokenizer, delay_tokens: int) -> None:
    """delay_tokens: 0 cancels at once (queued, admitted or prefilling), 1 with the first delta, 200 never in time."""
    requests = [greedy_request(tokenizer.encode("count " * 150), 24 if delay_tokens == 200 else LONG) for _ in range(6)]
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        calls = [stub.Generate(request, timeout=120) for request in requests]
        if delay_tokens == 1:
            await _first_delta(calls[0])
        if delay_tokens == 200:
            answers = await asyncio.gather(*(read(call) for call in calls))
            late = [await other.Cancel(pb.CancelRequest(request_id=r.request_id), timeout=10) for r in requests]
            assert {one.outcome for one in late} == {pb.CANCEL_OUTCOME_ALREADY_ENDED}
            assert {answer.reason for answer in answers} == {"max_output_tokens"}
        else:
            cancels = [other.Cancel(pb.CancelRequest(request_id=r.request_id), timeout=20) for r in requests for _ in range(2)]
            await asyncio.gather(*cancels)
            for call in calls:
                assert (await _rest(call))[-1].completed.finish_reason == pb.FINISH_REASON_CANCELLED
    await at_rest(exact_cell)


async def test_client_gone_is_a_cancel_that_says_so(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    """B09: nothing is orphaned."""
    request = greedy_request(tokenizer.encode("The client leaves soon"), LONG)
    async with stub_of(exact_cell) as stub:
        call = stub.Generate(request, timeout=60)
        await _first_delta(call)
        call.cancel()

        async def ended() -> object:
            record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
            return record if record.state == pb.REQUEST_STATE_CANCELLED else None

        record = await until(ended, 15, "the record is CANCELLED")
    assert record.cause == "client_gone"
    await at_rest(exact_cell)


async def test_unknown_id_and_empty_id(exact_cell: Cell) -> None:
    async with stub_of(exact_cell) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Get(pb.GetRequest(request_id=fresh_id("unknown")), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        for call in (stub.Get(pb.GetRequest(), timeout=10), stub.Cancel(pb.CancelRequest(), timeout=10)):
            with pytest.raises(grpc.aio.AioRpcError) as empty:
                await call
            assert empty.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "request_id" in (empty.value.details() or "")
