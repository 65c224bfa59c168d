"""A client of the gRPC door for the command line."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rpc.status import ErrorDetails, details_from
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "localhost:50051"
MESSAGE_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ExitCode:
    """What a script can tell from the exit status."""

    OK: int = 0
    FAILED: int = 1
    BAD_INPUT: int = 2
    REFUSED: int = 3
    NOT_FOUND: int = 4
    DEADLINE: int = 5
    UNREACHABLE: int = 6
    CANCELLED: int = 130


EXIT = ExitCode()

_EXIT_BY_STATUS = {
    grpc.StatusCode.OK: EXIT.OK,
    grpc.StatusCode.INVALID_ARGUMENT: EXIT.BAD_INPUT,
    grpc.StatusCode.ALREADY_EXISTS: EXIT.BAD_INPUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: EXIT.REFUSED,
    grpc.StatusCode.UNAVAILABLE: EXIT.REFUSED,
    grpc.StatusCode.NOT_FOUND: EXIT.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED: EXIT.DEADLINE,
    grpc.StatusCode.CANCELLED: EXIT.CANCELLED,
}


def exit_code(error: grpc.aio.AioRpcError) -> int:
    """The exit status for a failed call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and not details_from(error).reason:
        return EXIT.UNREACHABLE
    return _EXIT_BY_STATUS.get(error.code(), EXIT.FAILED)


def explain(error: grpc.aio.AioRpcError, address: str) -> str:
    """A failed call in sentences: what, which field and limit, what to do."""
    details: ErrorDetails = details_from(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE and not details.reason:
        return f"No router answers at {address}. Start one with `tandem up`, or name another with --address."
    lines = [f"{error.code().name}: {details.message}"]
    lines += [f"  {violation.field}: {violation.description}" for violation in details.violations]
    if details.retry_after_s is not None:
        lines.append(f"  Try again in {details.retry_after_s:g} s.")
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def connect(address: str) -> AsyncIterator[pb_grpc.InferenceServiceStub]:
    """A stub for one router; the channel is closed at the end."""
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.max_send_message_length", MESSAGE_BYTES_MAX)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
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
