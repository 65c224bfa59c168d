"""Options that change behaviour, each shown on a real connection."""

import asyncio

import grpc
import pytest

from rpc.channels import Limits, client_options, internal_channel, internal_client_options, server_options
from rpc.interceptors import CallGuard
from rpc.status import StatusError, Violation, details_from, invalid_argument


class Served:
    """A server whose handlers are given as coroutines over bytes."""

    def __init__(self, limits=None, **handlers):
        self.limits = limits
        self.handlers = handlers

    async def __aenter__(self):
        self.server = grpc.aio.server(options=server_options(self.limits), interceptors=[CallGuard()])
        methods = {name: grpc.unary_stream_rpc_method_handler(handler) for name, handler in self.handlers.items()}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.T", methods),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = internal_channel(f"127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *exc):
        await self.channel.close()
        await self.server.stop(0)

    def call(self, name, payload=b""):
        return self.channel.unary_stream(f"/test.T/{name}")(payload)


async def test_a_second_server_cannot_take_the_port():
    async with Served() as served:
        second = grpc.aio.server(options=server_options())
        with pytest.raises(RuntimeError, match="Failed to bind"):
            second.add_insecure_port(f"127.0.0.1:{served.port}")


@pytest.mark.slow
async def test_large_messages_pass_up_to_the_limit():
    async def size(request, context):
        await context.write(str(len(request)).encode())

    async with Served(Limits(receive_max_bytes=8 * 1024 * 1024), size=size) as served:
        assert await served.call("size", b"x" * (8 * 1024 * 1024)).read() == b"8388608"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.call("size", b"x" * (8 * 1024 * 1024 + 1)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.call("size", b"again").read() == b"5"


@pytest.mark.slow
async def test_a_reader_that_stops_stops_the_writer_within_tens_of_kilobytes():
    sent = 0
    ended = asyncio.Event()

    async def endless(request, context):
        nonlocal sent
        try:
            while True:
                await context.write(b"x" * 100)
                sent += 100
        finally:
            ended.set()

    async with Served(endless=endless) as served:
        call = served.call("endless")
        await call.read()
        before = -1
        while sent != before:  # until nothing moves for a tenth of a second
            before = sent
            await asyncio.wait({asyncio.create_task(ended.wait())}, timeout=0.1)
        assert sent < 512 * 1024
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)


@pytest.mark.parametrize("unit", ["x", "漢"])
async def test_the_largest_status_arrives_every_time(unit):
    """At 9 kB of details one in twenty would turn into RESOURCE_EXHAUSTED."""

    async def refuse(request, context):
        raise error

    error = invalid_argument([Violation(f"field_{n}", unit * 400, "REASON") for n in range(10)], key=unit * 400)
    assert isinstance(error, StatusError) and 5000 < error.to_proto().ByteSize() <= 6000
    async with Served(refuse=refuse) as served:
        for _ in range(60):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await served.call("refuse").read()
            found = details_from(failed.value)
            assert found.code is grpc.StatusCode.INVALID_ARGUMENT
            assert found.violations[0].field == "field_0"


def test_options_by_purpose():
    internal = dict(internal_client_options(1000))
    assert internal["grpc.http2.bdp_probe"] == 0
    assert internal["grpc.use_local_subchannel_pool"] == 1
    assert internal["grpc.max_receive_message_length"] == 1000
    assert "grpc.http2.bdp_probe" not in dict(client_options())
    assert internal["grpc.enable_http_proxy"] == dict(client_options())["grpc.enable_http_proxy"] == 0
    assert dict(server_options())["grpc.so_reuseport"] == 0
    assert dict(server_options(Limits(max_concurrent_streams=7)))["grpc.max_concurrent_streams"] == 7
