"""The gRPC edge for clients: messages in, frozen values behind it, messages out.

Requests are taken as raw bytes, so that one that cannot be read is answered with the field's name; events of Generate are
written as the bytes that the decode member made.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from lifecycle.deadlines import Deadlines, Limits
from lifecycle.finish import Cause, Ending, FinishReason
from router import endings, validation
from router.cancelling import Canceller
from router.cell import Arrival
from router.client_messages import REASONS, STATES, record_message
from router.config import RouterSettings
from router.member_link import Role
from router.members import Members
from router.prompt import PromptEncoder
from router.request import Examined, ServedModel, ValidatedRequest
from router.routes import Routes, refresh
from router.spans import request_attributes
from router.store import StoreUnavailable
from router.wire import parse
from rpc.details import Resource
from rpc.status import StatusError, not_found, slow_consumer, unavailable
from tandem.v1 import inference_pb2 as pb
from telemetry import logs, names
from telemetry.tracing import Tracing, traceparent_from_metadata

SERVICE_NAME = "tandem.v1.InferenceService"
TENANT_KEY = "tandem-tenant"
DEFAULT_TENANT = "default"
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
    tracing: Tracing


class InferenceServicer:
    """The methods of tandem.v1.InferenceService."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._limits = door.settings.request_limits()
        self._budgets = door.settings.admission_settings().budgets

    async def generate(self, raw: bytes, context: Any) -> None:
        """One request. The route runs in a task of its own; here its events are written until the end."""
        arrived_at = time.monotonic()
        try:
            examined = self._examined(raw, context)
            logs.bind(examined.request_id)
            request = await self._validated(examined)
            self._door.routes.check(request)
        except StatusError as refusal:
            metrics = self._door.routes.cell.metrics
            metrics.refusals.inc(1, endings.REFUSAL_LABELS.get(refusal.reason, "invalid"))
            raise
        chat = examined.prompt.chat is not None
        route = self._door.routes.start(self._arrival(request, context, arrived_at, chat=chat))
        status: StatusError | None = None
        try:
            status = await route.stream.pump(context.write)
        except TimeoutError:
            status = slow_consumer("the rest of the stream was not taken in time after its end")
        finally:
            if route.stream.leave():
                route.stop.request(_client_left(deadline=context.time_remaining() == 0))
        if status is not None:
            raise status

    async def cancel(self, raw: bytes, context: Any) -> Any:
        """Ends a request by id, wherever it runs."""
        message = parse(pb.CancelRequest, raw)
        validation.check_cancel(message.request_id, message.reason)
        logs.bind(message.request_id)
        answer = await self._door.canceller.cancel(message.request_id, message.reason, wait=message.wait)
        return pb.CancelResponse(
            outcome=pb.CANCEL_OUTCOME_ALREADY_ENDED if answer.already_ended else pb.CANCEL_OUTCOME_ACCEPTED,
            state=STATES[answer.state] if answer.state else pb.REQUEST_STATE_UNSPECIFIED,
            finish_reason=REASONS[answer.reason] if answer.reason else pb.FINISH_REASON_UNSPECIFIED,
        )

    async def get(self, raw: bytes, context: Any) -> Any:
        """The record: live from here, or as stored."""
        request_id = parse(pb.GetRequest, raw).request_id
        validation.check_request_id(request_id)
        route = self._door.routes.get(request_id)
        if route is not None and route.ledger.created:
            return pb.GetResponse(record=record_message(refresh(route)))
        cell = self._door.routes.cell
        record = cell.unwritten.get(request_id)
        try:
            record = record or await cell.store.get(request_id)
        except StoreUnavailable as away:
            message = "the request store does not answer; try again"
            raise unavailable(message, "STORE_UNAVAILABLE", retry_after_s=away.retry_after_s) from None
        if record is None:
            raise not_found(Resource("request", request_id), "UNKNOWN_REQUEST")
        return pb.GetResponse(record=record_message(record))

    async def list_models(self, raw: bytes, context: Any) -> Any:
        """The one model of this cell, and who serves it now."""
        parse(pb.ListModelsRequest, raw)
        model, members = self._door.model, self._door.members
        one = pb.Model(
            name=model.name,
            snapshot=model.snapshot,
            context_tokens=members.capacity().context_tokens,
            vocabulary_size=model.vocabulary_size,
            prefill_members=len(members.taking(Role.PREFILL)),
            decode_members=len(members.taking(Role.DECODE)),
        )
        return pb.ListModelsResponse(models=[one])

    def _examined(self, raw: bytes, context: Any) -> Examined:
        message = parse(pb.GenerateRequest, raw)
        return validation.examine(message, self._tenant(context), self._door.model, self._limits, lambda: secrets.randbits(64))

    async def _validated(self, examined: Examined) -> ValidatedRequest:
        token_ids = await self._door.encoder.encode(examined.prompt)
        return validation.complete(examined, token_ids, self._door.members.capacity(), self._limits, self._budgets)

    def _tenant(self, context: Any) -> str:
        """Who is accounted. Only something trusted in front of this router may say so."""
        if not self._door.settings.trust_tenant_header:
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
        limits, rpc_bound = with_rpc_deadline(request.limits, context.time_remaining(), time.monotonic() - arrived_at)
        return Arrival(request, Deadlines(limits, arrived_at), rpc_bound, span)


def generic_handler(serving: Callable[[], InferenceServicer]) -> Any:
    """The service as gRPC takes it. `serving` gives the servicer at the time of a call; Generate writes bytes."""

    async def generate(raw: bytes, context: Any) -> None:
        await serving().generate(raw, context)

    async def cancel(raw: bytes, context: Any) -> Any:
        return await serving().cancel(raw, context)

    async def get(raw: bytes, context: Any) -> Any:
        return await serving().get(raw, context)

    async def list_models(raw: bytes, context: Any) -> Any:
        return await serving().list_models(raw, context)

    unary = grpc.unary_unary_rpc_method_handler
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
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


def _client_left(*, deadline: bool) -> Ending:
    if deadline:
        return Ending(FinishReason.DEADLINE_EXCEEDED, Cause.RPC_DEADLINE)
    return Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)
