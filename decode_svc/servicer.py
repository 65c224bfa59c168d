"""The gRPC edge of a decode member: one call is one seat. Proto stops here."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from decode_svc import admission, wire
from decode_svc.admission import Identity, mismatch
from decode_svc.messages import Command, LosePrefill, OpenSeat, SeatEnded, SeatGranted, SeatRefused
from decode_svc.streams import SeatOrigin, SeatStream, Streams
from member.inbox import Inbox, InboxFull
from rpc.status import StatusError, Violation, invalid_argument, slow_consumer
from tandem.pools.v1 import decode_pb2 as pb
from tandem.pools.v1 import decode_pb2_grpc as pb_grpc
from telemetry import logs

#: Seconds within which the first message of a call must be here.
FIRST_MESSAGE_S = 10.0


class DecodeServicer(pb_grpc.DecodeServiceServicer):
    """Turns calls into commands for the engine thread, and what a stream's log publishes into responses."""

    def __init__(self, inbox: Inbox[Command], streams: Streams, refused: Callable[[str], None]) -> None:
        self._model: tuple[Identity, frozenset[int]] | None = None
        self._inbox = inbox
        self._streams = streams
        self._refused = refused

    def open(self, me: Identity, eos_ids: frozenset[int]) -> None:
        """Calls can be served from now on; `eos_ids`: the model's end tokens."""
        self._model = (me, eos_ids)

    async def Decode(self, request_iterator: Any, context: Any) -> None:  # noqa: N802  (the name that gRPC calls)
        """See decode.proto."""
        assert self._model is not None, "a call came before the member was opened"
        me, eos_ids = self._model
        requests = aiter(request_iterator)
        message = await self._first(requests)
        received_at = time.monotonic()
        wire.check_shape(message)
        refusal = mismatch(me, message.incarnation, message.model_snapshot, wire.total_tokens(message))
        if refusal is not None:
            await self._refuse(context, SeatRefused(0, refusal.reason, refusal.detail, refusal.retryable))
            return
        request = wire.parse_open(message, me, eos_ids)
        key = request.spec.key
        logs.bind(request_id=key.request_id, attempt=key.attempt, traceparent=request.traceparent)
        origin = SeatOrigin(
            key=key,
            traceparent=request.traceparent,
            opened_at=received_at,
            inter_token_s=request.limits.inter_token_s,
            first_sequence_no=request.first_sequence_no,
            sends_output=request.sends_output,
            prompt_tokens=len(request.spec.prompt_token_ids),
            prefill_member=request.prefill.member if request.prefill is not None else "",
        )
        with self._streams.seat(origin) as stream:
            command = OpenSeat(
                seat=stream.number,
                sequence=request.spec,
                limits=request.limits,
                priority=request.priority,
                sends_output=request.sends_output,
                prefill=request.prefill,
                received_at=received_at,
            )
            try:
                self._inbox.put_nowait(command)
            except InboxFull as full:
                self._streams.forget(stream)
                await self._refuse(context, SeatRefused(0, admission.INBOX_FULL, str(full), True))
                return
            await self._serve(stream, requests, context)

    async def _first(self, requests: AsyncIterator[pb.DecodeRequest]) -> pb.Open:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                message = await anext(requests, None)
        except TimeoutError:
            text = f"must be the first message, within {FIRST_MESSAGE_S:g} s"
            raise invalid_argument([Violation("open", text, "NO_OPEN")], "NO_OPEN") from None
        if message is None or message.WhichOneof("message") != "open":
            raise invalid_argument([Violation("open", "must be the first message of the call", "NO_OPEN")], "NO_OPEN")
        return message.open

    async def _refuse(self, context: Any, refusal: SeatRefused) -> None:
        self._refused(refusal.reason)
        await context.write(wire.refused(refusal))

    async def _serve(self, stream: SeatStream, requests: AsyncIterator[pb.DecodeRequest], context: Any) -> None:
        """Write until the terminal is written; read beside it."""
        reader = asyncio.create_task(self._read(stream, requests), name=f"seat {stream.number} reader")
        try:
            # No limit but the one that the stream sets itself when its reader never takes the end.
            async with asyncio.timeout(None) as stream.patience:
                await self._write(stream, context)
        except TimeoutError:
            text = "the end of the request was not taken in time"
            raise slow_consumer(text) from None
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stream: SeatStream, requests: AsyncIterator[pb.DecodeRequest]) -> None:
        """Until the router says no more; it may go on listening. What can not be read ends the call."""
        try:
            await self._read_all(stream, requests)
        except StatusError as bad:
            stream.break_off(bad.message)

    async def _read_all(self, stream: SeatStream, requests: AsyncIterator[pb.DecodeRequest]) -> None:
        lost = False
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "cancel":
                self._streams.end(stream, wire.cancel_ending(message.cancel), time.monotonic())
            elif kind == "prefill_lost" and not lost:
                lost = True
                cause = wire.loss_cause(message.prefill_lost)
                self._inbox.put_always(LosePrefill(stream.number, cause, message.prefill_lost.drained))
            elif kind != "prefill_lost":
                stream.break_off("after Open only cancel and prefill_lost are taken")
                return

    async def _write(self, stream: SeatStream, context: Any) -> None:
        while True:
            await stream.news.wait()
            stream.news.clear()
            if stream.broken:
                raise invalid_argument([Violation("message", stream.broken, "OUT_OF_ORDER")], "OUT_OF_ORDER")
            if await self._write_what_waits(stream, context):
                return

    async def _write_what_waits(self, stream: SeatStream, context: Any) -> bool:
        """Write until nothing waits; True when the terminal was written. While a write is awaited more may come."""
        while True:
            event = stream.next_before_output()
            if event is not None:
                await context.write(wire.granted(event) if isinstance(event, SeatGranted) else wire.committed(event))
                continue
            published = stream.begin_write(time.monotonic())
            if published is not None:
                await context.write(wire.output(published))
                taken = stream.end_write()
                if taken is not None:
                    self._inbox.put_always(taken)
                continue
            terminal = stream.log.terminal()
            if isinstance(terminal, SeatEnded):
                await context.write(wire.ended(terminal, stream.log.next_sequence_no, stream.log.whole_text()))
            elif terminal is not None:
                await context.write(wire.refused(terminal))
            return terminal is not None
