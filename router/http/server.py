"""uvicorn inside the router's process, on its event loop: bound, started, drained, stopped."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from router.http.protocol import BoundedProtocol, Bounds

#: Bytes of an answer that the kernel takes ahead of its reader. With the 64 KiB that the transport holds this piles up for
#: a client that does not read, before its sequence pauses.
SEND_BUFFER_BYTES = 64 * 1024
#: Connections that wait to be accepted.
BACKLOG = 1024
#: Seconds that an idle connection is kept for its client's next request.
IDLE_S = 30
#: Seconds that open answers get when the server stops; what runs has ended by then.
STOP_S = 1.0

_LOG = logging.getLogger("router.http")


class Server(uvicorn.Server):
    """uvicorn's server without its hold on signals: they are the process's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(app: ASGIApp, bounds: Bounds) -> uvicorn.Config:
    """How uvicorn serves: everything of it that is no HTTP/1.1 is off. TLS for this port is to be set here."""
    protocol: Any = partial(BoundedProtocol, bounds)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
    )


def listening_socket(listen: str) -> socket.socket:
    """A socket that is bound to host:port; port 0 takes a free one. Raises OSError that names the address."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        made.bind((host, int(port)))
        made.listen(BACKLOG)
        made.setblocking(False)
    except (OSError, OverflowError) as error:
        made.close()
        raise OSError(f"cannot listen on {listen} (http_listen): {error}") from error
    return made


class HttpServer:
    """One listening port with an application behind it."""

    def __init__(self, listen: str, app: ASGIApp, bounds: Bounds) -> None:
        """Takes the port; raises OSError when it cannot be had."""
        self._socket = listening_socket(listen)
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server = Server(uvicorn_config(app, bounds))
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begins to answer. The task ends when the server has stopped."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        return self._serving

    async def stop(self) -> None:
        """Takes no more connections, ends idle ones, gives open answers STOP_S and cuts what is left."""
        serving, self._serving = self._serving, None
        if serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({serving}, timeout=STOP_S)
        if not done:
            _LOG.warning("%s HTTP answers were not finished in %s s; they are cut", len(self._server.server_state.tasks), STOP_S)
            for task in self._server.server_state.tasks:
                task.cancel()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait({serving}, timeout=STOP_S)
