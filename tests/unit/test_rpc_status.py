import grpc
import pytest
from google.rpc import error_details_pb2

from rpc import status
from rpc.details import Details
from rpc.status import Quota, Resource, StatusError, Violation


def parts(error):
    """Names of the details, in order."""
    return [detail.TypeName().rpartition(".")[2] for detail in error.to_proto().details]


BUILDERS = [
    (
        status.invalid_argument([Violation("sampling.top_p", "must be over 0, at most 1", "OUT_OF_RANGE")]),
        "INVALID_ARGUMENT",
        "BadRequest",
    ),
    (status.not_found(Resource("model", "nope")), "NOT_FOUND", "ResourceInfo"),
    (status.already_exists(Resource("request", "r1"), "REQUEST_ID_REUSED"), "ALREADY_EXISTS", "ResourceInfo"),
    (
        status.resource_exhausted("full", "QUEUE_FULL", retry_after_s=1.5, quotas=[Quota("tenant:a", "8 of 8")]),
        "RESOURCE_EXHAUSTED",
        "QuotaFailure RetryInfo",
    ),
    (status.slow_consumer("behind"), "RESOURCE_EXHAUSTED", ""),
    (status.unavailable("no member", "NO_MEMBER"), "UNAVAILABLE", "RetryInfo"),
    (status.draining("decode-1"), "UNAVAILABLE", "RetryInfo"),
    (status.loading("decode-1"), "UNAVAILABLE", "RetryInfo"),
    (status.deadline_exceeded("too late", "QUEUE_DEADLINE"), "DEADLINE_EXCEEDED", ""),
    (status.cancelled("by the client"), "CANCELLED", ""),
    (status.failed_precondition("gone", "KV_LOST"), "FAILED_PRECONDITION", ""),
    (status.out_of_range("not yet", "OFFSET"), "OUT_OF_RANGE", ""),
    (status.unauthenticated("no token"), "UNAUTHENTICATED", ""),
    (status.permission_denied("not yours"), "PERMISSION_DENIED", ""),
    (status.data_loss("bad checksum", "CHECKSUM"), "DATA_LOSS", ""),
    (status.internal("r1"), "INTERNAL", "RequestInfo"),
]


@pytest.mark.parametrize(("error", "code", "others"), BUILDERS, ids=[one[0].reason for one in BUILDERS])
def test_every_error_carries_one_error_info_and_its_details(error, code, others):
    assert error.code is grpc.StatusCode[code]
    assert parts(error) == ["ErrorInfo", *others.split()]
    info = error_details_pb2.ErrorInfo()
    assert error.to_proto().details[0].Unpack(info)
    assert info.domain == "tandem" and info.reason == error.reason
    assert error.to_proto().message == error.message


def test_a_message_names_field_and_limit():
    error = status.invalid_argument(
        [Violation("a", "must be over 0"), Violation("b", "must be at most 16")], "X", maxContextTokens="8"
    )
    assert error.message == "a: must be over 0; b: must be at most 16"
    assert error.metadata == {"maxContextTokens": "8"}


@pytest.mark.parametrize("unit", ["x", "é", "漢", "\ud800", "\n"])
def test_whatever_is_put_in_stays_under_the_limit(unit):
    huge = unit * 20_000
    error = StatusError(
        grpc.StatusCode.INVALID_ARGUMENT,
        huge,
        "HUGE",
        metadata={f"key{n}": huge for n in range(300)},
        details=Details(
            violations=tuple(Violation(huge, huge, huge) for _ in range(300)),
            quotas=tuple(Quota(huge, huge, huge, huge, 1) for _ in range(300)),
            resource=Resource(huge, huge, huge),
            retry_after_s=1.0,
            request_id=huge,
        ),
    )
    proto = error.to_proto()
    assert proto.ByteSize() <= status.MAX_STATUS_BYTES
    assert "ErrorInfo" in parts(error) and "BadRequest" in parts(error)


def test_left_out_violations_are_counted():
    error = status.invalid_argument([Violation(f"f{n}", "x" * 500) for n in range(100)])
    found = error_details_pb2.BadRequest()
    error.to_proto().details[1].Unpack(found)
    assert found.field_violations[-1].description.startswith("and ")
    assert found.field_violations[0].field == "f0"


def test_negative_delay_is_no_delay():
    info = error_details_pb2.RetryInfo()
    status.unavailable("x", "X", retry_after_s=-5).to_proto().details[1].Unpack(info)
    assert info.retry_delay.ToNanoseconds() == 0


class FailedCall(grpc.RpcError):
    """What a client holds after a call has failed, as grpc.aio and grpc give it."""

    def __init__(self, code, details, trailing):
        self._found = code, details, trailing

    def code(self):
        return self._found[0]

    def details(self):
        return self._found[1]

    def trailing_metadata(self):
        return self._found[2]


def test_unreadable_or_foreign_details_are_left_out():
    for trailing in (None, (), (("grpc-status-details-bin", b"\xff\xff"),), (("grpc-status-details-bin", b"\x08\x05"),)):
        found = status.details_from(FailedCall(grpc.StatusCode.UNAVAILABLE, "away", trailing))
        assert (found.code, found.message, found.reason) == (grpc.StatusCode.UNAVAILABLE, "away", "")


@pytest.mark.parametrize("error", [one[0] for one in BUILDERS], ids=[one[0].reason for one in BUILDERS])
def test_a_client_reads_what_the_server_wrote(error):
    sent = error.to_status()
    found = status.details_from(FailedCall(sent.code, sent.details, sent.trailing_metadata))
    assert (found.code, found.message, found.reason, found.domain) == (error.code, error.message, error.reason, "tandem")
    assert dict(found.metadata) == error.metadata
    assert found.violations == error.details.violations
    assert found.quotas == error.details.quotas
    assert found.resource == error.details.resource
    assert found.retry_after_s == error.details.retry_after_s
    assert found.request_id == error.details.request_id


def test_retries_of_grpc_itself_wait_as_they_are_told_where_there_is_no_room():
    full = status.resource_exhausted("full", "QUEUE_FULL", retry_after_s=12.5).to_status()
    assert (status.PUSHBACK_KEY, "12500") in full.trailing_metadata
    for error in (status.unavailable("away", "NO_MEMBER"), status.resource_exhausted("too much", "TOO_MUCH")):
        assert status.PUSHBACK_KEY not in dict(error.to_status().trailing_metadata)
