"""The Prefill call of one attempt, in a task of its own. Leaving it early stops the work before its next chunk."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from lifecycle.finish import Cause
from router.member_link import Member
from router.streams import EOF
from tandem.pools.v1 import prefill_pb2_grpc
from telemetry.tracing import metadata_with

_log = logging.getLogger(__name__)

#: Labels of a PrefillFailed that come from the path to decode rather than from the prefill member.
_HANDOVER = frozenset({"transfer_failed", "layout_mismatch", "revoked"})


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The grant is filled. Times in seconds."""

    cached_tokens: int
    sent_bytes: int
    queue_s: float
    compute_s: float
    handover_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class PrefillFailure:
    """The grant will not be filled. `label` is the member's own word, or how the call broke."""

    cause: Cause
    label: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class PrefillListener:
    """Who is told: `accepted` when the job is in the member's queue, `failed` once when it will not be completed."""

    accepted: Callable[[], None]
    failed: Callable[[PrefillFailure], None]


class PrefillCall:
    """Watches one call."""

    def __init__(self, call: Any, member: Member, listener: PrefillListener) -> None:
        self._call = call
        self._listener = listener
        self._cut = ""
        self._closing = False
        self.member = member
        self.done: PrefillDone | None = None
        self.failure: PrefillFailure | None = None
        self.computed_tokens = 0
        self.cached_tokens = 0
        self._task = asyncio.create_task(self._run(), name=f"prefill at {member.name}")

    async def settled(self, timeout_s: float) -> PrefillDone | None:
        """What the call came to; None when it failed or is not over in time."""
        await asyncio.wait([self._task], timeout=timeout_s)
        return self.done

    def cut(self, why: str) -> None:
        """End the call now, on this side."""
        if not self._cut and not self._task.done():
            self._cut = why
            self._call.cancel()

    async def close(self) -> None:
        """The end, whatever came before."""
        self._closing = True
        self.cut("the attempt is over")
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            failure = await self._follow()
        except grpc.aio.AioRpcError as error:
            failure = PrefillFailure(Cause.PREFILL_LOST, f"{error.code().name}: {error.details()}", retryable=True)
        except asyncio.CancelledError:
            if not self._cut:
                raise
            failure = PrefillFailure(Cause.PREFILL_LOST, self._cut, retryable=True)
        if failure is not None and not self._closing:
            self.failure = failure
            self._listener.failed(failure)

    async def _follow(self) -> PrefillFailure | None:
        """Reads to the last event. None when the grant was filled."""
        while True:
            message = await self._call.read()
            if message is EOF:
                return PrefillFailure(Cause.PREFILL_LOST, "the stream ended without a last event", retryable=True)
            kind = message.WhichOneof("event")
            if kind == "accepted":
                self._listener.accepted()
            elif kind == "progress":
                self.computed_tokens = message.progress.computed_tokens
                self.cached_tokens = message.progress.cached_tokens
            elif kind == "committed":
                self.done = _done(message.committed)
                self.cached_tokens = self.done.cached_tokens
                return None
            elif kind == "failed":
                cause = Cause.HANDOVER_FAILED if message.failed.cause in _HANDOVER else Cause.PREFILL_FAILED
                return PrefillFailure(cause, message.failed.cause, message.failed.retryable)


@asynccontextmanager
async def prefill_at(
    member: Member,
    request: Any,
    listener: PrefillListener,
    *,
    traceparent: str,
    timeout_s: float | None,
) -> AsyncIterator[PrefillCall]:
    """Sends `request` (a PrefillRequest). Inside, the member computes and pushes; after it, the call is over."""
    stub: Any = prefill_pb2_grpc.PrefillServiceStub(member.channel)
    call = stub.Prefill(request, metadata=metadata_with(traceparent), timeout=timeout_s)
    prefill = PrefillCall(call, member, listener)
    member.users[prefill] = prefill.cut
    try:
        yield prefill
    finally:
        del member.users[prefill]
        await prefill.close()


def _done(committed: Any) -> PrefillDone:
    return PrefillDone(
        cached_tokens=committed.cached_tokens,
        sent_bytes=committed.sent_bytes,
        queue_s=committed.queue_s,
        compute_s=committed.compute_s,
        handover_s=committed.handover_s,
        exposed_s=committed.exposed_s,
    )
