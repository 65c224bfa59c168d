"""Spans made from times: phases are written down as they happen and emitted afterwards, under an explicit parent.

A parent travels as a W3C traceparent string, in gRPC metadata and in the grant, never in a hidden context. Export is by
batch in a thread of its own; nothing here waits for a collector. The usual OTEL_* variables choose sampler, resource,
batch sizes and exporter settings.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

#: Key of gRPC metadata, lower case.
TRACEPARENT_KEY = "traceparent"
#: Most links and events of one span; OpenTelemetry drops what is beyond 128.
MAX_LINKS = 128
MAX_EVENTS = 128

_PROPAGATOR = TraceContextTextMapPropagator()
_LOG = logging.getLogger("telemetry.tracing")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span, at a time in unix seconds."""

    name: str
    at_s: float
    attributes: Attributes = field(default_factory=dict)


class OpenSpan:
    """A span that has begun. Its ids are known at once; it is exported after `end`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._events = 0
        self._linked: set[str] = set()
        self.traceparent = _traceparent_of(span)

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return trace_id_of(self.traceparent)

    def set(self, attributes: Attributes) -> None:
        """Add attributes, or replace them."""
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes | None = None, at_s: float | None = None) -> None:
        """Note an event at `at_s` in unix seconds (None: now). Beyond MAX_EVENTS the span keeps its first ones."""
        if self._events < MAX_EVENTS:
            self._events += 1
            self._span.add_event(name, dict(attributes or {}), None if at_s is None else _ns(at_s))

    def link(self, traceparent: str) -> None:
        """Point to another span, once. One that cannot be read, and what is beyond MAX_LINKS, is left out."""
        context = _context_of(traceparent)
        if context is not None and traceparent not in self._linked and len(self._linked) < MAX_LINKS:
            self._linked.add(traceparent)
            self._span.add_link(context)

    def end(self, ok: bool = True, error_type: str = "", end_s: float | None = None) -> None:
        """End the span at `end_s` in unix seconds (None: now). Ending twice is ignored."""
        if not self._span.is_recording():
            return
        if not ok:
            self._span.set_attribute("error.type", error_type or "_OTHER")
            self._span.set_status(Status(StatusCode.ERROR, error_type))
        self._span.end(None if end_s is None else _ns(end_s))


class Tracing:
    """The tracer of one process."""

    def __init__(self, provider: TracerProvider, exporting: bool) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem")
        self.exporting = exporting

    def start(
        self,
        name: str,
        *,
        parent: str | None = None,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
    ) -> OpenSpan:
        """Begin a span at `start_s` in unix seconds (None: now).

        `parent` and `links` are traceparents; one that cannot be read counts as none. Attributes that a sampler should
        see belong here rather than in `set`.
        """
        span = self._tracer.start_span(
            name,
            context=_extract(parent),
            kind=kind,
            attributes=dict(attributes or {}),
            links=_links(links),
            start_time=None if start_s is None else _ns(start_s),
            record_exception=False,
            set_status_on_exception=False,
        )
        return OpenSpan(span)

    def span(
        self,
        name: str,
        *,
        parent: str | None = None,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        events: Sequence[SpanEvent] = (),
        ok: bool = True,
        error_type: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> str:
        """Record a span that is over, from times in unix seconds; returns its traceparent.

        An end before the start (two clock readings of different kinds) is moved to the start.
        """
        opened = self.start(name, parent=parent, attributes=attributes, links=links, kind=kind, start_s=start_s)
        for one in events:
            opened.event(one.name, one.attributes, one.at_s)
        opened.end(ok, error_type, max(start_s, end_s))
        return opened.traceparent

    def shutdown(self, timeout_s: float = 2.0) -> bool:
        """Export what is waiting and stop; False when the collector took longer than `timeout_s` and spans may be lost."""
        # The library's own shutdown can wait 30 s for a collector that is away.
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            _LOG.warning("the trace collector did not take the last spans within %s s; they are lost", timeout_s)
        return not ending.is_alive()

    def flush(self) -> None:
        """Export what is waiting, now, in this thread. For tests and command lines; it waits for the collector."""
        self._provider.force_flush()


def setup_tracing(
    service: str,
    endpoint: str | None = None,
    exporter: SpanExporter | None = None,
    resource: Mapping[str, str] | None = None,
) -> Tracing:
    """The tracer of the process `service`, such as "tandem-router".

    Spans go to `exporter`, or by OTLP over gRPC to `endpoint` ("host:port" or "http://host:port"), or where
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT points. With none of them spans have ids, so that
    logs can be joined, and are exported nowhere.
    """
    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or service, "service.namespace": "tandem"}
    provider = TracerProvider(resource=Resource.create({**attributes, **(resource or {})}), shutdown_on_exit=False)
    chosen = exporter if exporter is not None else _otlp_exporter(endpoint)
    if chosen is not None:
        provider.add_span_processor(BatchSpanProcessor(chosen))
    return Tracing(provider, exporting=chosen is not None)


def traceparent_from_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The traceparent of an incoming call; None when there is none or it is not a valid one."""
    for key, value in metadata or ():
        if key == TRACEPARENT_KEY and isinstance(value, str):
            return value if trace_id_of(value) else None
    return None


def metadata_with(
    traceparent: str | None, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` for an outgoing call, with `traceparent` in place of any other."""
    kept = tuple((key, value) for key, value in metadata if key != TRACEPARENT_KEY)
    return (*kept, (TRACEPARENT_KEY, traceparent)) if traceparent else kept


def trace_id_of(traceparent: str | None) -> str:
    """32 hex digits, or "" when `traceparent` is absent or not valid."""
    context = _context_of(traceparent)
    return trace.format_trace_id(context.trace_id) if context is not None else ""


def is_sampled(traceparent: str | None) -> bool:
    """Whether the trace is recorded: an exemplar that points to an unrecorded one helps nobody."""
    context = _context_of(traceparent)
    return context is not None and context.trace_flags.sampled


def unix_seconds(monotonic_s: float) -> float:
    """The wall time of a reading of this process's monotonic clock, in unix seconds."""
    return time.time() - (time.monotonic() - monotonic_s)


def _otlp_exporter(endpoint: str | None) -> SpanExporter | None:
    chosen = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not chosen:
        return None
    # Imported here: it costs start-up time, and most command lines do not export.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Without a scheme the library would ask for TLS.
    return OTLPSpanExporter(endpoint=chosen if "://" in chosen else f"http://{chosen}")


@lru_cache(maxsize=1024)
def _extract(traceparent: str | None) -> Context:
    """A context that holds `traceparent` alone: never the caller's current span. One request asks for the same many times."""
    return _PROPAGATOR.extract({TRACEPARENT_KEY: traceparent or ""}, context=Context())


@lru_cache(maxsize=1024)
def _context_of(traceparent: str | None) -> trace.SpanContext | None:
    if not traceparent:
        return None
    context = trace.get_current_span(_extract(traceparent)).get_span_context()
    return context if context.is_valid else None


def _links(traceparents: Sequence[str]) -> list[Link]:
    contexts = (_context_of(one) for one in traceparents[:MAX_LINKS])
    return [Link(context) for context in contexts if context is not None]


def _traceparent_of(span: trace.Span) -> str:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT_KEY, "")


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
