"""What tests of the HTTP door ask of a router over fakes."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.router_world import World, router_world

#: Nothing here takes long; a machine that is busy may.
TIMEOUT_S = 30.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def base_of(world: World, router: int = 0) -> str:
    """Where a router's HTTP door is."""
    frame = world.routers[router].frame
    assert frame is not None
    return frame.addresses["http_url"]


@asynccontextmanager
async def http_world(
    redis_url: str, cell: str, verify: ssl.SSLContext | bool = True, **changes: Any
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    """A cell over fakes with an HTTP door at each router, and a client of the first one. `verify`: whom that trusts."""
    async with (
        router_world(redis_url, cell, http_listen="127.0.0.1:0", **changes) as world,
        httpx.AsyncClient(base_url=base_of(world), timeout=TIMEOUT_S, verify=verify) as http,
    ):
        yield world, http


def completion(prompt: object = "hello", **changes: object) -> dict[str, object]:
    """A body of /v1/completions."""
    return {"prompt": prompt, "max_tokens": 8, **changes}


def chat(content: object = "hello", **changes: object) -> dict[str, object]:
    """A body of /v1/chat/completions."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **changes}


@dataclass
class Streamed:
    """What a stream brought."""

    status: int
    headers: httpx.Headers
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """The error in the middle of it."""
        return self.chunks[-1]["error"]

    def texts(self) -> dict[int, str]:
        """All text of each choice."""
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                found[choice["index"]] = found.get(choice["index"], "") + text
        return found

    def finish_reasons(self) -> dict[int, list[str]]:
        """Those of each choice that are not null."""
        found: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                found.setdefault(choice["index"], []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
        return found


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, object], **call: Any) -> Streamed:
    """A stream, read to its end."""
    async with http.stream("POST", path, json={**body, "stream": True}, **call) as answer:
        found = Streamed(answer.status_code, answer.headers)
        if answer.status_code != 200:
            found.chunks.append(json.loads(await answer.aread()))
            return found
        async for line in answer.aiter_lines():
            assert not (found.done and line), "something after [DONE]"
            if line == "data: [DONE]":
                found.done = True
            elif line:
                found.chunks.append(json.loads(line.removeprefix("data: ")))
                await asyncio.sleep(0)
        return found
