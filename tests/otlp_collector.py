"""A collector of traces within the test's process: an OTLP gRPC server that keeps what it gets."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class CollectedSpan:
    """One span as it arrived. Ids are hex, times are unix seconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: tuple[str, ...]
    event_attributes: tuple[dict[str, Any], ...]
    links: tuple[str, ...]  # trace ids
    ok: bool


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """`async with OtlpCollector() as collector:` listens on `collector.endpoint`.

    An exporter in the same process must not be flushed on the event loop's thread: it would wait for this server.
    """

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        #: Every export as it came, for looking at all of it.
        self.raw: list[bytes] = []
        self.endpoint = ""
        self._arrived = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> "OtlpCollector":
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with self._arrived:
            self.raw.append(request.SerializeToString())
            for resource_spans in request.resource_spans:
                service = _attributes(resource_spans.resource.attributes).get("service.name", "")
                for scope in resource_spans.scope_spans:
                    self.spans += [_collected(service, span) for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, wanted: int | Callable[[Sequence[CollectedSpan]], bool], timeout_s: float = 20.0) -> None:
        """Wait for that many spans, or until `wanted(spans)` holds. Raises TimeoutError with what did arrive."""
        enough = wanted if callable(wanted) else lambda spans: len(spans) >= wanted
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: enough(self.spans))
        except TimeoutError:
            seen = [(span.service, span.name) for span in self.spans]
            raise TimeoutError(f"the spans did not arrive within {timeout_s} s; there are {seen}") from None

    def named(self, name: str) -> list[CollectedSpan]:
        """Spans of that name, in order of arrival."""
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def collecting() -> Iterator[OtlpCollector]:
    """A collector on an event loop and a thread of its own, for fixtures that outlive a test's loop: to be read, not awaited."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="otlp-collector")
    thread.start()

    async def made() -> OtlpCollector:
        return OtlpCollector()

    collector = asyncio.run_coroutine_threadsafe(made(), loop).result()
    try:
        asyncio.run_coroutine_threadsafe(collector.__aenter__(), loop).result()
        yield collector
    finally:
        asyncio.run_coroutine_threadsafe(collector.__aexit__(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        event_attributes=tuple(_attributes(event.attributes) for event in span.events),
        links=tuple(link.trace_id.hex() for link in span.links),
        ok=span.status.code != 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
