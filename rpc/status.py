"""Errors on the wire: a gRPC status with one ErrorInfo and what a client needs to act on it (AIP-193).

Everything is cut to stay under MAX_STATUS_BYTES, because gRPC turns larger trailers into RESOURCE_EXHAUSTED, at random
from 8 kB on.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast
from urllib.parse import quote

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from rpc.details import Details, ErrorDetails, Quota, Resource, Violation, cut, details_from

__all__ = [
    "DOMAIN",
    "Details",
    "ErrorDetails",
    "Quota",
    "Resource",
    "StatusError",
    "Violation",
    "abort",
    "already_exists",
    "cancelled",
    "data_loss",
    "deadline_exceeded",
    "details_from",
    "draining",
    "failed_precondition",
    "internal",
    "invalid_argument",
    "loading",
    "not_found",
    "out_of_range",
    "permission_denied",
    "resource_exhausted",
    "slow_consumer",
    "unauthenticated",
    "unavailable",
    "unimplemented",
]

#: Domain of every reason.
DOMAIN = "tandem"
#: Most bytes of a serialised google.rpc.Status.
MAX_STATUS_BYTES = 6000
#: Most bytes of a message as it is written into the trailers (percent-encoded).
MAX_MESSAGE_BYTES = 1000
#: Trailer that says to gRPC's own retries when to try again, in milliseconds.
PUSHBACK_KEY = "grpc-retry-pushback-ms"
#: Tried in turn until the status fits: (most entries of a list, most bytes of one text).
_CUTS = ((64, 400), (32, 160), (16, 120), (8, 80), (2, 64))


class StatusError(Exception):
    """An RPC's ending that is not OK. Raise it in a handler, or `abort` with it; a catch-all interceptor sends it."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str,
        *,
        metadata: Mapping[str, str] | None = None,
        details: Details | None = None,
    ) -> None:
        super().__init__(f"{code.name} {reason}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.details = details if details is not None else Details()

    def to_proto(self) -> Any:
        """The google.rpc.Status, at most MAX_STATUS_BYTES long."""
        status: Any = None
        for entries, text_bytes in _CUTS:
            status = self._build(entries, text_bytes)
            if status.ByteSize() <= MAX_STATUS_BYTES:
                return status
        del status.details[1:]
        return status

    def to_status(self) -> grpc.Status:
        """The form that a servicer context takes. Where there is no room, gRPC's own retries wait as long as RetryInfo says (gRFC
        A6); what is not here may be elsewhere, and is tried there at once."""
        status: Any = rpc_status.to_status(self.to_proto())
        after_s = self.details.retry_after_s
        if self.code is StatusCode.RESOURCE_EXHAUSTED and after_s is not None:
            pushback = (PUSHBACK_KEY, str(round(max(0.0, after_s) * 1e3)))
            status = status._replace(trailing_metadata=(*status.trailing_metadata, pushback))
        return cast(grpc.Status, status)

    def _build(self, entries: int, text_bytes: int) -> Any:
        status = status_pb2.Status(code=self.code.value[0], message=_cut_message(self.message))
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        for key, value in list(self.metadata.items())[:entries]:
            info.metadata[cut(key, 64)] = cut(value, text_bytes)
        for message in [info, *self.details.messages(entries, text_bytes)]:
            status.details.add().Pack(message)
        return status


def invalid_argument(violations: Sequence[Violation], reason: str = "INVALID_REQUEST", **metadata: str) -> StatusError:
    """Bad input: names each field and its limit. Never worth a retry."""
    message = "; ".join(f"{one.field}: {one.description}" if one.field else one.description for one in violations)
    return StatusError(
        StatusCode.INVALID_ARGUMENT, message, reason, metadata=metadata, details=Details(violations=tuple(violations))
    )


def not_found(resource: Resource, reason: str = "NOT_FOUND", message: str = "") -> StatusError:
    """Something named in the request is not there: a model, a record."""
    said = message or f"there is no {resource.type} named {resource.name!r}"
    return StatusError(StatusCode.NOT_FOUND, said, reason, details=Details(resource=resource))


def already_exists(resource: Resource, reason: str = "ALREADY_EXISTS", message: str = "") -> StatusError:
    """The name is taken, as by the same request id with another body."""
    said = message or f"{resource.type} {resource.name!r} exists already"
    return StatusError(StatusCode.ALREADY_EXISTS, said, reason, details=Details(resource=resource))


def resource_exhausted(
    message: str, reason: str, *, retry_after_s: float | None = None, quotas: Sequence[Quota] = (), **metadata: str
) -> StatusError:
    """Over a budget or a quota: what is short, whose limit, and when to try again."""
    details = Details(quotas=tuple(quotas), retry_after_s=retry_after_s)
    return StatusError(StatusCode.RESOURCE_EXHAUSTED, message, reason, metadata=metadata, details=details)


def slow_consumer(message: str, **metadata: str) -> StatusError:
    """The reader did not keep up and the request asked to fail then."""
    return StatusError(StatusCode.RESOURCE_EXHAUSTED, message, "SLOW_CONSUMER", metadata=metadata)


def unavailable(message: str, reason: str, *, retry_after_s: float | None = 1.0, **metadata: str) -> StatusError:
    """Not now, or not here: worth a retry, elsewhere first."""
    details = Details(retry_after_s=retry_after_s)
    return StatusError(StatusCode.UNAVAILABLE, message, reason, metadata=metadata, details=details)


def unimplemented(message: str, reason: str, **metadata: str) -> StatusError:
    """This process does not do that, and never will."""
    return StatusError(StatusCode.UNIMPLEMENTED, message, reason, metadata=metadata)


def draining(who: str, retry_after_s: float = 1.0) -> StatusError:
    """`who` is shutting down and takes nothing new."""
    return unavailable(f"{who} is shutting down; try again, another one will answer", "DRAINING", retry_after_s=retry_after_s)


def loading(who: str, retry_after_s: float = 1.0) -> StatusError:
    """`who` has not loaded its model yet."""
    return unavailable(f"{who} is loading its model; try again", "LOADING", retry_after_s=retry_after_s)


def deadline_exceeded(message: str, reason: str, **metadata: str) -> StatusError:
    """One of the clocks ran out; the reason says which."""
    return StatusError(StatusCode.DEADLINE_EXCEEDED, message, reason, metadata=metadata)


def cancelled(message: str, reason: str = "CANCELLED", **metadata: str) -> StatusError:
    """Ended by a cancel."""
    return StatusError(StatusCode.CANCELLED, message, reason, metadata=metadata)


def failed_precondition(message: str, reason: str, **metadata: str) -> StatusError:
    """The state does not allow it, and waiting will not help."""
    return StatusError(StatusCode.FAILED_PRECONDITION, message, reason, metadata=metadata)


def out_of_range(message: str, reason: str, **metadata: str) -> StatusError:
    """Beyond what exists by now."""
    return StatusError(StatusCode.OUT_OF_RANGE, message, reason, metadata=metadata)


def unauthenticated(message: str, reason: str = "UNAUTHENTICATED") -> StatusError:
    """No credentials, or not valid ones."""
    return StatusError(StatusCode.UNAUTHENTICATED, message, reason)


def permission_denied(message: str, reason: str = "PERMISSION_DENIED") -> StatusError:
    """Known, but not allowed. Decided before it is looked up whether the thing exists."""
    return StatusError(StatusCode.PERMISSION_DENIED, message, reason)


def data_loss(message: str, reason: str, **metadata: str) -> StatusError:
    """Corrupted beyond repair."""
    return StatusError(StatusCode.DATA_LOSS, message, reason, metadata=metadata)


def internal(request_id: str = "", reason: str = "INTERNAL", message: str = "internal error") -> StatusError:
    """A bug or a failed model. Says no more than the id under which the log tells the rest."""
    return StatusError(StatusCode.INTERNAL, message, reason, details=Details(request_id=request_id))


async def abort(context: Any, error: StatusError) -> NoReturn:
    """End the RPC of a grpc.aio servicer context with `error`. Never returns."""
    await context.abort_with_status(error.to_status())
    raise error  # grpc raises in the line above


def _cut_message(text: str) -> str:
    """`text` cut so that its percent-encoded form fits into the trailers."""
    limit = MAX_MESSAGE_BYTES
    short = cut(text, limit)
    while len(quote(short, safe=" !\"#$&'()*+,/:;<=>?@[]^`{|}\\")) > MAX_MESSAGE_BYTES:
        limit = limit * 3 // 4
        short = cut(short, limit)
    return short
