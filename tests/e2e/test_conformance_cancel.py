"""Conformance test B of the decode loop through router, prefill and decode member, with the real model in float32."""

from collections.abc import Callable

import grpc
import pytest
import torch

from engine.runner import ModelRunner
from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tests.e2e.cells import greedy_request
from tests.e2e.one_process import Model, one_process_cell, texts
from tests.redis_server import cell, redis_url
from tests.reference import default_model, greedy, load_reference

__all__ = ["cell", "redis_url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPT = "The three primary colours are"
PAGE_TOKENS = 16


def real_model(tokenizer: Tokenizer) -> Model:
    """SmolLM2 in float32, loaded once for each member."""
    make: Callable[[], ModelRunner] = lambda: ModelRunner.load(  # noqa: E731
        default_model(), dtype="float32", page_tokens=PAGE_TOKENS, total_pages=65, threads=1
    )
    return Model(make, tokenizer, default_model().name)


async def test_conformance_b_a_cancel_while_the_third_token_is_decoded(redis_url: str, cell: str, tokenizer: Tokenizer) -> None:
    """Cancel between decode.started(3) and decode.completed(3)."""
    prompt = tuple(tokenizer.encode(PROMPT))
    expected = greedy(load_reference(default_model(), torch.float32), prompt, 3)
    request = greedy_request(prompt, 40)
    async with one_process_cell(real_model(tokenizer), redis_url, cell) as world:
        gate = world.decode_runner.gate
        gate.hold()
        call = world.stub.Generate(request, timeout=120)
        gate.step(2)
        await gate.entered(3)
        while "".join(texts(world.arrived)) != tokenizer.decode(expected):
            await world.next(call)  # everything selected so far has been sent
        answer = await world.stub.Cancel(pb.CancelRequest(request_id=request.request_id, reason="enough"), timeout=10)
        assert answer.outcome == pb.CANCEL_OUTCOME_ACCEPTED
        await world.held_messages(1)
        world.events.append(("cancel", 3))
        gate.release()
        completed = (await world.until_kind(call, "completed")).completed
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        await world.at_rest()
        record = (await world.stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record

    order = [event for event in world.events if event[0] != "delta"]
    assert order[:3] == [("selected", 1), ("decode.started", 1), ("decode.completed", 1)]
    assert order[-5:] == [
        ("selected", 3),
        ("decode.started", 3),
        ("cancel", 3),
        ("decode.completed", 3),
        ("completed", "cancelled"),
    ]
    assert ("selected", 4) not in order and world.events[-1][0] == "completed"
    assert completed.state == pb.REQUEST_STATE_CANCELLED == record.state and completed.cause == "client_cancel"
    assert completed.text == "" and "".join(texts(world.arrived)) == tokenizer.decode(expected)
    shown = [token for response in world.arrived for token in response.delta.token_ids]
    assert shown == expected
    usage = record.usage
    assert (usage.selected_tokens, usage.returned_tokens, usage.processed_tokens) == (3, 3, len(prompt) + 3)
    pages = -(-(len(prompt) + 3) // PAGE_TOKENS)
    assert dict(record.released) == {"pages": pages, "batch_places": 1, "landing_rows": 1, "streams": 1}
    assert record.sent_bytes == len("".join(texts(world.arrived)).encode())
    moments = (record.cancel_requested_at, record.cancel_observed_at, record.cancel_effective_at)
    times = [moment.ToNanoseconds() for moment in moments]
    assert all(times) and times == sorted(times)
