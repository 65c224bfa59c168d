"""The gRPC edge for clients: messages in, frozen values behind it, messages out.

Requests are taken as raw bytes, so that one that cannot be read is answered with the field's name; events of Generate are
written as the bytes that the decode member made.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from lifecycle.deadlines import Deadlines, Limits
from router import endings, validation
from router.adapters import REFUSALS
from router.cancelling import Canceller
from router.cell import Arrival
from router.choice_cancelling import ChoiceCanceller, answer_message
from router.client_messages import record_message
from router.config import RouterSettings
from router.following import Follower, Wanted, read
from router.grammar_check import GrammarCheck
from router.keeping import has_begun
from router.member_link import Role
from router.members import Members
from router.prompt import PromptEncoder
from router.refused import tried_before
from router.relay import Elsewhere
from router.request import Examined, ServedModel, ValidatedRequest
from router.route import Route
from router.router_peers import FORWARDED_KEY, TENANT_KEY
from router.routes import Routes, refresh
from router.spans import request_attributes
from router.store import StoreUnavailable
from router.tenant_limits import OverLimit
from router.wire import parse
from rpc import clocks
from rpc.gate import Caller, Gate, Kind
from rpc.status import StatusError
from tandem.v1 import inference_pb2 as pb
from telemetry import logs, names
from telemetry.tracing import Tracing, traceparent_from_metadata

SERVICE_NAME = "tandem.v1.InferenceService"
DEFAULT_TENANT = "default"
#: Metadata of a request that began while the store was away: it is served, but a second one of its id would be too.
IDEMPOTENCY_KEY = "tandem-idempotency"
_NOT_IDEMPOTENT = ((IDEMPOTENCY_KEY, "none"),)
#: Of an RPC's own deadline this share, at most so many seconds, is kept back for the terminal event to reach the client.
_RPC_MARGIN_SHARE = 0.05
_RPC_MARGIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Door:
    """What the servicer needs."""

    settings: RouterSettings
    model: ServedModel
    encoder: PromptEncoder
    members: Members
    routes: Routes
    canceller: Canceller
    choices: ChoiceCanceller
    follower: Follower
    tracing: Tracing
    grammars: GrammarCheck
    gate: Gate


class InferenceServicer:
    """The methods of tandem.v1.InferenceService."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._limits = door.settings.request_limits()

    @property
    def model(self) -> ServedModel:
        """The model that this router answers for."""
        return self._door.model

    async def generate(self, raw: bytes, context: Any) -> None:
        """One request. The route runs in a task of its own; here its events are written until the end. One that is known
        already is not run again: its stream is taken up."""
        arrived_at, tenant = clocks.monotonic(), ""
        try:
            tenant = self._tenant(await self._door.gate.client(context), context)
            examined = self._examined(raw, tenant)
            logs.bind(examined.request_id)
            self._knock(examined)
            request = await self._validated(examined)
            await self._door.follower.settled(request.request_id)
            new = self._door.routes.check(request)
        except StatusError as refusal:
            if await self._may_be_known(refusal, raw) and await self._ran_before(raw, context, tenant):
                return
            metrics = self._door.routes.cell.metrics
            metrics.refusals.inc(1, endings.REFUSAL_LABELS.get(refusal.reason, "invalid"))
            raise
        next_no = 0
        if new:
            chat = examined.prompt.chat is not None
            route = self._door.routes.start(self._arrival(request, context, arrived_at, chat=chat))
            try:
                await read(request.request_id, route.stream, 0, context, _saying_what_holds(route, context))
            except Elsewhere as moved:
                next_no = moved.next_no
            else:
                return
        repeated = Wanted(request.request_id, next_no, request.tenant, request.fingerprint, moved=new)
        await self._door.follower.follow(repeated, context)

    async def _may_be_known(self, refusal: StatusError, raw: bytes) -> bool:
        """Whether what was refused as new may be a request that exists, and so needs nothing of what is missing."""
        if refusal.reason in endings.TENANT_SHORT:
            return await has_begun(self._door.routes.cell.store, parse(pb.GenerateRequest, raw).request_id)
        return refusal.reason in REFUSALS

    async def _ran_before(self, raw: bytes, context: Any, tenant: str) -> bool:
        """A request whose adapter is not here any more, or not just now, or whose tenant may begin none: if it has begun already,
        it is followed as ever."""
        message = parse(pb.GenerateRequest, raw)
        try:
            repeated = Wanted(message.request_id, 0, tenant, validation.fingerprint(message, tenant))
            await self._door.follower.follow(repeated, context)
        except StatusError as error:
            if error.reason != endings.UNKNOWN_REQUEST:
                raise
            return False
        return True

    async def attach(self, raw: bytes, context: Any) -> None:
        """The stream of a request from an event on, wherever it runs or has run."""
        caller = await self._door.gate.client(context)
        tenant = self._tenant(caller, context)
        message = parse(pb.AttachRequest, raw)
        validation.check_request_id(message.request_id)
        logs.bind(message.request_id)
        forwarded = _forwarded(caller, context)
        wanted = Wanted(message.request_id, message.next_sequence_no, tenant, forwarded=forwarded)
        await self._door.follower.follow(wanted, context)

    async def cancel(self, raw: bytes, context: Any) -> Any:
        """Ends a request by id, or one of its choices, wherever it runs."""
        caller = await self._door.gate.client(context)
        message = parse(pb.CancelRequest, raw)
        validation.check_cancel(message.request_id, message.reason)
        logs.bind(message.request_id)
        if message.HasField("choice"):
            forwarded, remaining_s = _forwarded(caller, context), context.time_remaining()
            return await self._door.choices.cancel(message, caller, forwarded=forwarded, timeout_s=remaining_s)
        owner = "" if caller.operator else caller.tenant
        answer = await self._door.canceller.cancel(message.request_id, message.reason, wait=message.wait, tenant=owner)
        return answer_message(answer)

    async def get(self, raw: bytes, context: Any) -> Any:
        """The record: live from here, or as stored."""
        caller = await self._door.gate.client(context)
        request_id = parse(pb.GetRequest, raw).request_id
        validation.check_request_id(request_id)
        route = self._door.routes.get(request_id)
        if route is not None and route.ledger.created:
            if not caller.may_touch(route.request.tenant):
                raise endings.unknown_request(request_id)
            return pb.GetResponse(record=record_message(refresh(route)))
        cell = self._door.routes.cell
        record = cell.unwritten.get(request_id)
        try:
            record = record or await cell.store.get(request_id)
            if record is None:
                await cell.store.check_settled()
        except StoreUnavailable as away:
            raise endings.store_away(away.retry_after_s) from None
        if record is None or not caller.may_touch(record.tenant):
            raise endings.unknown_request(request_id)
        return pb.GetResponse(record=record_message(record))

    async def list_models(self, raw: bytes, context: Any) -> Any:
        """The one model of this cell, and who serves it now."""
        await self._door.gate.client(context)
        parse(pb.ListModelsRequest, raw)
        model, members = self._door.model, self._door.members
        one = pb.Model(
            name=model.name,
            snapshot=model.snapshot,
            context_tokens=members.capacity().context_tokens,
            vocabulary_size=model.vocabulary_size,
            prefill_members=len(members.taking(Role.PREFILL)),
            decode_members=len(members.taking(Role.DECODE)),
            adapters=members.adapters(),
        )
        return pb.ListModelsResponse(models=[one])

    def _examined(self, raw: bytes, tenant: str) -> Examined:
        message, door = parse(pb.GenerateRequest, raw), self._door
        return validation.examine(message, tenant, door.model, self._limits, lambda: secrets.randbits(64), door.members.adapter)

    async def _validated(self, examined: Examined) -> ValidatedRequest:
        token_ids, budgets = await self._door.encoder.encode(examined.prompt), self._door.routes.cell.budgets(examined.tenant)
        request = validation.complete(examined, token_ids, self._door.members.capacity(), self._limits, budgets)
        if request.grammar is not None and self._door.routes.get(request.request_id) is None:
            await self._door.grammars.check(request.grammar)
        return request

    def _knock(self, examined: Examined) -> None:
        """Counts a request before work is done for it, unless it is known here. Raises StatusError (RESOURCE_EXHAUSTED)."""
        if self._door.routes.held(examined.request_id) is not None:
            return
        try:
            self._door.routes.cell.tenants.knock(examined.tenant, clocks.monotonic())
        except OverLimit as over:
            raise endings.over_limit(over, examined.tenant) from None

    def _tenant(self, caller: Caller, context: Any) -> str:
        """Who is accounted: whose the token is. Without tokens only something trusted in front of this router may say so, and
        with them another router, which passes on what a client of its asked for."""
        if caller.kind is Kind.CLIENT:
            return caller.tenant
        if caller.kind is not Kind.CELL and not self._door.settings.trust_tenant_header:
            return DEFAULT_TENANT
        metadata = context.invocation_metadata() or ()
        tenant = next((str(value) for key, value in metadata if key == TENANT_KEY), DEFAULT_TENANT)
        validation.check_tenant(tenant)
        return tenant

    def _arrival(self, request: ValidatedRequest, context: Any, arrived_at: float, *, chat: bool) -> Arrival:
        operation = names.OPERATION_CHAT if chat else names.OPERATION_TEXT_COMPLETION
        span = self._door.tracing.start(
            names.SPAN_GENERATE,
            parent=traceparent_from_metadata(context.invocation_metadata()),
            attributes=request_attributes(request, operation),
            kind=SpanKind.SERVER,
        )
        limits, rpc_bound = request.limits, False
        if request.delivery.detach_s is None:
            limits, rpc_bound = with_rpc_deadline(limits, context.time_remaining(), clocks.monotonic() - arrived_at)
        returned = tried_before(context.invocation_metadata() or ())
        return Arrival(request, Deadlines(limits, arrived_at), rpc_bound, span, returned)


def _forwarded(caller: Caller, context: Any) -> bool:
    """Whether another router asks."""
    return caller.may_forward and any(key == FORWARDED_KEY for key, _ in context.invocation_metadata() or ())


def generic_handler(serving: Callable[[], InferenceServicer]) -> Any:
    """The service as gRPC takes it. `serving` gives the servicer at the time of a call; Generate and Attach write bytes."""

    async def generate(raw: bytes, context: Any) -> None:
        await serving().generate(raw, context)

    async def attach(raw: bytes, context: Any) -> None:
        await serving().attach(raw, context)

    async def cancel(raw: bytes, context: Any) -> Any:
        return await serving().cancel(raw, context)

    async def get(raw: bytes, context: Any) -> Any:
        return await serving().get(raw, context)

    async def list_models(raw: bytes, context: Any) -> Any:
        return await serving().list_models(raw, context)

    unary = grpc.unary_unary_rpc_method_handler
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "Attach": grpc.unary_stream_rpc_method_handler(attach),
        "Cancel": unary(cancel, response_serializer=pb.CancelResponse.SerializeToString),
        "Get": unary(get, response_serializer=pb.GetResponse.SerializeToString),
        "ListModels": unary(list_models, response_serializer=pb.ListModelsResponse.SerializeToString),
    }
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


def with_rpc_deadline(limits: Limits, remaining_s: float | None, age_s: float) -> tuple[Limits, bool]:
    """The limits with the overall one cut to what the RPC's own deadline leaves, and whether that is what bounds it.

    `remaining_s` is counted from now, `age_s` after the arrival; a margin is kept for the terminal event.
    """
    if remaining_s is None:
        return limits, False
    margin_s = min(_RPC_MARGIN_S, remaining_s * _RPC_MARGIN_SHARE)
    overall_s = age_s + max(0.0, remaining_s - margin_s)
    if limits.overall_s is not None and limits.overall_s <= overall_s:
        return limits, False
    return Limits(limits.queue_s, limits.first_token_s, limits.inter_token_s, overall_s), True


def _saying_what_holds(route: Route, context: Any) -> Callable[[bytes], Awaitable[None]]:
    """Writes events; before the first one a client is told when its request id protects it from nothing."""
    said = False

    async def write(event: bytes) -> None:
        nonlocal said
        if not said and not route.ledger.idempotent:
            context.set_trailing_metadata(_NOT_IDEMPOTENT)
            await context.send_initial_metadata(_NOT_IDEMPOTENT)
        said = True
        await context.write(event)

    return write
