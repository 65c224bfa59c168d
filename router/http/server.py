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
from rpc.tls import ServerTls

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
    """uvicorn's server without its hold on signals: they are the process's. `handshake_s`: what a handshake of TLS may take."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own on sockets that are bound, which would give handshakes as long as the event loop does."""
        config = self.config
        made: Any = config.http_protocol_class
        protocol: Any = partial(made, config=config, server_state=self.server_state, app_state={})
        loop, handshake_s = asyncio.get_running_loop(), self._handshake_s if config.ssl else None
        self.servers = [
            await loop.create_server(protocol, sock=one, ssl=config.ssl, ssl_handshake_timeout=handshake_s, backlog=BACKLOG)
            for one in sockets or ()
        ]
        self.started = True


def uvicorn_config(app: ASGIApp, bounds: Bounds, tls: ServerTls | None = None) -> uvicorn.Config:
    """How uvicorn serves: everything of it that is no HTTP/1.1 is off. Without `tls` in plain text."""
    protocol: Any = partial(BoundedProtocol, bounds)
    context = None if tls is None else tls.ssl_context()
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
        ssl_context_factory=None if context is None else lambda config, default: context,
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
    """One listening port with an application behind it, that speaks TLS alone where there is `tls`."""

    def __init__(self, listen: str, app: ASGIApp, bounds: Bounds, tls: ServerTls | None = None) -> None:
        """Takes the port; raises OSError when it cannot be had."""
        config = uvicorn_config(app, bounds, tls)
        self._socket = listening_socket(listen)
        host = listen.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._server = Server(config, bounds.read_s)
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
