"""The gRPC edge of a prefill member. Protobuf stops here."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from kv_transfer.offer import NAME_CHARACTERS_MAX, BadGrant, LayoutMismatch, grant_from_proto
from kv_transfer.plan import SourceMemory, plan
from lifecycle.adapters import Adapter
from lifecycle.prefix_keys import SALT_BYTES, adapted_salt
from lifecycle.record import AttemptKey
from member.adapters import adapter_of, lacks_adapter
from member.drain_door import DrainDoor
from member.inbox import Inbox, InboxFull
from prefill_svc import messages as m
from rpc import clocks
from tandem.pools.v1 import prefill_pb2 as pb
from tandem.pools.v1 import prefill_pb2_grpc as pb_grpc
from telemetry import logs, names
from telemetry.tracing import MAX_EVENTS, SpanEvent, Tracing, unix_seconds

_LOG = logging.getLogger("prefill")

#: Causes that are nobody's failure: the request ended, and its prefill with it.
NOT_WANTED = frozenset({m.ABANDONED, m.REVOKED})

CallOutput = m.Accepted | m.Progress | m.Committed | m.Failed | m.Drained


@dataclass(frozen=True, slots=True)
class Identity:
    """What this member is, as a router must name it."""

    member: str
    incarnation: str
    model_snapshot: str
    adapters: tuple[Adapter, ...] = ()


class _Call:
    """One open Prefill call: the newest of each kind of event, so that a slow reader holds nothing up.

    `chunks` are for the trace `traceparent`: when each ended, in monotonic seconds, and the tokens computed by then.
    """

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent
        self.chunks: list[tuple[float, int]] = []
        self._news = asyncio.Event()
        self._accepted: m.Accepted | None = None
        self._progress: m.Progress | None = None
        self._last: m.Committed | m.Failed | None = None

    def put(self, output: m.Output) -> None:
        match output:
            case m.Accepted():
                self._accepted = output
            case m.Progress():
                self._progress = output
                if len(self.chunks) < MAX_EVENTS:
                    self.chunks.append((output.at, output.computed_tokens))
            case m.Committed() | m.Failed():
                self._last = output
        self._news.set()

    async def events(self) -> AsyncIterator[m.Accepted | m.Progress | m.Committed | m.Failed]:
        """Events in order; the last one is Committed or Failed."""
        while True:
            await self._news.wait()
            self._news.clear()
            for name in ("_accepted", "_progress", "_last"):
                event = getattr(self, name)
                if event is not None:
                    setattr(self, name, None)
                    yield event
                    if name == "_last":
                        return


class PrefillServicer(pb_grpc.PrefillServiceServicer):
    """Turns calls into commands for the engine thread, and its outputs into answers."""

    def __init__(self, inbox: Inbox[m.Command], tracing: Tracing, observe: Callable[[m.Output, str], None]) -> None:
        """`observe` gets each output with the traceparent of its call, empty without one."""
        self._inbox = inbox
        self._tracing = tracing
        self._observe = observe
        self._calls: dict[str, _Call] = {}
        self._drains = DrainDoor(lambda grant_id, asker: inbox.put_nowait(m.Drain(grant_id, asker)))

    def open(self, identity: Identity, source: SourceMemory) -> None:
        """The model is loaded: calls may come."""
        self._identity = identity
        self._source = source
        self._drains.open(identity.member, identity.incarnation)

    @property
    def open_calls(self) -> int:
        """Prefill calls that are open now."""
        return len(self._calls)

    def deliver(self, output: CallOutput) -> None:
        """Called on the event loop with each output of the engine that some call waits for."""
        call = None if isinstance(output, m.Drained) else self._calls.get(output.grant_id)
        self._observe(output, call.traceparent if call is not None else "")
        if isinstance(output, m.Drained):
            self._drains.answered(output.asker, output.committed)
        elif call is not None:
            call.put(output)

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[pb.PrefillResponse]:  # noqa: N802
        """One job: accepted, progress, then committed or failed. Ending the call early gives the job up."""
        arrived_at = clocks.monotonic()
        logs.bind(request_id=request.key.request_id, attempt=request.key.attempt, traceparent=request.traceparent)
        submit = self._parse(request)
        if isinstance(submit, m.Failed):
            yield _response(submit)
            return
        if submit.grant_id in self._calls:
            yield _response(m.Failed(submit.grant_id, m.BAD_GRANT, "another call is filling this grant"))
            return
        call = self._calls[submit.grant_id] = _Call(request.traceparent)
        last: m.Output | None = None
        try:
            self._inbox.put_nowait(submit)
            async for event in call.events():
                last = event
                yield _response(event)
        except InboxFull as error:
            last = m.Failed(submit.grant_id, m.QUEUE_FULL, str(error))
            yield _response(last)
        finally:
            del self._calls[submit.grant_id]
            if not isinstance(last, m.Committed | m.Failed):
                self._inbox.put_always(m.Abandon(submit.grant_id))
            self._trace(call, submit.key, last, arrived_at)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        """Answers when no write for the grant is in flight and none will start."""
        return await self._drains.drain(request, context)

    def _parse(self, request: pb.PrefillRequest) -> m.Submit | m.Failed:
        grant_id = bytes(request.grant.grant_id).hex()
        if request.incarnation != self._identity.incarnation:
            return m.Failed(grant_id, m.WRONG_INCARNATION, f"{self._identity.member} runs as {self._identity.incarnation}")
        if request.model_snapshot != self._identity.model_snapshot:
            return m.Failed(grant_id, m.UNKNOWN_MODEL, f"{self._identity.member} serves {self._identity.model_snapshot}")
        adapter = adapter_of(request)
        if lacking := lacks_adapter(self._identity.adapters, adapter):
            return m.Failed(grant_id, m.UNKNOWN_ADAPTER, f"{self._identity.member}: {lacking}")
        if not request.prompt_token_ids:
            return m.Failed(grant_id, m.BAD_GRANT, "prompt_token_ids is empty")
        if len(request.tenant_salt) not in (0, SALT_BYTES):
            problem = f"tenant_salt must be {SALT_BYTES} bytes, got {len(request.tenant_salt)}"
            return m.Failed(grant_id, m.BAD_GRANT, problem)
        try:
            handover = plan(grant_from_proto(request.grant, self._source.layout), self._source)
        except LayoutMismatch as error:
            # Routers know the reason by its short name; here it says what differs.
            _LOG.warning("grant of %s refused: %s", request.grant.decode.member[:NAME_CHARACTERS_MAX], error)
            return m.Failed(grant_id, m.LAYOUT_MISMATCH, str(error))
        except BadGrant as error:
            return m.Failed(grant_id, m.BAD_GRANT, str(error))
        return m.Submit(
            key=AttemptKey(request.key.request_id, request.key.attempt),
            plan=handover,
            prompt_token_ids=tuple(request.prompt_token_ids),
            priority=request.priority,
            remaining_s=request.remaining_s if request.HasField("remaining_s") else None,
            salt=adapted_salt(bytes(request.tenant_salt), adapter),
            adapter=adapter.name if adapter else "",
        )

    def _trace(self, call: _Call, key: AttemptKey, last: m.Output | None, arrived_at: float) -> None:
        """Record the prefill span from what happened. Times are monotonic seconds."""
        attributes: dict[str, str | int | float] = {
            names.REQUEST_ID: key.request_id,
            names.ATTEMPT: key.attempt,
            names.PREFILL_MEMBER: self._identity.member,
        }
        error = ""
        if isinstance(last, m.Committed):
            figures = last.figures
            attributes |= {
                names.SENT_BYTES: figures.sent_bytes,
                names.EXPOSED_SECONDS: figures.exposed_s,
                names.POST_SECONDS: figures.post_s,
                names.PREFILL_QUEUE_SECONDS: figures.queue_s,
            }
        else:
            cause = attributes[names.CAUSE] = last.cause if isinstance(last, m.Failed) else m.ABANDONED
            error = "" if cause in NOT_WANTED else cause
        _LOG.info(
            "prefill ended",
            extra={"request_id": key.request_id, "attempt": key.attempt, "cause": attributes.get(names.CAUSE, "")},
        )
        self._tracing.span(
            names.SPAN_PREFILL,
            parent=call.traceparent or None,
            start_s=unix_seconds(arrived_at),
            end_s=clocks.wall(),
            attributes=attributes,
            events=[
                SpanEvent(names.EVENT_CHUNK, unix_seconds(at), {names.COMPUTED_TOKENS: tokens}) for at, tokens in call.chunks
            ],
            ok=not error,
            error_type=error,
        )


def _response(output: m.Output) -> pb.PrefillResponse:
    match output:
        case m.Accepted():
            return pb.PrefillResponse(accepted=pb.PrefillAccepted(queued_tokens=output.queued_tokens))
        case m.Progress():
            progress = pb.PrefillProgress(computed_tokens=output.computed_tokens, cached_tokens=output.cached_tokens)
            return pb.PrefillResponse(progress=progress)
        case m.Committed():
            figures = output.figures
            return pb.PrefillResponse(
                committed=pb.PrefillCommitted(
                    cached_tokens=figures.cached_tokens,
                    sent_bytes=figures.sent_bytes,
                    queue_s=figures.queue_s,
                    compute_s=figures.compute_s,
                    handover_s=figures.handover_s,
                    exposed_s=figures.exposed_s,
                    post_s=figures.post_s,
                )
            )
        case m.Failed():
            failed = pb.PrefillFailed(cause=output.cause, retryable=output.retryable, detail=output.detail)
            return pb.PrefillResponse(failed=failed)
    raise TypeError(f"{type(output).__name__} is not an event of a Prefill call")
