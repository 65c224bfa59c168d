"""The door that load is driven through: greedy requests of token ids, to the full length."""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tandem_cli.load.measured import Seen
from tandem_cli.load.workload import Planned

REQUEST_TIMEOUT_S = 600.0
CANCEL_TIMEOUT_S = 35.0
#: Phases that Completed.timings reports.
PHASES = (
    *("check_s", "queue_s", "prefill_queue_s", "prefill_s", "handover_s", "handover_exposed_s"),
    *("decode_s", "stop_hold_s", "send_s", "first_token_s", "total_s"),
)


class RequestFailed(Exception):
    """The door refused or broke. The message says how, `reason` is a label for it."""

    def __init__(self, message: str, reason: str = "FAILED") -> None:
        super().__init__(message)
        self.reason = reason


class Door(Protocol):
    """Answers requests of token ids, greedily, to the full length."""

    async def ask(self, planned: Planned, seen: Seen) -> None:
        """Send one request and write down what comes. Raises RequestFailed, OSError or the door's own errors."""


class GrpcDoor:
    """A router's. model: a name that it serves, or empty for the only one."""

    def __init__(self, stub: Any, model: str = "") -> None:
        self._stub = stub
        self._model = model

    async def ask(self, planned: Planned, seen: Seen) -> None:
        """See Door. A request that is to be cancelled is cancelled by id once it has told so many tokens."""
        request = _request(planned, self._model)
        try:
            async for event in self._stub.Generate(request, timeout=REQUEST_TIMEOUT_S):
                kind = event.WhichOneof("event")
                if kind == "delta":
                    seen.arrivals.append((time.perf_counter(), len(event.delta.token_ids)))
                elif kind == "completed":
                    _take_end(event.completed, seen)
                    continue
                if planned.cancel_after is not None and not seen.cancelled_at and seen.tokens >= planned.cancel_after:
                    seen.cancelled_at = time.perf_counter()
                    cancel = pb.CancelRequest(request_id=request.request_id, reason="bench")
                    await self._stub.Cancel(cancel, timeout=CANCEL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if not (seen.cancelled_at and error.code() is grpc.StatusCode.CANCELLED):
                details = details_from(error)
                raise RequestFailed(f"{error.code().name}: {details.message}", details.reason or error.code().name) from None


def _take_end(completed: pb.Completed, seen: Seen) -> None:
    seen.phases = {name: getattr(completed.timings, name) for name in PHASES}
    ended = completed.finish_reason
    if ended == pb.FINISH_REASON_CANCELLED and seen.cancelled_at:
        return
    if ended == pb.FINISH_REASON_MAX_OUTPUT_TOKENS:
        seen.cancelled_at = 0.0  # it was over before the cancel came
        # Random answers may end inside a character: its tokens were chosen, and are told by nothing but their number.
        if untold := completed.usage.selected_tokens - seen.tokens:
            seen.arrivals.append((time.perf_counter(), untold))
        return
    label = pb.FinishReason.Name(ended)
    raise RequestFailed(f"it ended with {label}" + (f" ({completed.cause})" if completed.cause else ""), completed.cause or label)


def _request(planned: Planned, model: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"bench-{secrets.token_hex(8)}",
        model=model,
        tokens=pb.TokenPrompt(ids=planned.prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=planned.output_tokens,
        # Answers to random tokens are not always text.
        utf8_policy=pb.UTF8_POLICY_DROP,
    )


@asynccontextmanager
async def grpc_door(address: str, model: str = "") -> AsyncIterator[GrpcDoor]:
    """A connection to a router."""
    async with connect(address) as stub:
        yield GrpcDoor(stub, model)
