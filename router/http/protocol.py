"""HTTP/1.1 connections with bounds: how many there are, how large the head of a request is, and how long it may take.

uvicorn's protocol has none of them. Beyond `connections` a connection is told 503, unless it asks for health or metrics; beyond
twice as many it is cut. A client that sends its next request before it has the answer to the last one is cut too: uvicorn would
not hear that such a client has gone.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.errors import HttpError
from router.http.guard import send_error

#: Bytes of an answer that the transport holds for its reader; uvloop's transport of TLS would take eight times as many.
WRITE_AHEAD_BYTES = 64 * 1024
#: Most bytes of a request's line and headers together.
HEAD_BYTES = 32 * 1024
#: What is answered beyond the bound of connections all the same: who watches the router is not to take a busy one for a dead one.
_WATCHING = ("/health", "/metrics")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the connections of one server. read_s: seconds for the head of a request to arrive."""

    connections: int
    read_s: float


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it, with the keywords that its own protocols take."""

    def __init__(self, bounds: Bounds, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._bounds = bounds
        self._own_app: ASGIApp = self.app
        #: Cuts the connection when a head, or a body that nobody waits for any more, does not come to its end.
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > 2 * self._bounds.connections:
            transport.abort()
            return
        transport.set_write_buffer_limits(WRITE_AHEAD_BYTES)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._idle and self._timer is None:
            self._expect()
        if self._idle and not self._in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._idle and self._head_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        if not self._idle:
            self.transport.abort()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if not self._idle:
            return
        self._has_come()
        self._in_body = True
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES:
            self.app = _refusing(
                HttpError(431, f"the headers have {size} bytes; at most {HEAD_BYTES} are read", "HEADERS_TOO_LARGE")
            )
        elif len(self.connections) > self._bounds.connections and not self.url.startswith(tuple(w.encode() for w in _WATCHING)):
            words = f"there are {self._bounds.connections} connections, as many as may be; try again"
            self.app = _refusing(HttpError(503, words, "TOO_MANY_CONNECTIONS"))
        else:
            self.app = self._own_app
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._idle:
            self._has_come()
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in an error object; in the middle of an answer the connection is cut."""
        if not self._idle:
            self.transport.abort()
            return
        error = HttpError(400, "this is no HTTP/1.1, or a method that nobody knows", "MALFORMED_HTTP")
        body = error.encoded()
        lines = [
            "HTTP/1.1 400 Bad Request",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self) -> None:
        self._timer = self.loop.call_later(self._bounds.read_s, self.transport.abort)

    def _has_come(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusing(error: HttpError) -> ASGIApp:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, error, close=True)

    return refuse
