"""How the pieces of a call's requests become its answer: a stream of chunks, or one object."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import Send

from router.http.asking import Call
from router.http.errors import HttpError
from router.http.reading import Counts, Output, Piece, Reading

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would otherwise keep chunks back until it has a buffer full of them.
    "x-accel-buffering": "no",
}
_DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """What differs between completions and chat."""

    object: str
    chunk_object: str

    def chunk_choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of a chunk."""

    def whole_choice(self, output: Output) -> dict[str, Any]:
        """A choice of an answer in one piece."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of an answer has."""

    id: str
    created: int
    model: str

    def object(self, kind: str, choices: Sequence[dict[str, Any]], snapshot: str) -> dict[str, Any]:
        """A chunk or an answer."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": f"fp_{snapshot[:12]}" if snapshot else None,
        }


@dataclass(slots=True)
class Answer:
    """What both kinds of answers are made of. `readings`: one for each of the call's requests."""

    call: Call
    shape: Shape
    head: Head
    send: Send
    readings: Sequence[Reading]
    #: Headers that requests want the answer to have.
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """Tokens of all requests so far."""
        return sum((one.counts for one in self.readings), Counts())

    @property
    def snapshot(self) -> str:
        """Identity of the model that answers, once that is known."""
        return next((one.snapshot for one in self.readings if one.snapshot), "")


class ChunkStream:
    """Server-sent events, each a chunk. The answer begins with the first of them: what fails before has a status of its own."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._begun = False
        #: One event at a time, in whole: several requests may write.
        self._turn = asyncio.Lock()

    async def take(self, pieces: Sequence[Piece]) -> None:
        """Writes pieces; returns when the connection has room again."""
        async with self._turn:
            for piece in pieces:
                await self._event(self._chunk([self._answer.shape.chunk_choice(piece)], continuous=True))

    async def finish(self) -> None:
        """The counts, if they were asked for, and the end."""
        if self._answer.call.include_usage:
            chunk = self._chunk([], continuous=False)
            await self._event({**chunk, "usage": self._answer.counts.told()})
        await self._write(_DONE, more=False)

    async def fail(self, error: HttpError) -> None:
        """Tells a failure in the middle of the stream. Raises it instead when nothing was told yet."""
        if not self._begun:
            raise error
        await self._event(error.body)
        await self._write(_DONE, more=False)

    def _chunk(self, choices: Sequence[dict[str, Any]], *, continuous: bool) -> dict[str, Any]:
        answer = self._answer
        chunk = answer.head.object(answer.shape.chunk_object, choices, answer.snapshot)
        if answer.call.include_usage:
            chunk["usage"] = answer.counts.told() if continuous and answer.call.continuous_usage else None
        return chunk

    async def _event(self, value: object) -> None:
        await self._write(b"data: " + msgspec.json.encode(value) + b"\n\n", more=True)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            await start(self._answer.send, 200, {**_STREAM_HEADERS, **self._answer.headers})
        await self._answer.send({"type": "http.response.body", "body": data, "more_body": more})


class WholeAnswer:
    """One object with all choices, when all have ended."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._outputs: dict[int, Output] = {}

    async def take(self, pieces: Sequence[Piece]) -> None:
        """Keeps pieces."""
        for piece in pieces:
            self._outputs.setdefault(piece.index, Output(piece.index)).pieces.append(piece)

    async def finish(self) -> None:
        """Writes the object."""
        answer = self._answer
        choices = [answer.shape.whole_choice(self._outputs[index]) for index in sorted(self._outputs)]
        value = answer.head.object(answer.shape.object, choices, answer.snapshot)
        body = msgspec.json.encode({**value, "usage": answer.counts.told()})
        headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
        await start(answer.send, 200, headers)
        await answer.send({"type": "http.response.body", "body": body})

    async def fail(self, error: HttpError) -> None:
        """Raises it: nothing was told yet."""
        raise error


async def start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Begins an answer."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
