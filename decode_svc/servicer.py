"""The gRPC edge of a decode member: a call opens a seat, or takes one over. Proto stops here."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from decode_svc import admission, wire, wire_out
from decode_svc.admission import Identity, Refusal, cannot_adopt, duplicate_attempt
from decode_svc.messages import Command, LosePrefill, SeatEnded, SeatGranted, SeatRefused
from decode_svc.move_door import MoveDoor
from decode_svc.opening import Opener, Opening
from decode_svc.requests import Requests
from decode_svc.streams import Reader, SeatStream, Streams
from decode_svc.wire_log_probs import Pieces
from member.inbox import Inbox, InboxFull
from rpc import clocks
from rpc.status import StatusError, Violation, invalid_argument, slow_consumer
from tandem.pools.v1 import decode_pb2 as pb
from tandem.pools.v1 import decode_pb2_grpc as pb_grpc
from telemetry import logs

_LOG = logging.getLogger("decode")

#: Seconds within which the first message of a call must be here.
FIRST_MESSAGE_S = 10.0


class DecodeServicer(pb_grpc.DecodeServiceServicer):
    """Turns calls into commands for the engine thread, and what a stream's log publishes into responses."""

    def __init__(
        self,
        inbox: Inbox[Command],
        streams: Streams,
        moves: MoveDoor,
        refused: Callable[[str], None],
        adopted: Callable[[], None],
    ) -> None:
        self._opener: Opener | None = None
        self._pieces: Pieces = lambda token: b""
        self._moves = moves
        self._inbox = inbox
        self._streams = streams
        self._refused = refused
        self._adopted = adopted

    def open(self, opener: Opener) -> None:
        """Calls can be served from now on."""
        self._opener = opener
        self._pieces = opener.tokenizer.piece

    async def Decode(self, request_iterator: Any, context: Any) -> None:  # noqa: N802  (the name that gRPC calls)
        """See decode.proto."""
        assert self._opener is not None, "a call came before the member was opened"
        requests = Requests(request_iterator)
        try:
            await self._decode(requests, context)
        finally:
            requests.close()

    async def _decode(self, requests: Requests, context: Any) -> None:
        assert self._opener is not None
        message = await self._first(requests)
        if message.WhichOneof("message") == "adopt":
            await self._adopt(self._opener.me, message.adopt, requests, context)
            return
        opening = await self._opening(message.open, requests)
        if isinstance(opening, Refusal):
            await self._refuse(context, opening)
            return
        key = opening.origin.key
        logs.bind(request_id=key.request_id, attempt=key.attempt, traceparent=opening.origin.traceparent)
        if self._streams.find(key) is not None:
            # The engine knows an attempt only until it has ended; its end may still wait here.
            await self._refuse(context, duplicate_attempt(key.attempt))
            return
        stream = self._streams.add(opening.origin)
        try:
            self._inbox.put_nowait(opening.command(stream.numbers))
        except InboxFull as full:
            self._streams.forget(stream)
            await self._refuse(context, Refusal(admission.INBOX_FULL, str(full), True))
            return
        with self._streams.reading(stream) as reader:
            await self._serve(stream, reader, requests, context)

    async def CheckGrammar(self, request: Any, context: Any) -> Any:  # noqa: N802  (the name that gRPC calls)
        """See decode.proto."""
        assert self._opener is not None, "a call came before the member was opened"
        return await self._opener.check(request)

    async def _opening(self, message: pb.Open, requests: Requests) -> Opening | Refusal:
        """What an Open comes to. While its grammar is compiled a cancel is heard."""
        assert self._opener is not None
        received_at = clocks.monotonic()
        if not message.HasField("grammar"):
            return await self._opener.read(message, received_at)
        reading = asyncio.ensure_future(self._opener.read(message, received_at))
        try:
            await asyncio.wait({reading, requests.coming()}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and requests.next_cancels():
                return Refusal(admission.CANCELLED, "it was cancelled while its grammar was compiled", False)
            return await reading
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})

    async def _adopt(self, me: Identity, adopt: pb.Adopt, requests: Requests, context: Any) -> None:
        """Take a seat over: everything that its call has not told, or that is wanted again, comes on this one."""
        key = wire.adopted_key(adopt)
        logs.bind(request_id=key.request_id, attempt=key.attempt)
        stream = self._streams.find(key)
        refusal = cannot_adopt(me, adopt.incarnation, key.attempt, known=stream is not None)
        if stream is None or refusal is not None:
            assert refusal is not None
            await self._refuse(context, refusal)
            return
        wire.check_wanted(adopt, stream.log.next_sequence_no)
        with self._streams.reading(stream) as reader:
            replay = self._streams.rewind(stream, adopt.next_sequence_no)
            _LOG.info("a seat was taken over", extra={"next_sequence_no": replay.next_sequence_no})
            self._adopted()
            opening = wire_out.open_as_now(stream.origin, stream.last_token_at, clocks.monotonic())
            told = wire_out.adopted(opening, stream.origin, replay, stream.ready, self._pieces)
            await self._serve(stream, reader, requests, context, told)

    async def _first(self, requests: Requests) -> pb.DecodeRequest:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                message = await anext(requests, None)
        except TimeoutError:
            text = f"must be the first message, within {FIRST_MESSAGE_S:g} s"
            raise invalid_argument([Violation("open", text, "NO_OPEN")], "NO_OPEN") from None
        if message is None or message.WhichOneof("message") not in ("open", "adopt"):
            raise invalid_argument(
                [Violation("open", "open or adopt must be the first message of the call", "NO_OPEN")], "NO_OPEN"
            )
        return message

    async def _refuse(self, context: Any, refusal: Refusal) -> None:
        self._refused(refusal.reason)
        await context.write(wire_out.refused(SeatRefused(0, refusal.reason, refusal.detail, refusal.retryable)))

    async def _serve(
        self,
        stream: SeatStream,
        reader: Reader,
        requests: Requests,
        context: Any,
        first: pb.DecodeResponse | None = None,
    ) -> None:
        """Write `first`, then everything until the terminal is written and, where it is held otherwise, taken; read beside it."""
        listener = asyncio.create_task(self._read(stream, reader, requests), name=f"seat {stream.number} reader")
        try:
            # No limit but the one that the stream sets itself: when its end is never taken, or another call has the seat.
            async with asyncio.timeout(None) as reader.patience:
                if first is not None:
                    await context.write(first)
                await self._write(stream, reader, context)
                if stream.tenure.hold_s > 0 and isinstance(stream.terminal(), SeatEnded):
                    await reader.taken.wait()
                reader.delivered = True
        except TimeoutError:
            if stream.reader is not reader:
                raise StatusError(grpc.StatusCode.ABORTED, "another call has taken the seat over", "ADOPTED") from None
            text = "the end of the request was not taken in time"
            raise slow_consumer(text) from None
        finally:
            reader.patience = None
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _read(self, stream: SeatStream, reader: Reader, requests: Requests) -> None:
        """Until the router says no more; it may go on listening. What can not be read ends the call."""
        try:
            await self._read_all(stream, reader, requests)
        except StatusError as bad:
            if stream.reader is reader:
                stream.break_off(bad.message)

    async def _read_all(self, stream: SeatStream, reader: Reader, requests: Requests) -> None:
        lost = False
        async for message in requests:
            if stream.reader is not reader:
                return
            kind = message.WhichOneof("message")
            if kind == "cancel" and message.cancel.HasField("choice"):
                ending = wire.cancel_ending(message.cancel)
                self._streams.cancel_choice(stream, message.cancel.choice, ending, clocks.monotonic())
            elif kind == "cancel":
                reader.taken.set()
                self._streams.cancel(stream, wire.cancel_ending(message.cancel), clocks.monotonic())
            elif kind == "prefill_lost" and not lost:
                lost = True
                cause = wire.loss_cause(message.prefill_lost)
                self._inbox.put_always(LosePrefill(stream.number, cause, message.prefill_lost.drained))
            elif kind == "keep_end":
                self._streams.keep_end(stream, reader)
            elif kind in ("pause", "push") and stream.origin.choices:
                stream.break_off("several outputs of a prompt do not move: pause and push are for one")
                return
            elif kind == "pause":
                self._moves.pause(stream)
            elif kind == "push":
                await self._moves.push(stream, message.push)
            elif kind != "prefill_lost":
                stream.break_off("after the first message only cancel, prefill_lost, pause, push and keep_end are taken")
                return

    async def _write(self, stream: SeatStream, reader: Reader, context: Any) -> None:
        while True:
            await reader.news.wait()
            reader.news.clear()
            if stream.broken:
                raise invalid_argument([Violation("message", stream.broken, "OUT_OF_ORDER")], "OUT_OF_ORDER")
            if await self._write_what_waits(stream, reader, context):
                return

    async def _write_what_waits(self, stream: SeatStream, reader: Reader, context: Any) -> bool:
        """Write until nothing waits; True when the terminal was written. While a write is awaited more may come."""
        while stream.reader is reader:
            again = stream.next_again()
            if again is not None:
                await context.write(wire_out.output_again(again))
                continue
            event = stream.next_before_output()
            if event is not None:
                await context.write(wire_out.granted(event) if isinstance(event, SeatGranted) else wire_out.committed(event))
                continue
            published = stream.begin_write(clocks.monotonic())
            if published is not None:
                response = wire_out.output(published, self._pieces)
                self._streams.keep(stream, published, response.output.SerializeToString())
                end = stream.terminal()
                if isinstance(end, SeatEnded):  # one message: whoever knows the last token knows the end
                    response = self._ended(stream, end, response.output)
                await context.write(response)
                self._streams.written(stream, reader)
                if end is not None:
                    return True
                continue
            moving = stream.next_after_output()
            if moving is not None:
                await context.write(wire_out.move_news(moving, stream.log))
                continue
            terminal = stream.terminal()
            if isinstance(terminal, SeatEnded):
                await context.write(self._ended(stream, terminal, None))
            elif terminal is not None:
                await context.write(wire_out.refused(terminal))
            return terminal is not None
        return False

    def _ended(self, stream: SeatStream, end: SeatEnded, last: Any) -> pb.DecodeResponse:
        return wire_out.ended(end, stream.log, last, self._pieces)
