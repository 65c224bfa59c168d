"""Certificates of servers and clients, with real handshakes: who is let in, and what happens when the files change."""

import asyncio
import os
import socket
import ssl
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from rpc.tls import ClientTls, ServerTls
from rpc.watched_files import BadFile, WatchedFiles
from tests.certificates import Authority, Pair
from tests.waiting import until

pytestmark = pytest.mark.slow


def subject(port: int, authority: Authority, pair: Pair) -> str:
    """The name on the certificate that is shown at `port`."""
    context = ssl.create_default_context(cafile=authority.path)
    context.load_cert_chain(pair.cert, pair.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        return dict(entry[0] for entry in secure.getpeercert()["subject"])["commonName"]


async def test_new_connections_see_a_new_certificate_and_open_streams_live_on(tmp_path):
    authority = Authority(tmp_path)
    first, client = authority.sign("first", file="server"), authority.sign("client")
    server, finish = grpc.aio.server(), asyncio.Event()

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"begun")
        await finish.wait()
        await context.write(b"ended")

    handler = grpc.method_handlers_generic_handler("test", {"Stream": grpc.unary_stream_rpc_method_handler(stream)})
    server.add_generic_rpc_handlers((handler,))
    tls = ServerTls(first.cert, first.key, authority.path)
    port = server.add_secure_port("127.0.0.1:0", tls.credentials())
    await server.start()
    mine = ClientTls(authority.path, client.cert, client.key).credentials()
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", mine) as channel:
        call = channel.unary_stream("/test/Stream")(b"", timeout=60)
        assert await call.read() == b"begun"
        assert await asyncio.to_thread(subject, port, authority, client) == "first"
        authority.sign("second", file="server")

        async def changed() -> bool:
            return await asyncio.to_thread(subject, port, authority, client) == "second"

        await until(changed, 30, "the new certificate")
        finish.set()
        assert await call.read() == b"ended"
    await server.stop(0)


async def test_an_http_server_takes_the_certificate_of_the_time_of_each_handshake(tmp_path):
    authority = Authority(tmp_path)
    first, client = authority.sign("first", file="server"), authority.sign("client")
    context = ServerTls(first.cert, first.key).ssl_context()

    def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    assert await asyncio.to_thread(subject, port, authority, client) == "first"
    authority.sign("second", file="server")

    async def changed() -> bool:
        return await asyncio.to_thread(subject, port, authority, client) == "second"

    await until(changed, 30, "the new certificate")
    server.close()


async def test_a_client_without_a_certificate_of_the_authority_is_not_let_in(tmp_path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, stranger = authority.sign("server"), other.sign("stranger")
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", ServerTls(pair.cert, pair.key, authority.path).credentials())
    await server.start()
    for tls in (ClientTls(authority.path), ClientTls(authority.path, stranger.cert, stranger.key)):
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", tls.credentials()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/test/Anything")(b"", timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_half_a_configuration_names_the_setting_and_the_file(tmp_path):
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    with pytest.raises(BadFile, match=r"tls_key_file: /nowhere/key.pem cannot be read: No such file"):
        ServerTls(pair.cert, "/nowhere/key.pem")
    with pytest.raises(BadFile, match="the key does not belong to the certificate"):
        ServerTls(pair.cert, other.key)
    with pytest.raises(BadFile, match="as PEM"):
        ServerTls(pair.key, pair.key)
    with pytest.raises(BadFile, match="the key without a password"):
        ServerTls(pair.cert, authority.locked(pair))
    with pytest.raises(BadFile, match="tls_client_ca_file: the file must hold certificates as PEM"):
        ServerTls(pair.cert, pair.key, pair.key)
    with pytest.raises(BadFile, match="tls_ca_file"):
        ClientTls(pair.key)
    with pytest.raises(BadFile, match="tls_client_cert_file, tls_client_key_file: the key does not belong"):
        ClientTls(authority.path, pair.cert, other.key)


def test_a_file_that_became_unreadable_leaves_what_was_read_before(tmp_path, caplog):
    path = tmp_path / "value"
    path.write_text("1")

    def number(contents):
        try:
            return int(contents["number_file"])
        except ValueError:
            raise BadFile("number_file: it must hold a number") from None

    watched = WatchedFiles({"number_file": str(path)}, number, look_s=0.0)
    path.write_text("secret")
    assert watched.current() == 1
    assert "number_file: it must hold a number; what was read before stays in use" in caplog.text
    assert "secret" not in caplog.text
    path.unlink()
    assert watched.current() == 1
    swapped = Path(tmp_path / "next")
    swapped.write_text("2")
    os.utime(swapped, ns=(time.time_ns(), time.time_ns()))
    swapped.rename(path)
    assert watched.current() == 2
