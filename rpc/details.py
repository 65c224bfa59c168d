"""The details of an error as values, to and from google.rpc messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field of a request: its path, a sentence with the limit, and a reason for programs."""

    field: str
    description: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit that was met: whose, which, and its value (0: not told)."""

    subject: str
    description: str
    metric: str = ""
    limit_id: str = ""
    value: int = 0


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that is missing or in the way."""

    type: str
    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Details:
    """What goes beside the ErrorInfo; each kind at most once."""

    violations: tuple[Violation, ...] = ()
    quotas: tuple[Quota, ...] = ()
    resource: Resource | None = None
    retry_after_s: float | None = None
    request_id: str = ""

    def messages(self, entries: int, text_bytes: int) -> list[Any]:
        """The google.rpc messages, lists cut to `entries` and texts to `text_bytes`."""
        found: list[Any] = []
        if self.violations:
            found.append(self._bad_request(entries, text_bytes))
        if self.quotas:
            found.append(self._quota_failure(entries, text_bytes))
        if self.resource is not None:
            found.append(
                error_details_pb2.ResourceInfo(
                    resource_type=cut(self.resource.type, text_bytes),
                    resource_name=cut(self.resource.name, text_bytes),
                    description=cut(self.resource.description, text_bytes),
                )
            )
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromNanoseconds(round(max(0.0, self.retry_after_s) * 1e9))
            found.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.request_id:
            found.append(error_details_pb2.RequestInfo(request_id=cut(self.request_id, 128)))
        return found

    def _bad_request(self, entries: int, text_bytes: int) -> Any:
        shown, left_out = self.violations[:entries], len(self.violations) - entries
        bad = error_details_pb2.BadRequest()
        for one in shown:
            bad.field_violations.add(
                field=cut(one.field, 128), description=cut(one.description, text_bytes), reason=cut(one.reason, 63)
            )
        if left_out > 0:
            bad.field_violations.add(description=f"and {left_out} more violations", reason="MORE_VIOLATIONS")
        return bad

    def _quota_failure(self, entries: int, text_bytes: int) -> Any:
        failure = error_details_pb2.QuotaFailure()
        for one in self.quotas[:entries]:
            failure.violations.add(
                subject=cut(one.subject, text_bytes),
                description=cut(one.description, text_bytes),
                quota_metric=cut(one.metric, 64),
                quota_id=cut(one.limit_id, 64),
                quota_value=one.value,
            )
        return failure


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What a client learns from a failed call. Parts that the server did not send are empty."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    domain: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    quotas: tuple[Quota, ...] = ()
    resource: Resource | None = None
    retry_after_s: float | None = None
    request_id: str = ""


def details_from(error: grpc.RpcError) -> ErrorDetails:
    """Reads what a failed call carries, of grpc and grpc.aio alike. Details that cannot be read are left out."""
    call: Any = error
    code, message = call.code(), call.details() or ""
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):  # unreadable, or contradicting the status: not ours
        status = None
    return ErrorDetails(code, message) if status is None else _parse(code, message, status)


def _parse(code: grpc.StatusCode, message: str, status: Any) -> ErrorDetails:
    parts: dict[str, Any] = {}
    for packed in status.details:
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = _unpack(packed, error_details_pb2.ErrorInfo())
            parts.update(reason=info.reason, domain=info.domain, metadata=dict(info.metadata))
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = _unpack(packed, error_details_pb2.BadRequest())
            parts["violations"] = tuple(Violation(v.field, v.description, v.reason) for v in bad.field_violations)
        elif packed.Is(error_details_pb2.QuotaFailure.DESCRIPTOR):
            quota = _unpack(packed, error_details_pb2.QuotaFailure())
            parts["quotas"] = tuple(
                Quota(v.subject, v.description, v.quota_metric, v.quota_id, v.quota_value) for v in quota.violations
            )
        elif packed.Is(error_details_pb2.ResourceInfo.DESCRIPTOR):
            what = _unpack(packed, error_details_pb2.ResourceInfo())
            parts["resource"] = Resource(what.resource_type, what.resource_name, what.description)
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            parts["retry_after_s"] = _unpack(packed, error_details_pb2.RetryInfo()).retry_delay.ToNanoseconds() / 1e9
        elif packed.Is(error_details_pb2.RequestInfo.DESCRIPTOR):
            parts["request_id"] = _unpack(packed, error_details_pb2.RequestInfo()).request_id
    return ErrorDetails(code, message, **parts)


def _unpack(packed: Any, into: Any) -> Any:
    packed.Unpack(into)
    return into


def cut(text: str, limit_bytes: int) -> str:
    """`text` as valid UTF-8 of at most `limit_bytes`, with an ellipsis when something was cut."""
    data = text[: limit_bytes + 1].encode("utf-8", "replace")  # a character is at least a byte
    if len(data) <= limit_bytes:
        return data.decode("utf-8")
    return data[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
