"""The seat: one Decode stream of one attempt. As long as it is open the sequences live at the decode member.

Reading is plain; whatever has to interrupt it (a cancel, a failed prefill, a lost member) is said to the member, which
ends the stream. A member that does not answer in time has its stream cut, which ends the sequences as well.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from router.member_link import Member
from router.pool_messages import SeatEnd, seat_end
from router.streams import EOF
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc
from telemetry.tracing import metadata_with

_log = logging.getLogger(__name__)

#: For a member to end the RPC after its last event.
_CLOSE_S = 0.5


class SeatLost(Exception):
    """The stream ended without an Ended: the member, or the path to it, is gone."""


class SeatRefused(Exception):
    """The member gave no seat."""

    def __init__(self, reason: str, detail: str, retryable: bool) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Granted:
    """A seat was given. `grant` is the message for the prefill member, None when decode computes the prompt."""

    grant: Any
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The prompt's KV is there and the first token is chosen; times in seconds."""

    handover_s: float
    compute_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes for the client as they are, and what is counted about them."""

    response: bytes
    next_sequence_no: int
    selected_tokens: int
    returned_tokens: int
    text_bytes: int


SeatEvent = Granted | Committed | Output | SeatEnd


@dataclass(frozen=True, slots=True)
class SeatLimits:
    """Durations in seconds."""

    grant_s: float = 5.0
    cancel_grace_s: float = 5.0


class Seat:
    """An open stream. Made by `open_seat`."""

    def __init__(self, call: Any, member: Member, limits: SeatLimits) -> None:
        self._call = call
        self._limits = limits
        self._cut = ""
        self._watchdog: asyncio.TimerHandle | None = None
        self._to_say: deque[Any] = deque()
        self._saying: asyncio.Task[None] | None = None
        self._leaving = False
        self._losing = False
        self.member = member
        self.ended = False

    async def granted(self) -> Granted:
        """The member's answer. Raises SeatRefused or SeatLost (also when there is none in time)."""
        timer = self._cut_after(self._limits.grant_s, f"no answer within {self._limits.grant_s:g} s")
        try:
            event = await self.read()
        finally:
            timer.cancel()
        if isinstance(event, Granted):
            return event
        if isinstance(event, SeatEnd):
            raise SeatRefused("ended", event.ending.cause.value, retryable=True)
        raise SeatLost(f"{type(event).__name__} before Granted")

    async def read(self) -> SeatEvent:
        """The next event. Raises SeatRefused, or SeatLost when the stream ends without an Ended."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise SeatLost(self._cut or f"{error.code().name}: {error.details()}") from None
        except asyncio.CancelledError:
            # grpc reports a stream that was cut on this side like a cancelled task.
            if self._cut:
                raise SeatLost(self._cut) from None
            raise
        if message is EOF:
            raise SeatLost(self._cut or "the stream ended without a terminal event")
        return self._event(message)

    def cancel(self, reason: str) -> None:
        """Ask the member to end at the next step border; the stream is cut when it does not do so in time."""
        if self._leaving or self.ended:
            return
        self._leaving = True
        self.say(decode_pb2.DecodeRequest(cancel=decode_pb2.CancelSeat(reason=reason)))
        self._expect_end(reason)

    def prefill_lost(self, cause: str) -> None:
        """Tell the member that the hand-over will not be completed. It asks the writer itself whether writes are in flight.

        A member that has everything already goes on: its Committed is under way then.
        """
        if self._leaving or self._losing or self.ended:
            return
        self._losing = True
        self.say(decode_pb2.DecodeRequest(prefill_lost=decode_pb2.PrefillLost(cause=cause, drained=False)))
        self._expect_end(cause)

    def cut(self, why: str) -> None:
        """End the stream now, on this side."""
        if not self._cut and not self.ended:
            self._cut = why
            self._call.cancel()

    async def close(self) -> None:
        """The end, whatever came before: nothing is open and no task is left."""
        self._expect_none()
        if self.ended and not self._cut:
            await self._read_to_end()
        self._call.cancel()
        if self._saying is not None:
            self._saying.cancel()
            await asyncio.wait([self._saying])

    async def _read_to_end(self) -> None:
        """After the last event the member ends the RPC; leaving earlier would look like an abort to it."""
        timer = asyncio.get_running_loop().call_later(_CLOSE_S, self._call.cancel)
        try:
            await self._call.code()
        finally:
            timer.cancel()

    def _expect_end(self, why: str) -> None:
        grace_s = self._limits.cancel_grace_s
        self._expect_none()
        self._watchdog = self._cut_after(grace_s, f"no end within {grace_s:g} s after {why}")

    def _expect_none(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _cut_after(self, seconds: float, why: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.cut, why)

    def say(self, message: Any) -> None:
        """Sends a DecodeRequest, in the order of calls. (A call takes one write at a time, so one task writes.)"""
        self._to_say.append(message)
        if self._saying is None or self._saying.done():
            self._saying = asyncio.create_task(self._write(), name=f"to {self.member.name}")

    async def _write(self) -> None:
        try:
            while self._to_say:
                await self._call.write(self._to_say.popleft())
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            _log.debug("%s was not told: its stream has ended", self.member.name)

    def _event(self, message: Any) -> SeatEvent:
        kind = message.WhichOneof("event")
        if kind == "output":
            one = message.output
            return Output(one.response, one.next_sequence_no, len(one.selected_token_ids), one.returned_tokens, one.text_bytes)
        if kind == "ended":
            self.ended = True
            return seat_end(message.ended)
        if kind == "granted":
            granted = message.granted
            return Granted(granted.grant if granted.HasField("grant") else None, granted.cached_tokens)
        if kind == "committed":
            if not self._leaving:
                self._expect_none()  # a lost prefill had written everything before
            one = message.committed
            return Committed(one.handover_s, one.compute_s, one.queue_s)
        if kind == "refused":
            self.ended = True
            raise SeatRefused(message.refused.reason, message.refused.detail, message.refused.retryable)
        raise SeatLost("an event that this router does not know")


@asynccontextmanager
async def open_seat(
    member: Member, opening: Any, limits: SeatLimits, *, traceparent: str, timeout_s: float | None
) -> AsyncIterator[Seat]:
    """Opens the stream and says `opening` (an Open). Inside, the sequences live; after it, nothing is left open.

    `timeout_s` bounds the whole stream as a last resort.
    """
    stub: Any = decode_pb2_grpc.DecodeServiceStub(member.channel)
    call = stub.Decode(metadata=metadata_with(traceparent), timeout=timeout_s)
    seat = Seat(call, member, limits)
    member.users[seat] = seat.cut
    try:
        seat.say(decode_pb2.DecodeRequest(open=opening))
        yield seat
    finally:
        del member.users[seat]
        await seat.close()
