"""A client of the gRPC door for the command line."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from rpc.channels import client_options
from rpc.status import ErrorDetails, details_from
from rpc.watched_files import BadFile
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.exits import Exit, Failure
from tandem_cli.trust import Trust, trust_in

DEFAULT_ADDRESS = "127.0.0.1:50051"
#: Answers may carry a whole text at once.
RECEIVE_MAX_BYTES = 64 * 1024 * 1024

_EXIT_BY_STATUS = {
    grpc.StatusCode.OK: Exit.OK,
    grpc.StatusCode.INVALID_ARGUMENT: Exit.BAD_INPUT,
    grpc.StatusCode.ALREADY_EXISTS: Exit.BAD_INPUT,
    grpc.StatusCode.UNAUTHENTICATED: Exit.BAD_INPUT,
    grpc.StatusCode.PERMISSION_DENIED: Exit.BAD_INPUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exit.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Exit.REFUSED,
    grpc.StatusCode.NOT_FOUND: Exit.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE: Exit.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED: Exit.DEADLINE,
    grpc.StatusCode.CANCELLED: Exit.CANCELLED,
}


def failure_of(error: grpc.aio.AioRpcError, address: str, under_way: bool = False) -> Failure:
    """A failed call as a failure of the command: what, which field and limit, what to do.

    `under_way`: something had been answered before it failed.
    """
    details = details_from(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not details.reason:
        # The status comes from the client's own library: nobody answered, or not any more.
        if under_way:
            message = f"The connection to {address} broke before the end; `tandem get` may tell what became of the request."
        else:
            message = f"No router answers at {address}. Start one with `tandem up`, or name another with --address."
        return Failure(Exit.UNREACHABLE, message, status=error.code().name)
    code = _EXIT_BY_STATUS.get(error.code(), Exit.FAILED)
    return Failure(code, _sentences(error, details), status=error.code().name, **_for_scripts(details))


def _sentences(error: grpc.aio.AioRpcError, details: ErrorDetails) -> str:
    lines = [f"{error.code().name}: {details.message}"]
    lines += [f"  {one.field}: {one.description}" for one in details.violations if one.description not in details.message]
    if details.retry_after_s is not None:
        lines.append(f"  Try again in {details.retry_after_s:g} s.")
    return "\n".join(lines)


def _for_scripts(details: ErrorDetails) -> dict[str, object]:
    found: dict[str, object] = {"reason": details.reason} if details.reason else {}
    if details.violations:
        found["violations"] = [{"field": one.field, "description": one.description} for one in details.violations]
    if details.retry_after_s is not None:
        found["retry_after_s"] = details.retry_after_s
    return found


@contextlib.asynccontextmanager
async def connect(address: str, trust: Trust | None = None) -> AsyncIterator[pb_grpc.InferenceServiceStub]:
    """A stub for one router; the channel is closed at the end. `trust`: None: as the address says. Raises Failure."""
    try:
        channel = (trust or trust_in(address)).channel(address, client_options(RECEIVE_MAX_BYTES))
    except BadFile as bad:
        raise Failure(Exit.BAD_INPUT, str(bad)) from None
    async with channel:
        yield pb_grpc.InferenceServiceStub(channel)


_PREFIXES = (
    (pb.FinishReason, "FINISH_REASON_"),
    (pb.RequestState, "REQUEST_STATE_"),
    (pb.CancelOutcome, "CANCEL_OUTCOME_"),
)


def label(enum: Any, value: int) -> str:
    """The name of a protobuf enum value without its prefix, in lower case."""
    name: str = enum.Name(value)
    prefix = next((prefix for known, prefix in _PREFIXES if known is enum), "")
    return name.removeprefix(prefix).lower()
