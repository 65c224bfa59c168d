"""What goes to one client: a bounded buffer between the request and the one task that writes to the stream.

The request puts bytes in and stops reading its seat while the buffer is full, so that the decode member pauses the
sequence. The handler of the RPC takes them out. Nothing follows the terminal event.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from rpc.status import StatusError


class ClientStream:
    """One client's stream. Bounded by `limit_bytes` of unsent events, beside the last one put in and the terminal event.

    After the end a client has `send_timeout_s` to take what is left.
    """

    def __init__(self, limit_bytes: int, send_timeout_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._send_timeout_s = send_timeout_s
        self._pumping: asyncio.Timeout | None = None
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._unsent_bytes = 0
        self._writing = False
        self._ended = False
        self._gone = False
        self._reader: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.status: StatusError | None = None
        self.send_s = 0.0
        self.sent_text_bytes = 0
        self.sent_events = 0

    @property
    def unsent_bytes(self) -> int:
        """Bytes of events that are not written yet."""
        return self._unsent_bytes

    @property
    def full(self) -> bool:
        """Whether the request has to wait before it puts in more."""
        return self._unsent_bytes >= self._limit_bytes

    @property
    def empty(self) -> bool:
        """Whether everything put in was written."""
        return not self._waiting and not self._writing

    @property
    def ended(self) -> bool:
        """Whether the terminal event, or a refusal, was put in."""
        return self._ended

    @property
    def gone(self) -> bool:
        """Whether the client has left before the end."""
        return self._gone

    def put(self, event: bytes, text_bytes: int = 0) -> None:
        """One serialised GenerateResponse. Putting in after the end is an error of programming."""
        if self._ended:
            raise RuntimeError("an event after the terminal event")
        if self._gone:
            return
        self._waiting.append((event, text_bytes))
        self._unsent_bytes += len(event)
        self._wake_reader()

    def end(self, terminal: bytes | None, status: StatusError | None) -> None:
        """The terminal event, if the request ever was one, and the RPC's status after it (None is OK). Once."""
        if self._ended:
            raise RuntimeError("a second terminal event")
        if terminal is not None:
            self.put(terminal)
        self._ended = True
        self.status = status
        self._bound_rest()
        self._wake_reader()

    def leave(self) -> bool:
        """The client has gone; what is unsent is dropped. False when the stream had come to its end before."""
        if self._ended and self.empty:
            return False
        self._gone = True
        self._waiting.clear()
        self._unsent_bytes = 0
        self._wake(self._room)
        return True

    def changed(self) -> "asyncio.Future[None]":
        """Done when something was written or the client has left: for waiting until there is room, or nothing unsent."""
        if self._room is None or self._room.done():
            self._room = asyncio.get_running_loop().create_future()
        return self._room

    async def pump(self, write: Callable[[bytes], Awaitable[None]]) -> StatusError | None:
        """The handler's side: writes events until the end and returns the status. One call a stream.

        Raises TimeoutError when the client does not take what is left after the end.
        """
        try:
            async with asyncio.timeout(None) as self._pumping:
                if self._ended:
                    self._bound_rest()
                return await self._pump(write)
        finally:
            self._pumping = None

    async def _pump(self, write: Callable[[bytes], Awaitable[None]]) -> StatusError | None:
        while True:
            while self._waiting:
                event, text_bytes = self._waiting.popleft()
                self._writing = True
                started = time.monotonic()
                try:
                    await write(event)
                finally:
                    self._writing = False
                    self.send_s += time.monotonic() - started
                self._unsent_bytes -= len(event)
                self.sent_text_bytes += text_bytes
                self.sent_events += 1
                self._wake(self._room)
            if self._ended:
                return self.status
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _bound_rest(self) -> None:
        if self._pumping is not None:
            self._pumping.reschedule(asyncio.get_running_loop().time() + self._send_timeout_s)

    def _wake_reader(self) -> None:
        self._wake(self._reader)

    @staticmethod
    def _wake(future: "asyncio.Future[None] | None") -> None:
        if future is not None and not future.done():
            future.set_result(None)
