"""The doors that load is driven through. The same request for each; what comes back is written down the same way."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from typing import Any, Protocol

from bench.measured import Seen
from bench.workload import Planned
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect

REQUEST_TIMEOUT_S = 600.0
#: Phases that Completed.timings reports.
PHASES = (
    *("queue_s", "prefill_queue_s", "prefill_s", "handover_s", "handover_exposed_s"),
    *("decode_s", "stop_hold_s", "send_s", "first_token_s", "total_s"),
)
LINE_BYTES_MAX = 1 << 20


class RequestFailed(Exception):
    """The door refused or broke. The message says how."""


class Door(Protocol):
    """Answers requests of token ids, greedily, to the full length."""

    async def ask(self, planned: Planned, seen: Seen) -> None:
        """Send one request and write down what comes. Raises RequestFailed, OSError or the door's own errors."""


class GrpcDoor:
    """Tandem's."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def ask(self, planned: Planned, seen: Seen) -> None:
        async for event in self._stub.Generate(_grpc_request(planned), timeout=REQUEST_TIMEOUT_S):
            kind = event.WhichOneof("event")
            if kind == "delta":
                seen.arrivals.append((time.perf_counter(), len(event.delta.token_ids)))
            elif kind == "completed":
                seen.phases = {name: getattr(event.completed.timings, name) for name in PHASES}
                if event.completed.finish_reason != pb.FINISH_REASON_MAX_OUTPUT_TOKENS:
                    raise RequestFailed(f"it ended with {pb.FinishReason.Name(event.completed.finish_reason)}")
                # Random answers may end inside a character: its tokens were chosen, and are told by nothing but their number.
                if untold := event.completed.usage.selected_tokens - seen.tokens:
                    seen.arrivals.append((time.perf_counter(), untold))


def _grpc_request(planned: Planned) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=f"bench-{secrets.token_hex(8)}",
        tokens=pb.TokenPrompt(ids=planned.prompt),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopParams(ignore_eos=True),
        max_output_tokens=planned.output_tokens,
        # Answers to random tokens are not always text.
        utf8_policy=pb.UTF8_POLICY_DROP,
    )


@asynccontextmanager
async def grpc_door(address: str) -> AsyncIterator[GrpcDoor]:
    """A connection to a router."""
    async with connect(address) as stub:
        yield GrpcDoor(stub)


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
