"""The door of the peer's P/D pair, run by the peer's own Python between servers made here."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from bench.doors import HttpDoor
from bench.peer.install import FOLDER
from bench.peer.servers import PROXY, free_port
from tandem_cli.load.door import RequestFailed
from tandem_cli.load.measured import Seen
from tandem_cli.load.workload import Planned
from tests.waiting import until

PYTHON = FOLDER / "bin" / "python"
pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make bench-peer installs what this needs"),
]
WHERE = {"remote_engine_id": "e", "remote_block_ids": [3, 4]}
STREAMED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes, asked: list[dict[str, object]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        asked.append(json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))))
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@contextmanager
def proxy(prefill: str, decode: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([str(PYTHON), str(PROXY), str(port), prefill, decode])
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def ask(address: str) -> Seen:
    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection(*address.split(":"))
        except OSError:
            return False
        writer.close()
        return True

    await until(listens, 30, "the proxy listens")
    seen = Seen(time.perf_counter(), 2)
    await HttpDoor(address, "m").ask(Planned(0.0, (5, 6, 7), 2), seen)
    return seen


def json_answer(status: str, value: object) -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_prefill_answers_one_token_and_decode_is_told_where_its_kv_lies() -> None:
    event = b'data: {"choices": [{"token_ids": [9, 8]}]}\n\n'
    stream = STREAMED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    first: list[dict[str, object]] = []
    second: list[dict[str, object]] = []
    async with server(json_answer("200 OK", {"kv_transfer_params": WHERE}), first) as prefill, server(stream, second) as decode:
        with proxy(prefill, decode) as address:
            seen = await ask(address)
    assert seen.tokens == 2
    assert (first[0]["max_tokens"], first[0]["stream"], first[0]["prompt"]) == (1, False, [5, 6, 7])
    assert first[0]["kv_transfer_params"]["do_remote_decode"] is True  # type: ignore[index]
    assert (second[0]["max_tokens"], second[0]["stream"], second[0]["kv_transfer_params"]) == (2, True, WHERE)


async def test_a_refusal_comes_back_as_it_was() -> None:
    refusal = json_answer("503 Service Unavailable", {"error": "full"})
    async with server(refusal, []) as prefill:
        with proxy(prefill, prefill) as address, pytest.raises(RequestFailed, match="503"):
            await ask(address)
