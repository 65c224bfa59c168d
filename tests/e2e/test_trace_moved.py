"""A sequence that moves to another decode member stays in its trace: who wrote its KV, and who went on with it."""

import asyncio

import pytest

from telemetry import names
from tests.e2e.one_process import one_process_cell
from tests.e2e.test_moving import generated, paced
from tests.otlp_collector import CollectedSpan, collecting
from tests.redis_server import cell, redis_url
from tests.waiting import until

__all__ = ["cell", "redis_url"]

pytestmark = pytest.mark.slow


async def test_b52_a_moved_sequence_is_one_trace(redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode spans and two hand-overs under one Generate; the second hand-over names the member that was left."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
        async with one_process_cell(paced(), redis_url, cell, decodes=2) as world:
            begun = [asyncio.Event() for _ in range(4)]
            running = [asyncio.create_task(generated(world, number, event)) for number, event in enumerate(begun)]
            await asyncio.gather(*(event.wait() for event in begun))
            leaving = max(world.decodes, key=lambda one: len(one.service.streams))
            left = leaving.process.frame.name
            assert await leaving.process.drain() == 0
            await asyncio.gather(*running)

        def moved() -> list[CollectedSpan]:
            return [span for span in collector.named(names.SPAN_DECODE) if span.attributes[names.CAUSE] == "moved"]

        async def whole() -> list[CollectedSpan]:
            """The trace of a moved request, when its root is here: that is told last."""
            roots = {span.trace_id for span in collector.named(names.SPAN_GENERATE)}
            one = next((span.trace_id for span in moved() if span.trace_id in roots), "")
            return [span for span in collector.spans if span.trace_id == one]

        spans = await until(whole, 20.0, "the trace of a moved request arrives")
        assert isinstance(spans, list)
        check(spans, left)


def check(spans: list[CollectedSpan], left: str) -> None:
    """The whole tree of a request that moved away from the member `left`."""
    (root,) = (span for span in spans if span.name == names.SPAN_GENERATE)
    assert {span.parent_id for span in spans if span is not root} == {root.span_id}
    decode = {span.attributes[names.ATTEMPT]: span for span in spans if span.name == names.SPAN_DECODE}
    assert set(decode) == {1, 2}
    assert decode[1].attributes[names.DECODE_MEMBER] == left != decode[2].attributes[names.DECODE_MEMBER]
    assert decode[2].attributes[names.FINISH_REASONS] == ["max_output_tokens"] and all(span.ok for span in decode.values())
    handover = {span.attributes[names.ATTEMPT]: span for span in spans if span.name == names.SPAN_HANDOVER}
    assert handover[1].attributes[names.PREFILL_MEMBER] == "prefill-0"
    assert handover[2].attributes[names.PREFILL_MEMBER] == left, "the member that was left wrote the KV"
    assert [span.name for span in spans].count(names.SPAN_PREFILL) == 1, "nothing was computed again"
    (again,) = (attributes for attributes in root.event_attributes if attributes.get(names.CAUSE) == "moved")
    assert again[names.ATTEMPT] in (1, 2)
