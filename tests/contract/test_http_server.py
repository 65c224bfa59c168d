"""The HTTP door's server: health, metrics, bounds, drain. A router over fakes, asked by a plain HTTP client."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection

import httpx
import pytest

from router.http.protocol import HEAD_BYTES
from tests.http_world import COMPLETIONS, base_of, completion, http_world
from tests.redis_server import cell, redis_url
from tests.router_world import router_world, until

__all__ = ["cell", "redis_url"]


async def test_health_and_metrics(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (_, http):
        for path in ("/health", "/health/live", "/health/ready"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        metrics = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert 'tandem_http_server_calls_total{route="/health",status="200"} 1.0' in metrics.text
        assert "tandem_router_running_requests" in metrics.text


async def test_what_is_not_there_is_an_error_object(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (_, http):
        missing = await http.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "NOT_FOUND"
        wrong = await http.post("/health")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "MethodNotAllowedError"


async def test_b41_a_draining_router_is_alive_and_not_ready(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        world.decode.script.output.hold()
        running = asyncio.create_task(http.post(COMPLETIONS, json=completion()))
        await until(lambda: _count(world.decode.seats), 1)
        draining = asyncio.create_task(world.routers[0].drain())
        await until(lambda: _status(http, "/health"), 503)
        assert await _status(http, "/health/live") == 200
        refused = await http.post(COMPLETIONS, json=completion())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "DRAINING")
        assert refused.headers["retry-after"] == "1" and "x-should-retry" not in refused.headers
        world.decode.script.output.release()
        assert (await running).json()["choices"][0]["text"] == "t0 t1 t2 "
        assert await draining == 0
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=base_of(world)) as another:
                await another.get("/health")


async def test_a_port_that_is_taken_stops_the_start(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (_, http):
        taken = f"127.0.0.1:{http.base_url.port}"
        with pytest.raises(OSError, match=rf"cannot listen on {taken} \(http_listen\)"):
            async with router_world(redis_url, cell, http_listen=taken):
                pass


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, b"{}", 415, "NOT_JSON"),
        ({"content-type": "application/json"}, b" " * 65_537, 413, "BODY_TOO_LARGE"),
        ({"content-type": "application/json"}, b"{", 400, "MALFORMED_JSON"),
        ({"content-type": "application/json"}, b'{"prompt": "\xff"}', 400, "MALFORMED_JSON"),
        ({"content-type": "application/json"}, b"[]", 400, "INVALID_REQUEST"),
        ({"content-type": "application/json", "x-long": "x" * HEAD_BYTES}, b"{}", 431, "HEADERS_TOO_LARGE"),
    ],
)
async def test_bodies_and_heads_are_bounded(
    redis_url: str, cell: str, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    async with http_world(redis_url, cell, receive_max_bytes=65_536) as (_, http):
        answer = await http.post(COMPLETIONS, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_body_without_a_length_is_bounded_too(redis_url: str, cell: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 8192

    async with http_world(redis_url, cell, receive_max_bytes=65_536) as (_, http):
        answer = await http.post(COMPLETIONS, content=pieces(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "BODY_TOO_LARGE")


@pytest.mark.slow
async def test_what_does_not_come_is_not_waited_for(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, http_read_s=0.3) as (world, http):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        assert await _raw(http, b"") == b""
        assert await _raw(http, b"GET /health HT") == b""
        assert b" 408 " in await _raw(http, head + b"content-length: 10\r\n\r\n{")
        assert await _status(http, "/health") == 200
        assert not world.decode.opens


@pytest.mark.slow
async def test_connections_are_bounded_and_probes_get_through(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell, http_connections=1) as (world, http):
        world.decode.script.output.hold()
        running = asyncio.create_task(http.post(COMPLETIONS, json=completion()))
        await until(lambda: _count(world.decode.seats), 1)
        refused = await http.post(COMPLETIONS, json=completion())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "TOO_MANY_CONNECTIONS")
        assert await _status(http, "/health") == 200
        async with httpx.AsyncClient(base_url=http.base_url) as third:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                await third.get("/health")
        world.decode.script.output.release()
        assert (await running).status_code == 200


async def test_a_client_that_does_not_wait_for_its_answer_is_cut(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        world.decode.script.output.hold()
        body = b'{"prompt": "hello"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 19\r\n\r\n"
        assert await _raw(http, (head + body) * 2) == b""
        await world.at_rest()


async def test_what_is_no_http_is_told_so_in_an_error_object(redis_url: str, cell: str) -> None:
    async with http_world(redis_url, cell) as (world, http):
        for data in (b"\x16\x03\x01hello\r\n\r\n", b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n"):
            head, _, body = (await _raw(http, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "MALFORMED_HTTP"
        world.decode.script.output.hold()
        body = b'{"prompt": "hello", "stream": true}'
        begun = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 35\r\n\r\n"
        assert await _raw(http, begun + body + b"\x00\r\n\r\n") == b"", "nothing in the middle of an answer"
        await world.at_rest()


async def _count(things: Collection[object]) -> int:
    return len(things)


async def _status(http: httpx.AsyncClient, path: str) -> int:
    return (await http.get(path)).status_code


async def _raw(http: httpx.AsyncClient, data: bytes) -> bytes:
    """All that comes back on a connection of its own, until the server ends it."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
