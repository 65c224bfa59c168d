"""The door of another engine, beside our own: the same request, and what comes back is written down the same way."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from typing import Any

from tandem_cli.load.door import REQUEST_TIMEOUT_S, RequestFailed
from tandem_cli.load.measured import Seen
from tandem_cli.load.workload import Planned

LINE_BYTES_MAX = 1 << 20


class HttpDoor:
    """An OpenAI-style completions endpoint that takes token ids and streams server-sent events.

    It speaks just enough HTTP/1.1 for that, so that the client costs the machine no more than a gRPC client does.
    """

    def __init__(self, address: str, model: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._model = model

    async def ask(self, planned: Planned, seen: Seen) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES_MAX)
        with closing(writer):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(self._request(planned))
                await self._read(reader, seen)

    def _request(self, planned: Planned) -> bytes:
        body = json.dumps(completion_body(self._model, planned)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _read(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        status = (await reader.readline()).decode(errors="replace").split(" ", 2)
        chunked = False
        while line := (await reader.readline()).strip().lower():
            chunked = chunked or (line.startswith(b"transfer-encoding:") and line.endswith(b"chunked"))
        if len(status) < 2 or status[1] != "200":
            raise RequestFailed(f"HTTP {' '.join(status).strip()}: {(await reader.read(2000)).decode(errors='replace')}")
        rest = b""
        async with aclosing(_pieces(reader, chunked)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        _note(json.loads(line[6:]), seen)


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """A body as it comes."""
    while chunked:
        size = int(await reader.readline(), 16)
        if size == 0:
            return
        yield (await reader.readexactly(size + 2))[:-2]
    while piece := await reader.read(LINE_BYTES_MAX):
        yield piece


def completion_body(model: str, planned: Planned) -> dict[str, Any]:
    """The request as JSON. `return_token_ids`: so that each event says how many tokens it brings."""
    return {
        "model": model,
        "prompt": planned.prompt,
        "max_tokens": planned.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _note(event: dict[str, Any], seen: Seen) -> None:
    if "error" in event:
        raise RequestFailed(str(event["error"]))
    for choice in event.get("choices", ()):
        if count := len(choice.get("token_ids") or ()):
            seen.arrivals.append((time.perf_counter(), count))
