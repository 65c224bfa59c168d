"""Channels to other processes of the cell, as the settings say: in plain text, with TLS, with the cell's secret.

A channel outlives its certificates: when the files change, calls from then on go over a new connection, and the old one
stays for the calls that run on it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from rpc.cell_identity import CellIdentity
from rpc.channels import internal_channel, internal_client_options
from rpc.security_settings import SecuritySettings
from rpc.tls import ClientTls

#: Calls of a connection with old certificates are cut after so many seconds; more than a request may take.
OLD_CALLS_S = 86_400.0

#: Opens a channel to host:port.
Dial = Callable[[str], grpc.aio.Channel]


def dialler(settings: SecuritySettings, identity: CellIdentity) -> Dial:
    """How a process opens channels to others of its cell. Raises BadFile."""
    tls = None
    if settings.tls_ca_file:
        own = settings.tls_client_cert_file, settings.tls_client_key_file
        cert, key = own if all(own) else (settings.tls_cert_file, settings.tls_key_file)
        tls = ClientTls(settings.tls_ca_file, cert, key)
    elif not settings.cell_secret_file:
        return internal_channel
    options: list[tuple[str, Any]] = list(internal_client_options())
    if settings.tls_server_name:
        options.append(("grpc.ssl_target_name_override", settings.tls_server_name))

    def dial(address: str) -> grpc.aio.Channel:
        def connect(credentials: Any) -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(address, options=options)
            return grpc.aio.secure_channel(address, credentials, options=options)

        return RenewedChannel(connect, tls.credentials if tls else lambda: None, identity.metadata)

    return dial


class RenewedChannel(grpc.aio.Channel):
    """A channel over connections with the credentials of the time of each call, which carries `metadata` of that time too."""

    def __init__(
        self,
        connect: Callable[[Any], grpc.aio.Channel],
        credentials: Callable[[], Any],
        metadata: Callable[[], tuple[tuple[str, str], ...]],
    ) -> None:
        self._connect = connect
        self._credentials = credentials
        self._metadata = metadata
        self._with = credentials()
        self._now = connect(self._with)
        self._old: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(self, kind: str, method: tuple[Any, ...], args: Any, kwargs: dict[str, Any]) -> Any:
        """Begins a call: `kind` is the channel's method, `method` what it takes."""
        kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *self._metadata())
        return getattr(self._current(), kind)(*method)(*args, **kwargs)

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc.aio.Channel."""
        return _Calls(self, "unary_unary", (method, request_serializer, response_deserializer))

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc.aio.Channel."""
        return _Calls(self, "unary_stream", (method, request_serializer, response_deserializer))

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc.aio.Channel."""
        return _Calls(self, "stream_unary", (method, request_serializer, response_deserializer))

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc.aio.Channel."""
        return _Calls(self, "stream_stream", (method, request_serializer, response_deserializer))

    async def close(self, grace: float | None = None) -> None:
        """Closes the connection, and those that were kept for their calls."""
        self._closed = True
        for task in self._old:
            task.cancel()
        await asyncio.gather(*self._old, return_exceptions=True)
        await self._now.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the newest connection."""
        return self._now.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the newest connection."""
        await self._now.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the newest connection."""
        await self._current().channel_ready()

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    def _current(self) -> grpc.aio.Channel:
        credentials = self._credentials()
        if credentials is not self._with and not self._closed:
            task = asyncio.create_task(_retire(self._now), name="old connection")
            self._old.add(task)
            task.add_done_callback(self._old.discard)
            self._with, self._now = credentials, self._connect(credentials)
        return self._now


class _Calls:
    """One method of a RenewedChannel, as gRPC's stubs keep it."""

    def __init__(self, channel: RenewedChannel, kind: str, method: tuple[Any, ...]) -> None:
        self._channel, self._kind, self._method = channel, kind, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.call(self._kind, self._method, args, kwargs)


async def _retire(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(OLD_CALLS_S)
    finally:
        await channel.close(None)
