"""What goes to the readers of one request: its stream log, and a pump for each connection that reads it.

The request puts events in and stops reading its seat while the log is full, so that the decode member pauses the sequence.
Each RPC that reads (Generate, Attach, a repeated Generate) has a Reader of its own. Nothing follows the terminal event.
"""

import asyncio
from collections.abc import Awaitable, Callable

from router.presence import Presence
from router.stream_log import Cursor, EventsGone, StreamLog
from router.whole_output import WholeOutput
from rpc import clocks
from rpc.status import StatusError, slow_consumer


class Elsewhere(Exception):
    """The stream goes on at another router, from event `next_no` on: this one gave the request up without an end."""

    def __init__(self, next_no: int) -> None:
        super().__init__(f"the request runs at another router, from event {next_no} on")
        self.next_no = next_no


class TooManyReaders(Exception):
    """There is no room for another reader; `most` may read."""

    def __init__(self, most: int) -> None:
        super().__init__(f"at most {most} connections may read one request")
        self.most = most


class RequestStream:
    """One request's events and who reads them. See StreamLog for what is kept and when it is full.

    `presence` hears when the last reader leaves before the end, and when one comes. With `fails_when_full` the request is
    told to end (`overrun`) as soon as it is full. After the end a reader has `send_timeout_s` to take what is left.
    `whole`: what was returned before the log begins, when each Delta is to hold all of the output.

    send_s: seconds spent writing events, each counted for the reader that was sent it first.
    """

    def __init__(
        self,
        log: StreamLog,
        presence: Presence,
        *,
        send_timeout_s: float = 10.0,
        most_readers: int = 8,
        overrun: Callable[[], None] | None = None,
        whole: WholeOutput | None = None,
    ) -> None:
        self.log = log
        self._presence = presence
        self._send_timeout_s = send_timeout_s
        self._most_readers = most_readers
        self._overrun = overrun
        self._readers: set[Reader] = set()
        self._room: asyncio.Future[None] | None = None
        self._moved = False
        self._status: StatusError | None = None
        self._whole = whole
        if whole is not None:
            log.dropped = whole.take
        self.send_s = 0.0

    @property
    def unsent_bytes(self) -> int:
        """Bytes of events that the furthest reader was not sent yet."""
        return 0 if self.gone else self.log.unsent_bytes

    @property
    def sent_text_bytes(self) -> int:
        """Bytes of text that the furthest reader was sent."""
        return self.log.sent_text_bytes

    @property
    def full(self) -> bool:
        """Whether the request has to wait before it puts in more."""
        return not self.gone and self.log.full

    @property
    def empty(self) -> bool:
        """Whether the furthest reader was sent everything."""
        return self.log.delivered

    @property
    def ended(self) -> bool:
        """Whether the terminal event, or a refusal, was put in, or the request was given up."""
        return self.log.ended or self._moved

    @property
    def moved(self) -> bool:
        """Whether the request was given up here: it has no end here, but at another router."""
        return self._moved

    @property
    def gone(self) -> bool:
        """Whether nobody reads, and the request ends because of it: what is put in is dropped."""
        return self._presence.given_up

    @property
    def read(self) -> bool:
        """Whether anybody reads now."""
        return bool(self._readers)

    @property
    def readers(self) -> int:
        """Connections that read now."""
        return len(self._readers)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for readers to come."""
        return self.log.kept_bytes + (self._whole.size_bytes if self._whole is not None else 0)

    def put(self, event: bytes, text_bytes: int = 0) -> None:
        """One serialised GenerateResponse, which bears the log's next number. Raises LogEnded after the end."""
        if self._moved or (self.gone and not self.log.ended):
            return
        self.log.put(event, text_bytes)
        self._tell_readers()
        if self._overrun is not None and self.log.full:
            self._overrun()

    def end(self, terminal: bytes | None, status: StatusError | None) -> None:
        """The terminal event, if the request ever was one, and the RPCs' status after it (None is OK). Raises LogEnded."""
        self.log.end(terminal)
        self._status = status
        self._presence.close()
        for reader in self._readers:
            reader.bound(self._send_timeout_s)
        self._tell_readers()

    def move(self, status: StatusError | None = None) -> None:
        """The request runs at another router: readers are told so, and there is no end here.

        With a `status` they end with it: what they have is not what the other router goes on from.
        """
        self._moved = True
        self._status = status
        self._presence.close()
        self._tell_readers()

    def reader(self, next_no: int) -> "Reader":
        """A connection that reads from event `next_no` on; to be closed. Raises EventsGone, BeyondEnd, TooManyReaders."""
        if len(self._readers) >= self._most_readers:
            raise TooManyReaders(self._most_readers)
        reader = Reader(self, self.log.open(next_no), self.whole_before(next_no))
        self._readers.add(reader)
        if not self.ended:
            self._presence.joined()
        self._wake_request()
        return reader

    def whole_before(self, number: int) -> WholeOutput | None:
        """All output before an event, which is kept or the next one; None when Deltas hold what is new in them."""
        if self._whole is None:
            return None
        whole = self._whole.copy()
        for event in self.log.events_before(number):
            whole.take(event)
        return whole

    def changed(self) -> "asyncio.Future[None]":
        """Done when something was written, or a reader came or left: for waiting until there is room, or nothing unsent."""
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        return self._room

    def outcome(self, reader: "Reader") -> bool:
        """Whether a reader that has everything has come to the end. Raises the status, or Elsewhere."""
        if self._moved and self._status is None:
            raise Elsewhere(reader.next_no)
        if self.ended and self._status is not None:
            raise self._status
        return self.log.ended

    def sent(self, cursor: Cursor, seconds: float) -> None:
        """An event was written to a reader, in that time."""
        if self.log.sent(cursor):
            self.send_s += seconds
            self._end_those_behind()
        self._wake_request()

    def left(self, reader: "Reader", cursor: Cursor, *, deadline: bool) -> None:
        """A reader has gone, because of its RPC's `deadline` or of itself."""
        self._readers.discard(reader)
        self.log.close(cursor)
        if not self._readers and not self.ended:
            self._presence.alone(deadline=deadline)
        self._wake_request()

    def _tell_readers(self) -> None:
        self._end_those_behind()
        for reader in self._readers:
            reader.wake()

    def _end_those_behind(self) -> None:
        for reader in self._readers:
            if reader.fallen_behind:
                reader.bound(0.0)

    def _wake_request(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class Reader:
    """One connection. Made by RequestStream.reader; `pump` once, then `close`."""

    def __init__(self, stream: RequestStream, cursor: Cursor, whole: WholeOutput | None) -> None:
        self._stream = stream
        self._whole = whole
        self._cursor = cursor
        self._news: asyncio.Future[None] | None = None
        self._pumping: asyncio.Timeout | None = None
        self._bound_s: float | None = stream._send_timeout_s if stream.ended else None

    @property
    def next_no(self) -> int:
        """Number of the first event that was not written."""
        return self._cursor.position

    @property
    def fallen_behind(self) -> bool:
        """Whether its next event is not kept any more."""
        return self._stream.log.fallen_behind(self._cursor)

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes events until the end. Raises the request's status unless it is OK, SLOW_CONSUMER for a reader that fell
        behind or did not take the rest in time, Elsewhere when the request runs at another router."""
        try:
            async with asyncio.timeout(self._bound_s) as self._pumping:
                await self._pump(write)
        except TimeoutError:
            if self.fallen_behind:
                message = f"event {self.next_no} is not kept any more; events from {self._stream.log.first_no} on are"
                raise slow_consumer(message) from None
            raise slow_consumer("the rest of the stream was not taken in time after its end") from None
        finally:
            self._pumping = None

    def close(self, *, deadline: bool = False) -> None:
        """The connection is over; `deadline`: it was its own that ran out."""
        self._stream.left(self, self._cursor, deadline=deadline)

    def wake(self) -> None:
        """There is something new."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def bound(self, seconds: float) -> None:
        """From now on the pump has so long."""
        self._bound_s = seconds
        if self._pumping is not None and not self._pumping.expired():
            self._pumping.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _pump(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        log = self._stream.log
        while True:
            try:
                while (event := log.peek(self._cursor)) is not None:
                    started = clocks.monotonic()
                    await write(event if self._whole is None else self._whole.shown(event))
                    self._stream.sent(self._cursor, clocks.monotonic() - started)
            except EventsGone:
                raise TimeoutError from None
            if self._stream.outcome(self):
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news
