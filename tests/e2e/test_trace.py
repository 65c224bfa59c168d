"""One trace for each request across router, prefill and decode member, in processes of their own (B52)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import grpc
import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from telemetry import names
from tests.e2e.cells import Answer, at_rest, check, fresh_id, greedy_request, held, read, stub_of
from tests.e2e.conftest import STEP_TOKENS, Observed
from tests.otlp_collector import CollectedSpan, OtlpCollector
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: Who tells which span: exactly one process each.
SERVICES = {
    names.SPAN_GENERATE: "tandem-router",
    names.SPAN_QUEUE: "tandem-router",
    names.SPAN_SEND: "tandem-router",
    names.SPAN_PREFILL: "tandem-prefill",
    names.SPAN_HANDOVER: "tandem-decode",
    names.SPAN_DECODE: "tandem-decode",
}
NAMES = frozenset(value for name, value in vars(names).items() if name.isupper())
#: Two clocks are read, on one machine, in seconds.
CLOCKS_S = 0.005


async def trace_of(collector: OtlpCollector, request_id: str) -> list[CollectedSpan]:
    """The spans of a request's trace, once its root and everything that ended before it is here."""

    def root() -> CollectedSpan | None:
        roots = collector.named(names.SPAN_GENERATE)
        return next((span for span in roots if span.attributes.get(names.REQUEST_ID) == request_id), None)

    async def whole() -> list[CollectedSpan]:
        ended = root()
        spans = [span for span in collector.spans if ended is not None and span.trace_id == ended.trace_id]
        members = {names.SPAN_DECODE} if ended is not None and ended.attributes[names.DECODE_MEMBER] else set()
        members |= {names.SPAN_PREFILL} if ended is not None and names.EVENT_FIRST_TOKEN in ended.events else set()
        return spans if spans and members <= {span.name for span in spans} else []

    return await until(whole, 10.0, f"the trace of {request_id} arrives")


def by_name(spans: Sequence[CollectedSpan]) -> dict[str, CollectedSpan]:
    """Each span by its name; none comes twice, and each from the process that it belongs to."""
    assert max(Counter(span.name for span in spans).values()) == 1, [span.name for span in spans]
    assert {span.name: span.service for span in spans} == {span.name: SERVICES[span.name] for span in spans}
    return {span.name: span for span in spans}


def check_tree(spans: Sequence[CollectedSpan]) -> CollectedSpan:
    """One trace, everything under Generate and within it, known attributes only. Returns Generate."""
    root = by_name(spans)[names.SPAN_GENERATE]
    for span in spans:
        assert span.start_s <= span.end_s
        used = {*span.attributes, *(key for attributes in span.event_attributes for key in attributes), *span.events, span.name}
        assert used <= NAMES, used - NAMES
        if span is not root:
            assert (span.trace_id, span.parent_id) == (root.trace_id, root.span_id), span.name
            assert root.start_s - CLOCKS_S <= span.start_s and span.end_s <= root.end_s + CLOCKS_S, span.name
    return root


async def prefill_has_it(observed: Observed) -> bool:
    """Whether the prefill member has a call: the router tells `started` when it has asked, which may be before."""
    return bool(held(await check(observed.cell.prefill[0].address)))


async def served(observed: Observed, request: pb.GenerateRequest, **call: object) -> Answer:
    """One request to its end."""
    async with stub_of(observed.cell) as stub:
        return await read(stub.Generate(request, timeout=60, **call))


async def test_b52_a_served_request_is_one_tree(observed: Observed, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a time " * 100)[: 2 * STEP_TOKENS + 40]
    request = greedy_request(prompt, 20)
    caller = ("ab" * 16, "cd" * 8)
    answer = await served(observed, request, metadata=(("traceparent", f"00-{caller[0]}-{caller[1]}-01"),))
    spans = await trace_of(observed.collector, request.request_id)
    root, found = check_tree(spans), by_name(spans)
    assert set(found) == set(SERVICES) and all(span.ok for span in spans)
    assert (root.trace_id, root.parent_id) == caller, "the client's trace is continued"
    assert root.attributes[names.FINISH_REASONS] == ["max_output_tokens"] == found["decode"].attributes[names.FINISH_REASONS]
    assert root.attributes[names.STATE] == "finished" and root.attributes[names.INPUT_TOKENS] == len(prompt)
    assert root.attributes[names.OUTPUT_TOKENS] == 20 == found["decode"].attributes[names.OUTPUT_TOKENS]
    assert (root.attributes[names.PREFILL_MEMBER], root.attributes[names.DECODE_MEMBER]) == ("prefill-0", "decode-0")
    chunks = [attributes[names.COMPUTED_TOKENS] for attributes in found["prefill"].event_attributes]
    assert set(found["prefill"].events) == {names.EVENT_CHUNK} and chunks == [128, 256, len(prompt)]
    assert found["prefill"].attributes[names.SENT_BYTES] == found["handover"].attributes[names.SENT_BYTES] > 0
    order = [found["queue"].end_s, found["prefill"].start_s, found["handover"].start_s, found["handover"].end_s]
    assert order == sorted(order)
    assert found["handover"].end_s <= found["decode"].start_s + CLOCKS_S
    assert found["decode"].end_s <= found["send"].end_s + CLOCKS_S
    assert names.EVENT_FIRST_TOKEN in root.events and names.EVENT_COMMITTED in found["decode"].events
    assert answer.completed.timings.handover_s > 0
    async with stub_of(observed.cell) as stub:
        record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
    assert record.traceparent.split("-")[1:3] == [root.trace_id, root.span_id]


async def test_a_cancelled_request_ends_its_trace_with_its_reason(observed: Observed, tokenizer: Tokenizer) -> None:
    request = greedy_request(tokenizer.encode("A story without an end:"), 600)
    async with stub_of(observed.cell) as stub:
        call = stub.Generate(request, timeout=60)
        answer = await read(call, up_to="delta")
        await stub.Cancel(pb.CancelRequest(request_id=request.request_id, wait=True), timeout=10)
        assert (await read(call, answer)).status is grpc.StatusCode.CANCELLED
    spans = await trace_of(observed.collector, request.request_id)
    root, found = check_tree(spans), by_name(spans)
    assert set(found) == {"Generate", "queue", "prefill", "handover", "decode"}, "nothing was left to send"
    for span in (root, found["decode"]):
        assert span.attributes[names.FINISH_REASONS] == ["cancelled"] and span.attributes[names.CAUSE] == "client_cancel"
        assert {names.EVENT_CANCEL_REQUESTED, names.EVENT_CANCEL_OBSERVED, names.EVENT_CANCEL_EFFECTIVE} <= set(span.events)
    assert all(span.ok for span in spans), "a cancel is no error"


async def test_cancels_before_the_first_token_end_their_traces_too(observed: Observed, tokenizer: Tokenizer) -> None:
    """One before the request came, one while the prompt is computed."""
    early, during = greedy_request([5, 6, 7], 8), greedy_request(tokenizer.encode("again and " * 600)[:900], 8)
    async with stub_of(observed.cell) as stub:
        await stub.Cancel(pb.CancelRequest(request_id=early.request_id), timeout=10)
        assert (await read(stub.Generate(early, timeout=60))).reason == "cancelled"
        call = stub.Generate(during, timeout=60)
        answer = await read(call, up_to="started")
        await until(partial(prefill_has_it, observed), 10.0, "the prompt is with the prefill member")
        await stub.Cancel(pb.CancelRequest(request_id=during.request_id, wait=True), timeout=10)
        assert (await read(call, answer)).status is grpc.StatusCode.CANCELLED
    root = check_tree(await trace_of(observed.collector, early.request_id))
    assert root.attributes[names.FINISH_REASONS] == ["cancelled"] and root.attributes[names.STATE] == "cancelled"

    async def prefill_ended() -> bool:
        return "prefill" in {span.name for span in await trace_of(observed.collector, during.request_id)}

    await until(prefill_ended, 10.0, "the prefill span arrives")
    spans = await trace_of(observed.collector, during.request_id)
    root, found = check_tree(spans), by_name(spans)
    assert root.attributes[names.CAUSE] == "client_cancel" == found["decode"].attributes[names.CAUSE]
    assert found["prefill"].attributes[names.CAUSE] in ("abandoned", "revoked") and "send" not in found
    assert all(span.ok for span in spans)
    await at_rest(observed.cell)


async def test_no_text_is_in_any_span(observed: Observed) -> None:
    request = pb.GenerateRequest(request_id=fresh_id("text"), text="xylophones of Quetzalcoatl are", max_output_tokens=24)
    request.sampling.temperature = 0
    request.stop.sequences.append("zyzzyva")
    answer = await served(observed, request)
    await trace_of(observed.collector, request.request_id)
    everything = b"".join(observed.collector.raw)
    assert request.request_id.encode() in everything
    words = [word for word in answer.text.split() if len(word) > 6]
    for text in ("xylophones", "Quetzalcoatl", "zyzzyva", answer.text, *words):
        assert text.encode() not in everything, text
