"""The seat: one Decode stream of one attempt. As long as it is open the sequences live at the decode member.

Reading is plain; whatever has to interrupt it (a cancel, a failed prefill, a lost member) is said to the member, which
ends the stream. A member that does not answer in time has its stream cut, which ends the sequences as well.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from lifecycle.record import AttemptKey
from router.choices import ChoiceProgress, adopted_choices
from router.member_link import Member
from router.pool_messages import Output, SeatEnd, adopt_message, output, seat_end
from router.streams import EOF
from tandem.pools.v1 import decode_pb2, decode_pb2_grpc
from telemetry.tracing import metadata_with

_log = logging.getLogger(__name__)

#: Reason of a CancelSeat after the end: it has arrived, and is not needed any more.
TAKEN = "taken"

#: For a member to end the RPC after its last event.
_CLOSE_S = 0.5


class SeatLost(Exception):
    """The stream ended without an Ended: the member, or the path to it, is gone, or `adopted`: another call has the seat."""

    def __init__(self, why: str, *, adopted: bool = False) -> None:
        super().__init__(why)
        self.adopted = adopted


#: Why decode refuses a seat whose attempt has one already.
DUPLICATE_ATTEMPT = "duplicate_attempt"
#: It lacks more of the prompt than it is to compute.
PREFIX_GONE = "prefix_gone"


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
class Paused:
    """The sequence stands still. `selected`: tokens that no Output has told; `pushable`: its KV can be moved.

    held_log_probs: of `selected`, as in Output.
    """

    cache_tokens: int
    selected: tuple[int, ...]
    pushable: bool
    held_log_probs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Pushed:
    """The end of a push; `cause` is a closed label when it failed."""

    ok: bool
    cause: str
    sent_bytes: int
    handover_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """A seat was taken over. `opening` is the Open that it was given for; the rest tells what went before the event
    `next_sequence_no`, which comes next: tokens chosen, tokens returned, bytes of text, log-probabilities of the tokens that were
    not returned. `committed`: None before the commit. `returned`: with CUMULATIVE, what this seat returned before, as a Delta.
    `choices`: with several outputs, each of them as it was then, in place of that."""

    opening: Any
    next_sequence_no: int
    output_token_ids: tuple[int, ...]
    returned_tokens: int
    sent_text_bytes: int
    committed: Committed | None
    held_log_probs: tuple[bytes, ...] = ()
    returned: bytes = b""
    choices: list[ChoiceProgress] = field(default_factory=list)


SeatEvent = Granted | Adopted | Committed | Output | Paused | Pushed | SeatEnd


@dataclass(frozen=True, slots=True)
class SeatLimits:
    """Durations in seconds."""

    grant_s: float = 5.0
    cancel_grace_s: float = 5.0
    #: How long a seat outlives its stream when the stream ends without a cancel.
    hold_s: float = 20.0


class Seat:
    """An open stream. Made by `seat_stream`."""

    def __init__(self, call: Any, member: Member, limits: SeatLimits) -> None:
        self._call = call
        self._limits = limits
        self._cut = ""
        self._watchdog: asyncio.TimerHandle | None = None
        self._to_say: deque[Any] = deque()
        self._saying: asyncio.Task[None] | None = None
        self._leaving = False
        self._losing = False
        self._leaves_end = False
        self.member = member
        self.ended = False

    @property
    def over(self) -> bool:
        """Whether the stream has ended, on whichever side."""
        return bool(self._call.done())

    def open(self, opening: Any) -> None:
        """Ask for the seat with an Open; `granted` is the answer. The sequences live from then on."""
        self.say(decode_pb2.DecodeRequest(open=opening))

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

    async def adopted(self) -> Adopted:
        """The member's answer to an Adopt. Raises SeatRefused or SeatLost (also when there is none in time)."""
        timer = self._cut_after(self._limits.grant_s, f"no answer within {self._limits.grant_s:g} s")
        try:
            event = await self.read()
        finally:
            timer.cancel()
        if isinstance(event, Adopted):
            return event
        raise SeatLost(f"{type(event).__name__} before Adopted")

    async def read(self) -> SeatEvent:
        """The next event. Raises SeatRefused, or SeatLost when the stream ends without an Ended."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            adopted = not self._cut and error.code() is grpc.StatusCode.ABORTED
            raise SeatLost(self._cut or f"{error.code().name}: {error.details()}", adopted=adopted) from None
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

    def cancel_choice(self, choice: int, reason: str) -> None:
        """Ask the member to end one of several outputs at the next step border; its end comes as any other."""
        if not self._leaving and not self.ended:
            self.say(decode_pb2.DecodeRequest(cancel=decode_pb2.CancelSeat(reason=reason, choice=choice)))

    def prefill_lost(self, cause: str) -> None:
        """Tell the member that the hand-over will not be completed. It asks the writer itself whether writes are in flight.

        A member that has everything already goes on: its Committed is under way then.
        """
        if self._leaving or self._losing or self.ended:
            return
        self._losing = True
        self.say(decode_pb2.DecodeRequest(prefill_lost=decode_pb2.PrefillLost(cause=cause, drained=False)))
        self._expect_end(cause)

    def pause(self) -> None:
        """Ask the member to stop at the next step border; Paused comes after all output before it, or the seat's end."""
        if not self._leaving and not self.ended:
            self.say(decode_pb2.DecodeRequest(pause=decode_pb2.PauseSeat()))

    def push(self, grant: Any) -> None:
        """Ask the member of a paused seat to write its KV into another member's grant; Pushed tells the end."""
        if not self._leaving and not self.ended:
            self.say(decode_pb2.DecodeRequest(push=decode_pb2.PushSeat(grant=grant)))

    def keep_end(self) -> None:
        """Ask the member to keep the end that it has told until this stream is closed: a client still reads."""
        if self.ended and not self._cut:
            self.say(decode_pb2.DecodeRequest(keep_end=decode_pb2.KeepEnd()))

    def leave_end(self) -> None:
        """The end is another router's to take: this one does not say that it has it."""
        self._leaves_end = True

    def cut(self, why: str) -> None:
        """End the stream now, on this side."""
        if not self._cut and not self.ended:
            self._cut = why
            self._call.cancel()

    async def close(self) -> None:
        """The end, whatever came before: nothing is open and no task is left."""
        self._expect_none()
        if self.ended and not self._cut and not self._leaves_end:
            # The member keeps an end that it can not know to have arrived.
            self.say(decode_pb2.DecodeRequest(cancel=decode_pb2.CancelSeat(reason=TAKEN)))
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
            return output(message.output)
        if kind == "ended":
            self.ended = True
            return seat_end(message.ended)
        if kind == "granted":
            granted = message.granted
            return Granted(granted.grant if granted.HasField("grant") else None, granted.cached_tokens)
        if kind == "committed":
            if not self._leaving:
                self._expect_none()  # a lost prefill had written everything before
            return _committed(message.committed)
        if kind == "adopted":
            told = message.adopted
            return Adopted(
                opening=told.open,
                next_sequence_no=max(1, told.next_sequence_no),
                output_token_ids=tuple(told.output_token_ids),
                returned_tokens=told.returned_tokens,
                sent_text_bytes=told.sent_text_bytes,
                committed=_committed(told.committed) if told.HasField("committed") else None,
                held_log_probs=tuple(told.held_log_probabilities),
                returned=told.returned,
                choices=adopted_choices(told.open, told),
            )
        if kind == "paused":
            stopped = message.paused
            held = tuple(stopped.held_log_probabilities)
            return Paused(stopped.cache_tokens, tuple(stopped.selected_token_ids), stopped.pushable, held)
        if kind == "pushed":
            push = message.pushed
            return Pushed(push.ok, push.cause, push.sent_bytes, push.handover_s)
        if kind == "refused":
            self.ended = True
            raise SeatRefused(message.refused.reason, message.refused.detail, message.refused.retryable)
        raise SeatLost("an event that this router does not know")


def _committed(told: Any) -> Committed:
    return Committed(told.handover_s, told.compute_s, told.queue_s)


@asynccontextmanager
async def adopt_seat(
    member: Member, key: AttemptKey, next_sequence_no: int, limits: SeatLimits, *, traceparent: str
) -> AsyncIterator[Seat]:
    """A seat that is there: the stream of another router is taken over, events from `next_sequence_no` on come again."""
    async with seat_stream(member, limits, traceparent=traceparent, timeout_s=None) as seat:
        seat.say(decode_pb2.DecodeRequest(adopt=adopt_message(key, member.info.incarnation, next_sequence_no)))
        yield seat


@asynccontextmanager
async def seat_stream(member: Member, limits: SeatLimits, *, traceparent: str, timeout_s: float | None) -> AsyncIterator[Seat]:
    """Opens the stream, for a first message within the seconds that a member waits for it. After it nothing is left open.

    `timeout_s` bounds the whole stream as a last resort.
    """
    stub: Any = decode_pb2_grpc.DecodeServiceStub(member.channel)
    call = stub.Decode(metadata=metadata_with(traceparent), timeout=timeout_s)
    seat = Seat(call, member, limits)
    member.users[seat] = seat.cut
    try:
        yield seat
    finally:
        del member.users[seat]
        await seat.close()
