"""Exit statuses and what a failed call says; the tables in the documents are the code's."""

from pathlib import Path

import grpc
import grpc.aio
import pytest

from rpc.status import StatusError, Violation, invalid_argument, resource_exhausted
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import failure_of
from tandem_cli.exits import MEANINGS, Exit, Failure, exit_table
from tandem_cli.generate import exit_of

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "127.0.0.1:1"


def failed(told: StatusError | grpc.StatusCode) -> grpc.aio.AioRpcError:
    """A failed call as the client's library raises it: told by the server, or the library's own status."""
    if isinstance(told, grpc.StatusCode):
        return grpc.aio.AioRpcError(told, grpc.aio.Metadata(), grpc.aio.Metadata(), "words of the library")
    sent = told.to_status()
    return grpc.aio.AioRpcError(sent.code, grpc.aio.Metadata(), grpc.aio.Metadata(*sent.trailing_metadata), sent.details)


def test_bad_fields_are_named_once() -> None:
    failure = failure_of(failed(invalid_argument([Violation("top_p", "must be over 0", "OUT_OF_RANGE")])), ADDRESS)
    assert failure.code is Exit.BAD_INPUT
    assert str(failure) == "INVALID_ARGUMENT: top_p: must be over 0"
    assert failure.as_dict()["error"]["violations"] == [{"field": "top_p", "description": "must be over 0"}]


def test_refused_says_when_to_try_again() -> None:
    failure = failure_of(failed(resource_exhausted("the queue is full", "QUEUE_FULL", retry_after_s=1.5)), ADDRESS)
    assert failure.code is Exit.REFUSED and "Try again in 1.5 s." in str(failure)
    assert failure.as_dict()["error"] == {
        "message": str(failure),
        "exit_code": 3,
        "status": "RESOURCE_EXHAUSTED",
        "reason": "QUEUE_FULL",
        "retry_after_s": 1.5,
    }


def test_nobody_there_and_gone_are_told_apart() -> None:
    nobody = failure_of(failed(grpc.StatusCode.UNAVAILABLE), ADDRESS)
    assert nobody.code is Exit.UNREACHABLE and "tandem up" in str(nobody)
    broke = failure_of(failed(grpc.StatusCode.UNAVAILABLE), ADDRESS, under_way=True)
    assert broke.code is Exit.UNREACHABLE and "broke before the end" in str(broke)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.NOT_FOUND, Exit.NOT_FOUND),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Exit.DEADLINE),
        (grpc.StatusCode.CANCELLED, Exit.CANCELLED),
        (grpc.StatusCode.INTERNAL, Exit.FAILED),
        (grpc.StatusCode.ALREADY_EXISTS, Exit.BAD_INPUT),
        (grpc.StatusCode.UNAUTHENTICATED, Exit.BAD_INPUT),
        (grpc.StatusCode.PERMISSION_DENIED, Exit.BAD_INPUT),
    ],
)
def test_statuses(status: grpc.StatusCode, code: Exit) -> None:
    assert failure_of(failed(status), ADDRESS).code is code


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (pb.FINISH_REASON_EOS, grpc.StatusCode.OK, Exit.OK),
        (pb.FINISH_REASON_CONTEXT_LIMIT, grpc.StatusCode.OK, Exit.OK),
        (pb.FINISH_REASON_CANCELLED, grpc.StatusCode.CANCELLED, Exit.CANCELLED),
        (pb.FINISH_REASON_DEADLINE_EXCEEDED, grpc.StatusCode.OK, Exit.DEADLINE),
        (pb.FINISH_REASON_DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED, Exit.DEADLINE),
        (pb.FINISH_REASON_MODEL_ERROR, grpc.StatusCode.INTERNAL, Exit.FAILED),
        (pb.FINISH_REASON_TRANSPORT_ERROR, grpc.StatusCode.UNAVAILABLE, Exit.FAILED),
    ],
)
def test_ends_of_requests(reason: int, status: grpc.StatusCode, code: Exit) -> None:
    assert exit_of(pb.Completed(finish_reason=reason), status) is code


def test_every_status_has_a_meaning_and_stands_in_the_readme() -> None:
    assert set(MEANINGS) == set(Exit)
    readme = (ROOT / "README.md").read_text()
    missing = [f"| {code.value} | {words} |" for code, words in MEANINGS.items() if f"| {code.value} | {words} |" not in readme]
    assert not missing
    assert len(exit_table().splitlines()) == len(Exit)


def test_a_failure_for_scripts() -> None:
    assert Failure(Exit.FAILED, "broke", process="x").as_dict() == {"error": {"message": "broke", "exit_code": 1, "process": "x"}}
