"""The HTTP door under attack: any bytes on a connection, nearly good bodies and headers at every route, clients that leave."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import strategies as st

from router.embedded import EmbeddedServer
from tests.fuzz.messages import mutated
from tests.fuzz.services import CLOCKS
from tests.fuzz.target import RESPONSES_MAX, Attacked, Target
from tests.fuzz.texts import ANYTHING
from tests.http_world import CHAT, COMPLETIONS, http_world

#: Every route, with what its paths hold; the views have no end.
VIEWS = "/ui/api/cell"
_PATHS = (
    *(COMPLETIONS, CHAT, COMPLETIONS, CHAT, "/v1/models", "/v1/models/fake", "/health", "/health/live", "/health/ready"),
    *("/metrics", "/ui", "/ui/", "/ui/app.js", VIEWS, f"{VIEWS}?period=0.2", f"{VIEWS}?period=x&max_ended=1e400"),
    *("/ui/api/requests/r-1", "/ui/api/requests/r-1/cancel", "/ui/api/requests/%00%ff", "/", "*", "/v1/../health", "//"),
)
_METHODS = ("POST", "POST", "POST", "GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW")
_HEADERS = (
    *("content-type", "accept", "authorization", "x-request-id", "x-request-timeout", "traceparent", "tracestate"),
    *("tandem-tenant", "tandem-forwarded", "sec-fetch-site", "host", "expect", "te", "upgrade"),
)
_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "hello", "max_tokens": 4},
    {"prompt": ["a", "b"], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2, "echo": True, "stop": ["x"], "logit_bias": {"5": 1}},
    {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 4},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "hello"}]}], "stream": True, "logprobs": True},
)
_FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
    *("best_of", "stream", "stream_options", "stop", "stop_token_ids", "seed", "logit_bias", "logprobs", "top_logprobs"),
    *("echo", "presence_penalty", "repetition_penalty", "ignore_eos", "min_tokens", "priority", "user", "tools", "suffix"),
    *("response_format", "structured_outputs", "guided_choice", "guided_json"),
)
#: Texts with what UTF-8 cannot say, which JSON can.
_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
_VALUES = st.one_of(ANYTHING, _TEXT, st.lists(_TEXT, max_size=3), st.sampled_from([0, 1, 2, -1, 10**30, 1e308, [], {}, [[]]]))
#: Bytes that may stand in a header.
_HEADER = st.one_of(
    st.sampled_from([b"application/json", b"r-1", b"r-2", b"0.01", b"5", b"1e999", b"nan", b"Bearer x", b"100-continue", b"*/*"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=30).map(lambda text: text.encode("latin-1")),
)
#: Statuses of 5xx that say nothing of a broken router.
_HONEST = frozenset({501, 503, 504})
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Ask:
    """A call in the form of HTTP. `leave_after`: pieces of the answer that its client stays for."""

    method: str
    path: str
    headers: tuple[tuple[str, bytes], ...]
    body: bytes
    leave_after: int

    def raw(self) -> bytes:
        """As it stands on the wire."""
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), b"host: x", b"content-length: %d" % len(self.body)]
        lines += [name.encode() + b": " + value for name, value in self.headers]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@st.composite
def _bodies(draw: Any) -> bytes:
    made = dict(draw(st.sampled_from(_BODIES)))
    for name in draw(st.lists(st.sampled_from(_FIELDS), max_size=3)):
        made[name] = draw(_VALUES)
    for name in draw(st.lists(st.sampled_from(sorted(made)), max_size=1)):
        del made[name]
    return json.dumps(made).encode()


_JSON = _bodies()
_CONTENT = st.one_of(
    _JSON,
    _JSON,
    mutated(_JSON),
    ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.just(b"[" * 9000),
)


@st.composite
def _asks(draw: Any) -> Ask:
    generates = draw(st.booleans())
    method = "POST" if generates else draw(st.sampled_from(_METHODS))
    path = draw(st.sampled_from((COMPLETIONS, CHAT) if generates else _PATHS))
    headers = {"content-type": b"application/json"}
    for name in draw(st.lists(st.sampled_from(_HEADERS), max_size=3)):
        headers[name] = draw(_HEADER)
    leave_after = draw(st.sampled_from([0, 1, 2, RESPONSES_MAX, RESPONSES_MAX, RESPONSES_MAX]))
    return Ask(method, path, tuple(headers.items()), draw(_CONTENT), leave_after)


_CASES = st.one_of(
    _asks(), _asks(), _asks(), mutated(_asks().map(Ask.raw)), _asks().map(lambda ask: ask.raw() * 2), st.binary(max_size=100)
)


@asynccontextmanager
async def _door() -> AsyncIterator[Attacked]:
    with EmbeddedServer() as server:
        changes = {**CLOCKS, "http_read_s": 0.3, "ui": True, "trust_tenant_header": True, "receive_max_bytes": 65_536}
        async with http_world(server.url, "fuzz", **changes) as (world, http):

            async def attack(case: Ask | bytes) -> None:
                await (_raw(http, case) if isinstance(case, bytes) else _asked(http, case))

            async def at_rest() -> None:
                await world.at_rest(50.0)
                assert (await http.get("/health")).status_code == 200

            yield Attacked(attack, at_rest)


async def _asked(http: httpx.AsyncClient, ask: Ask) -> None:
    """One call as a client makes it; its answer is whole, or an error object, or a stream of events that are either."""
    pieces = 2 if ask.path.startswith(VIEWS) else ask.leave_after
    # The path as it is: the client would make it tidy.
    extensions = {"target": ask.path.encode()}
    async with http.stream(ask.method, "/", headers=ask.headers, content=ask.body, extensions=extensions) as answer:
        _check_status(answer.status_code)
        found = bytearray()
        async for piece in answer.aiter_bytes():
            found += piece
            pieces -= 1
            if pieces <= 0:
                return
    if ask.method == "HEAD":
        return
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert found.endswith(b"data: [DONE]\n\n"), bytes(found[-200:])
        for event in found.split(b"\n\n")[:-2]:
            _check_object(json.loads(event.removeprefix(b"data: ")))
    elif answer.status_code >= 400:
        error = json.loads(found)["error"]
        assert error["status"] == answer.status_code and error["code"] and len(error["message"]) <= 4096, error


def _check_object(value: dict[str, Any]) -> None:
    if "error" in value:
        _check_status(value["error"]["status"])


def _check_status(status: int) -> None:
    assert status < 500 or status in _HONEST, f"status {status}"


async def _raw(http: httpx.AsyncClient, data: bytes) -> None:
    """Any bytes on a connection, whose client leaves at the first word of an answer. The server ends the connection."""
    assert http.base_url.port is not None
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    try:
        writer.write(data)
        answer = await reader.read(65_536)
        if answer:
            writer.write_eof()
            while await reader.read(65_536):
                pass
        for status in _STATUS.findall(answer):
            _check_status(int(status))
    except ConnectionError:
        pass  # cut: that is an answer too
    finally:
        writer.transport.abort()


DOOR = Target("http door", _CASES, _door)
