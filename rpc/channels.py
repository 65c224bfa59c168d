"""Channel and server options: what each is for, and why the defaults of gRPC do not do."""

from dataclasses import dataclass

import grpc

Options = list[tuple[str, int]]

#: Most bytes of one received message. Prompts travel as text or ids; KV pages never do.
RECEIVE_MAX_BYTES = 32 * 1024 * 1024
#: Internal hops ping after that long without traffic, and give up on the peer after KEEPALIVE_TIMEOUT_MS without an answer.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
#: What a receiver lets a sender run ahead, per stream. With the bandwidth probe off this bounds what a slow reader
#: lets pile up in the transport to some tens of kB instead of 5 to 12 MB.
LOOKAHEAD_BYTES = 16_384
#: The least time between pings of a client that the server bears without dropping the connection.
MIN_PING_INTERVAL_MS = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a server's connections."""

    receive_max_bytes: int = RECEIVE_MAX_BYTES
    max_concurrent_streams: int | None = None  # for each connection; more wait at the client
    so_reuseport: bool = False
    max_metadata_bytes: int = 16_384  # of one call; more is refused
    max_connection_age_s: float | None = None  # calls that run then, run on


#: gRPC would send calls through the proxy that http_proxy names, even those to this machine.
NO_PROXY = ("grpc.enable_http_proxy", 0)


def server_options(limits: Limits | None = None) -> Options:
    """Options of a server.

    `so_reuseport` is off: with gRPC's default a second process that binds the same port silently takes half of its
    connections instead of failing. There is no limit on concurrent calls here, because it would refuse health checks too.
    """
    chosen = limits if limits is not None else Limits()
    options: Options = [
        ("grpc.so_reuseport", int(chosen.so_reuseport)),
        ("grpc.max_receive_message_length", chosen.receive_max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # A long silent stream makes a client's pings count as strikes, and the third one would kill every call.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # What a client may send ahead of a reader on a two-way stream.
        ("grpc.http2.bdp_probe", 0),
    ]
    # Between gRPC's soft and hard limits calls are refused at random: here they are one.
    options += [
        ("grpc.max_metadata_size", chosen.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", chosen.max_metadata_bytes),
    ]
    if chosen.max_concurrent_streams is not None:
        options.append(("grpc.max_concurrent_streams", chosen.max_concurrent_streams))
    if chosen.max_connection_age_s is not None:
        # Without a grace: one would cut the streams that outlive it.
        options.append(("grpc.max_connection_age_ms", round(chosen.max_connection_age_s * 1000)))
    return options


def internal_client_options(receive_max_bytes: int = RECEIVE_MAX_BYTES) -> Options:
    """Options of a channel between processes of a cell: small windows, so that back-pressure is felt, and a pulse."""
    return [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        # Otherwise channels with equal options share one connection, and one dead pool member's state with it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", receive_max_bytes),
        ("grpc.max_send_message_length", -1),
        # A member that was away is to be found again in seconds, not in minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A failed call is repaired by the route, which knows what may be repeated.
        ("grpc.enable_retries", 0),
        NO_PROXY,
    ]


def client_options(receive_max_bytes: int = RECEIVE_MAX_BYTES) -> Options:
    """Options of a client's channel, such as the command line's."""
    return [
        ("grpc.max_receive_message_length", receive_max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        NO_PROXY,
    ]


def internal_channel(address: str, receive_max_bytes: int = RECEIVE_MAX_BYTES) -> grpc.aio.Channel:
    """A channel to another process of the cell at `address` ("host:port")."""
    return grpc.aio.insecure_channel(address, options=internal_client_options(receive_max_bytes))
