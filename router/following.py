"""Taking up the stream of a request that exists: it runs here, has ended and is kept, or is at another router."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from lifecycle.record import RequestRecord
from lifecycle.states import State
from router import endings
from router.adoption import Adopter
from router.client_messages import completed
from router.kept_streams import Held
from router.relay import Elsewhere, RequestStream, TooManyReaders
from router.router_peers import TENANT_KEY, RouterPeers
from router.routes import Routes
from router.store import Orphan, StoreUnavailable
from router.stream_log import BeyondEnd, EventsGone
from rpc import clocks
from rpc.details import Quota
from rpc.status import StatusError, resource_exhausted, unavailable
from tandem.v1 import inference_pb2 as pb
from telemetry import names
from telemetry.tracing import OpenSpan, metadata_with, traceparent_from_metadata

#: Pause before it is looked again where a request is, while it changes routers.
_LOOK_S = 0.1
#: Number of the end of a request whose router is lost, for who has none of its events: beyond all that it can have had.
LOST_TERMINAL_NO = 2**32
#: Statuses that are a fault of the server, as OpenTelemetry has it; what the request itself came to is none.
_FAULTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS})
#: What another router says that has not got the request (any more); the record has the word then.
_NOT_THERE = frozenset({"NOT_HERE", "LOADING", "STORE_UNAVAILABLE"})


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for: events of a request from `next_no` on, for `tenant`.

    A repeated Generate has the `fingerprint` of its body, and is content with the stored end when the events are gone, unless
    the whole text was in the end. A `forwarded` call came from another router and is not passed on again.
    `moved`: the caller has read up to here from this router, which has given the request up. `span`: of this call.
    """

    request_id: str
    next_no: int
    tenant: str
    fingerprint: str | None = None
    forwarded: bool = False
    moved: bool = False
    span: OpenSpan | None = None

    def check(self, tenant: str, fingerprint: str, traceparent: str) -> None:
        """Whether it is this tenant's request, with this body; then the call's span points to it. Raises StatusError."""
        if self.fingerprint is None:
            if tenant != self.tenant:
                raise endings.unknown_request(self.request_id)
        elif self.fingerprint != fingerprint:
            raise endings.id_reused(self.request_id)
        if self.span is not None:
            self.span.link(traceparent)


class Follower:
    """Attach, and Generate with an id that is known. `wait_s` bounds the wait for a request that changes routers."""

    def __init__(self, routes: Routes, peers: RouterPeers, adopter: Adopter, wait_s: float) -> None:
        self._routes = routes
        self._cell = routes.cell
        self._peers = peers
        self._adopter = adopter
        self._wait_s = wait_s

    async def settled(self, request_id: str) -> None:
        """Returns when this router is not just about to have the request from another one: it must not begin it a second time."""
        await self._adopter.settled(request_id)

    async def follow(self, wanted: Wanted, context: Any) -> None:
        """Writes the wanted events until the end, wherever the request goes. Raises StatusError, the request's own too."""
        span = self._cell.tracing.start(
            names.SPAN_ATTACH,
            parent=traceparent_from_metadata(context.invocation_metadata()),
            attributes={names.REQUEST_ID: wanted.request_id, names.SEQUENCE_NO: wanted.next_no, names.TENANT: wanted.tenant},
            kind=SpanKind.SERVER,
        )
        try:
            await self._follow(replace(wanted, span=span), context)
        except StatusError as status:
            span.end(ok=status.code not in _FAULTS, error_type=status.reason)
            raise
        finally:
            span.end()

    async def _follow(self, wanted: Wanted, context: Any) -> None:
        next_no, until, moved = wanted.next_no, clocks.monotonic() + self._wait_s, wanted.moved
        while True:
            before = next_no
            try:
                following = await self._once(wanted, next_no, context)
                if following is None:
                    return
                next_no = following
            except Elsewhere as elsewhere:
                next_no, moved = elsewhere.next_no, True
            except StoreUnavailable as away:
                # A router that lost its store, and with it the request, may have the store back in a moment.
                if wanted.forwarded or not moved:
                    raise endings.store_away(away.retry_after_s) from None
            if next_no > before:
                until = clocks.monotonic() + self._wait_s
            elif clocks.monotonic() >= until:
                raise unavailable(f"request {wanted.request_id!r} changes routers; try again", "CHANGING_ROUTERS")
            await asyncio.sleep(_LOOK_S)

    async def _once(self, wanted: Wanted, next_no: int, context: Any) -> int | None:
        """Looks where the request is and writes what can be had there. The next event that is wanted, None after the end."""
        held, record = self._routes.held(wanted.request_id), None
        if held is not None:
            wanted.check(held.tenant, held.fingerprint, held.traceparent)
            record = await self._lost(wanted.request_id)
            if record is None:
                return None if await self._here(wanted, held, next_no, context) else next_no
        record = record or self._cell.unwritten.get(wanted.request_id) or await self._cell.store.get(wanted.request_id)
        if record is None:
            await self._cell.store.check_settled()
            raise endings.unknown_request(wanted.request_id)
        wanted.check(record.tenant, record.fingerprint, record.traceparent)
        if record.ended:
            return await self._ended(wanted, record, next_no, context)
        return await self._elsewhere(wanted, record, next_no, context)

    async def _lost(self, request_id: str) -> RequestRecord | None:
        """The record of a request that was taken or ended for dead while this router stood still and has not heard so: others
        may have told its end already. None for one that is this router's, as far as it can tell."""
        route, store = self._routes.get(request_id), self._cell.store
        if route is None or not route.ledger.idempotent:
            return None
        since = store.leased_since
        if since is not None and since <= route.arrival.deadlines.arrived_at:
            return None
        try:
            record = await store.get(request_id)
        except StoreUnavailable:
            return None
        return None if record is None or (record.router == store.router and record.counted) else record

    async def _here(self, wanted: Wanted, held: Held, next_no: int, context: Any) -> bool:
        """False when the event cannot be here yet, or is elsewhere by now."""
        if held.stream.moved or (held.filling and next_no > held.stream.log.next_no):
            return False
        self._cell.metrics.attaches.inc(1, "kept" if held.stream.ended else "live")
        await read(wanted.request_id, held.stream, next_no, context)
        return True

    async def _elsewhere(self, wanted: Wanted, record: RequestRecord, next_no: int, context: Any) -> int | None:
        """Passes on what the owner of a live request says. The next event that is wanted, None when there is none."""
        store = self._cell.store
        if record.router == store.router:
            return next_no  # it begins or ends this very moment
        self._must_not_be_forwarded(wanted)
        owner = await store.owner(record.router)
        if not owner.alive and record.decode_incarnation:
            await self._adopter.adopt(Orphan(wanted.request_id, record.router))
        if not owner.alive or not owner.address:
            return next_no
        return await self._passed_on(wanted, record, owner.address, next_no, context)

    @staticmethod
    def _must_not_be_forwarded(wanted: Wanted) -> None:
        if wanted.forwarded:
            raise unavailable(f"request {wanted.request_id!r} is not at this router", "NOT_HERE")

    async def _passed_on(self, wanted: Wanted, record: RequestRecord, address: str, next_no: int, context: Any) -> int | None:
        self._cell.metrics.attaches.inc(1, "passed_on")
        passed = await self._peers.attach(
            address,
            pb.AttachRequest(request_id=wanted.request_id, next_sequence_no=next_no).SerializeToString(),
            context.write,
            partial(self._there, wanted.request_id, record.router),
            metadata=metadata_with(wanted.span.traceparent if wanted.span else None, ((TENANT_KEY, wanted.tenant),)),
            timeout_s=context.time_remaining(),
        )
        if passed.dropped:
            return next_no + passed.events
        if passed.error is None:
            return None
        gone = passed.error.reason == "REPLAY_GONE" and wanted.fingerprint is not None and record.ended
        if passed.error.ours and passed.error.reason not in _NOT_THERE and not gone:
            raise passed.error
        return next_no + passed.events

    async def _there(self, request_id: str, router: str) -> bool:
        """Whether another router still has a request, as far as this one can tell."""
        if self._routes.get(request_id) is not None:
            return False
        try:
            return (await self._cell.store.owner(router)).alive
        except StoreUnavailable:
            return True

    async def _ended(self, wanted: Wanted, record: RequestRecord, next_no: int, context: Any) -> int | None:
        """Its events from the router that ran it, when they are kept there, else what the record says. The next event that is
        wanted when it is not known yet whether that router lives, None after the end."""
        if record.router != self._cell.store.router:
            self._must_not_be_forwarded(wanted)
            owner = await self._cell.store.owner(record.router)
            if owner.alive and owner.address:
                passed = await self._passed_on(wanted, record, owner.address, next_no, context)
                if passed is None:
                    return None
                next_no = passed
            elif owner.alive or owner.unsure:  # alive without an address: its heartbeat is still to come
                return next_no
        self._cell.metrics.attaches.inc(1, "stored")
        number = stored_end(wanted, record, next_no)
        if number is not None:
            await context.write(completed(record, number, ""))
        status = endings.status_of(record)
        if status is not None:
            raise status
        return None


def stored_end(wanted: Wanted, record: RequestRecord, next_no: int) -> int | None:
    """The number under which the stored end of a request is told, whose events are not kept; None when it was told before.

    Raises StatusError when the record is less than what was asked for: nobody is told an end who lacks what came before it,
    but for a repeated Generate, whose client sees by the number that there was more.
    """
    terminal = record.terminal_sequence_no
    if terminal is None:  # it failed with its router, which alone knew how far it had come
        # Started is told with the seat, and the store may never have heard of more than the ticket.
        began = any(step.state is State.ADMITTED for step in record.transitions)
        if began and not next_no and wanted.fingerprint is None:
            raise endings.replay_gone(wanted.request_id, 1)
        return next_no if next_no or not began else LOST_TERMINAL_NO
    if next_no > terminal + 1:
        raise endings.beyond_end(next_no, terminal + 1)
    if next_no == terminal + 1:
        return None
    # Number 1 is that of records from routers that did not say which mode it was.
    text_was_in_the_end = record.usage.returned_tokens > 0 and (record.final_only or terminal == 1)
    if text_was_in_the_end or (next_no < terminal and (wanted.fingerprint is None or next_no > 0)):
        raise endings.replay_gone(wanted.request_id, terminal + 1 if text_was_in_the_end else terminal)
    return terminal


async def read(
    request_id: str, stream: RequestStream, next_no: int, context: Any, write: Callable[[bytes], Awaitable[None]] | None = None
) -> None:
    """Writes a stream's events to a client, with `write` if it is given, until the end. Raises StatusError, Elsewhere."""
    try:
        reader = stream.reader(next_no)
    except EventsGone as gone:
        raise endings.replay_gone(request_id, gone.first_no) from None
    except BeyondEnd as beyond:
        raise endings.beyond_end(next_no, beyond.next_no) from None
    except TooManyReaders as full:
        quota = Quota("request", str(full), "readers", "attach_readers", full.most)
        raise resource_exhausted(f"{full}; try again", "TOO_MANY_READERS", retry_after_s=1.0, quotas=[quota]) from None
    try:
        await reader.pump(write or context.write)
    finally:
        reader.close(deadline=context.time_remaining() == 0)
