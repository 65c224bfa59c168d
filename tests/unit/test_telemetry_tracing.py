import asyncio
import logging

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from telemetry import names
from telemetry.tracing import (
    MAX_EVENTS,
    SpanEvent,
    is_sampled,
    metadata_with,
    setup_tracing,
    trace_id_of,
    traceparent_from_metadata,
    unix_seconds,
)
from tests.otlp_collector import OtlpCollector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-1] + "0"


@pytest.fixture
def kept():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(kept):
    made = setup_tracing("tandem-test", exporter=kept)
    yield made
    made.shutdown()


def finished(tracing, kept):
    tracing.flush()
    return {span.name: span for span in kept.get_finished_spans()}


def test_a_phase_is_recorded_from_its_times(tracing, kept):
    events = [SpanEvent(names.EVENT_CHUNK, 100.25, {names.CHUNK_TOKENS: 64})]
    made = tracing.span(
        names.SPAN_PREFILL,
        parent=PARENT,
        start_s=100.0,
        end_s=100.5,
        attributes={names.ATTEMPT: 2},
        events=events,
        links=[PARENT, "?"],
    )
    span = finished(tracing, kept)["prefill"]
    assert (span.start_time, span.end_time) == (100_000_000_000, 100_500_000_000)
    assert trace_id_of(made) == trace_id_of(PARENT) == f"{span.context.trace_id:032x}"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(span.attributes) == {names.ATTEMPT: 2}
    assert [(event.name, event.timestamp) for event in span.events] == [("chunk", 100_250_000_000)]
    assert len(span.links) == 1


def test_a_span_points_to_another_once_that_is_found_later(tracing, kept):
    span = tracing.start(names.SPAN_ATTACH)
    for traceparent in (PARENT, "?", "", PARENT):
        span.link(traceparent)
    span.end()
    links = finished(tracing, kept)[names.SPAN_ATTACH].links
    assert [f"{link.context.trace_id:032x}" for link in links] == [trace_id_of(PARENT)]


def test_ids_are_known_before_the_end(tracing, kept):
    root = tracing.start("Generate")
    child = tracing.span("queue", parent=root.traceparent, start_s=1, end_s=2)
    assert trace_id_of(child) == root.trace_id
    assert "Generate" not in finished(tracing, kept)
    root.event("retry", {"n": 1})
    root.set({names.STATE: "failed"})
    root.end(ok=False, error_type="prefill_lost")
    root.end(ok=True)
    root.event("late")
    spans = finished(tracing, kept)
    assert spans["Generate"].attributes == {names.STATE: "failed", "error.type": "prefill_lost"}
    assert not spans["Generate"].status.is_ok
    assert spans["queue"].parent.span_id == spans["Generate"].context.span_id
    assert [event.name for event in spans["Generate"].events] == ["retry"]


def test_spans_have_no_hidden_parent(tracing, kept):
    from opentelemetry import trace

    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))):
        assert trace_id_of(tracing.span("alone", start_s=1, end_s=2)) != f"{1:032x}"


def test_an_end_before_the_start_is_moved(tracing, kept):
    tracing.span("x", start_s=5, end_s=4)
    span = finished(tracing, kept)["x"]
    assert span.end_time == span.start_time


def test_events_are_bounded(tracing, kept):
    tracing.span("x", start_s=1, end_s=2, events=[SpanEvent("e", 1.5)] * (MAX_EVENTS + 50))
    assert len(finished(tracing, kept)["x"].events) == MAX_EVENTS


@pytest.mark.parametrize("bad", [None, "", "garbage", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_parent_that_cannot_be_read_is_none(tracing, kept, bad):
    made = tracing.span("x", parent=bad, start_s=1, end_s=2)
    assert trace_id_of(made)
    assert finished(tracing, kept)["x"].parent is None
    assert trace_id_of(bad) == "" and not is_sampled(bad)


def test_a_trace_that_is_not_recorded_stays_so(tracing, kept):
    made = tracing.start("x", parent=NOT_SAMPLED)
    assert trace_id_of(made.traceparent) == trace_id_of(PARENT) and not is_sampled(made.traceparent)
    made.event("e")
    made.end()
    assert finished(tracing, kept) == {}


def test_the_sampler_of_the_environment_is_used(monkeypatch, kept):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing = setup_tracing("tandem-test", exporter=kept)
    tracing.span("new", start_s=1, end_s=2)
    tracing.span("continued", parent=PARENT, start_s=1, end_s=2)
    assert set(finished(tracing, kept)) == {"continued"}
    tracing.shutdown()


def test_metadata():
    assert traceparent_from_metadata([("a", "b"), ("traceparent", PARENT)]) == PARENT
    assert traceparent_from_metadata([("traceparent", "garbage")]) is None
    assert traceparent_from_metadata(None) is None
    assert metadata_with(PARENT, [("traceparent", "old"), ("a", "b")]) == (("a", "b"), ("traceparent", PARENT))
    assert metadata_with(None, [("a", "b")]) == (("a", "b"),)


def test_without_a_collector_there_are_ids(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = setup_tracing("tandem-test")
    assert not tracing.exporting
    assert tracing.start("x").trace_id
    assert tracing.shutdown()


class Stuck(SpanExporter):
    """A collector that does not answer."""

    def __init__(self):
        import threading

        self.answer = threading.Event()

    def export(self, spans):
        self.answer.wait(10)
        return SpanExportResult.FAILURE

    def shutdown(self):
        pass


@pytest.mark.slow
def test_a_collector_that_does_not_answer_delays_nobody(caplog):
    stuck = Stuck()
    tracing = setup_tracing("tandem-test", exporter=stuck)
    with caplog.at_level(logging.ERROR):
        for _ in range(5000):  # more than the queue holds
            tracing.span("x", start_s=1, end_s=2)
    assert tracing.shutdown(timeout_s=0.01) is False
    stuck.answer.set()


def test_wall_time_of_a_monotonic_reading():
    import time

    assert abs(unix_seconds(time.monotonic() - 5) - (time.time() - 5)) < 1


@pytest.mark.slow
async def test_spans_reach_a_collector_over_grpc():
    async with OtlpCollector() as collector:
        router = setup_tracing("tandem-router", collector.endpoint)
        decode = setup_tracing("tandem-decode", "http://" + collector.endpoint)
        root = router.start("Generate", attributes={names.REQUEST_ID: "r1", names.FINISH_REASONS: ["eos"]})
        decode.span("decode", parent=root.traceparent, start_s=10, end_s=11, events=[SpanEvent("first_token", 10.5)])
        root.end()
        await asyncio.to_thread(router.shutdown, 10)
        await asyncio.to_thread(decode.shutdown, 10)
        await collector.wait_for(2)
        (generate,), (decoding,) = collector.named("Generate"), collector.named("decode")
    assert (generate.service, decoding.service) == ("tandem-router", "tandem-decode")
    assert decoding.trace_id == generate.trace_id and decoding.parent_id == generate.span_id
    assert generate.attributes == {names.REQUEST_ID: "r1", names.FINISH_REASONS: ["eos"]}
    assert (decoding.start_s, decoding.end_s, decoding.events) == (10, 11, ("first_token",))
