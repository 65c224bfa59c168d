"""POST /v1/completions and /v1/chat/completions: a call's requests run on the router's own way, and one answer of all of them.

Each prompt is a request of its own with the call's id (and its number, when there are several), validated, queued, recorded and
taken up again like one that came by gRPC. A client that goes away before its answer is whole cancels all of them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from router.http import chat, completion
from router.http.answers import Answer, ChunkStream, Head, Shape, WholeAnswer
from router.http.asking import Call, One
from router.http.body import read_body
from router.http.context import HttpContext, due_at, metadata_of
from router.http.errors import HttpError, from_status
from router.http.guard import REQUEST_ID, ClientGone
from router.http.host import Host
from router.http.reading import Reading
from router.http.shapes import ChatShape, CompletionShape
from router.servicer import InferenceServicer
from rpc import clocks
from rpc.status import StatusError, deadline_exceeded


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two calls. `call` makes requests of a body, the name of the model and the call's id."""

    path: str
    id_prefix: str
    call: Callable[[bytes, str, str], Call]
    shape: Callable[[Call], Shape]


KINDS = (
    Kind("/v1/completions", completion.ID_PREFIX, completion.call, CompletionShape),
    Kind("/v1/chat/completions", chat.ID_PREFIX, chat.call, ChatShape),
)


def routes(host: Host) -> Sequence[BaseRoute]:
    """The two calls that generate."""
    return [Route(kind.path, Generating(host, kind), methods=["POST"]) for kind in KINDS]


class Generating:
    """An ASGI application for one kind of call."""

    def __init__(self, host: Host, kind: Kind) -> None:
        self._host = host
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, headers = self._host, Headers(scope=scope)
        servicer, due = host.serving(), due_at(headers)
        data = await read_body(headers, receive, host.settings.receive_max_bytes, host.settings.http_read_s)
        with host.answers.one():
            call = self._kind.call(data, servicer.model.name, scope["state"][REQUEST_ID])
            running = Running(servicer, self._answer(call, scope, send), headers, due)
            await unless_gone(receive, running.run())

    def _answer(self, call: Call, scope: Scope, send: Send) -> Answer:
        head = Head(f"{self._kind.id_prefix}{scope['state'][REQUEST_ID]}", round(clocks.wall()), call.model)
        readings = [
            Reading(number * call.choices, call.choices, ranked=one.message.best_of > call.choices)
            for number, one in enumerate(call.requests)
        ]
        return Answer(call, self._kind.shape(call), head, send, readings)


class Running:
    """The requests of one call, side by side, into one answer."""

    def __init__(self, servicer: InferenceServicer, answer: Answer, headers: Headers, due: float | None) -> None:
        self._servicer = servicer
        self._answer = answer
        self._metadata = metadata_of(headers)
        self._due = due
        self._sink = ChunkStream(answer) if answer.call.stream else WholeAnswer(answer)

    async def run(self) -> None:
        """Until the answer is written. Raises HttpError when it has not begun."""
        pairs = zip(self._answer.call.requests, self._answer.readings, strict=True)
        try:
            await all_of([self._one(one, reading) for one, reading in pairs])
        except HttpError as error:
            await self._sink.fail(error)
        else:
            await self._sink.finish()

    async def _one(self, one: One, reading: Reading) -> None:
        async def write(event: bytes) -> None:
            self._answer.headers.update(context.headers)
            pieces = reading.take(event)
            if pieces:
                await self._sink.take(pieces)

        context = HttpContext(self._metadata, self._due, write)
        try:
            async with asyncio.timeout(context.time_remaining()):
                await self._servicer.generate(one.message.SerializeToString(), context)
        except StatusError as status:
            raise one.names.error(status) from status
        except TimeoutError:
            # The route's own clock ends a request a moment earlier; this is for what has not become one yet.
            words = f"request {one.message.request_id!r} was not done within X-Request-Timeout"
            raise from_status(deadline_exceeded(words, "RPC_DEADLINE")) from None


async def all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all; when one fails the others are cancelled. Raises what the first one raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _cancelled(tasks)
    for task in tasks:
        if task in done:
            task.result()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, whose call was read. Raises ClientGone, with the work cancelled, when the client goes away first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        await _cancelled([task, gone])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
