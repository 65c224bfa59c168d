"""Clients of a round that speak HTTP: completions and chats, as streams of server-sent events or in one piece.

They cannot take a stream up in its middle: they ask again with the same id, at the other router, and get it from the start.
"""

import asyncio
import json
import socket
from collections.abc import Mapping

import httpx

from models import Tokenizer
from router.router_peers import TENANT_KEY
from tests.chaos.cancelling import AGAIN_S, Broken, cancelled
from tests.chaos.clients import CRAWL_EVENTS, CRAWL_S, PATIENCE_S, SLOW_S, Client
from tests.chaos.http_answers import BROKEN_OFF, Answer, Call, HttpStory
from tests.chaos.plan import Door, Manner, Order

CONNECT_S = 5.0
#: What the kernel holds for a client that does not read.
NARROW = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)]
_LEAVING = (Manner.LEAVE, Manner.RETURN)


class _Left(Exception):
    """The client goes, in the middle of an answer."""


class HttpClient:
    """One client. `run` does everything that its order says; `story` is what came of it."""

    def __init__(
        self,
        order: Order,
        request_id: str,
        tokenizer: Tokenizer,
        doors: tuple[str, str],
        routers: tuple[str, str],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`doors`, `routers`: host:port of both by HTTP, and by gRPC."""
        self.order = order
        self.story = HttpStory(request_id, max(1, order.shape.choices))
        #: Set when the first call was made.
        self.asked = asyncio.Event()
        self.done = False
        self._body = order.shape.body(tokenizer, stream=order.door is Door.STREAM)
        self._doors = doors
        self._routers = routers
        self._patience_s = patience_s
        self._acted = False
        #: Chunks of all answers.
        self._seen = 0
        self._cancelling: asyncio.Task[None] | None = None

    async def run(self) -> HttpStory:
        """Until the end of the answer, or until it left, or until an error that is not to be tried again."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._run()
        except Broken as broken:
            self.story.broken = str(broken)
        except TimeoutError:
            self.story.broken = f"no end within {self._patience_s:g} s"
        finally:
            self.done = True
            self.asked.set()
            if self._cancelling is not None:
                self._cancelling.cancel()
                await asyncio.gather(self._cancelling, return_exceptions=True)
        return self.story

    async def _run(self) -> None:
        order, story = self.order, self.story
        if order.manner is Manner.TWICE and order.variant:
            await asyncio.sleep(order.delay_s)
        if order.manner is Manner.CANCEL and order.events < 0:
            self._acted = True
            await self._cancel(0.0)
        router = order.router
        while True:
            last = await self._converse(router)
            story.connections.append(last)
            if story.over or story.left:
                break
            await asyncio.sleep(last.retry_after_s or 0.0 if last.refused else AGAIN_S)
            router = 1 - router
        if self._cancelling is not None:
            await self._cancelling

    async def _converse(self, router: int) -> Call:
        """One call, from its request to the end of its answer."""
        order = self.order
        # In front of the first output, or of a whole answer, nothing tells how far it is.
        unseen = order.events <= 0 or order.door is Door.WHOLE
        leaves_after_s = None
        if unseen and not self._acted and order.manner is Manner.CANCEL:
            self._begin_cancel(order.delay_s if order.events else 0.0)
        elif unseen and not self._acted and order.manner in _LEAVING:
            leaves_after_s = order.delay_s
        self.asked.set()
        try:
            async with asyncio.timeout(leaves_after_s):
                return await self._call(router)
        except httpx.TransportError as error:
            return Call(router, BROKEN_OFF, said=repr(error))
        except (_Left, TimeoutError):
            self._acted = True
            self.story.left = order.manner is Manner.LEAVE
            return Call(router, BROKEN_OFF, left=True)

    async def _call(self, router: int) -> Call:
        order, answer = self.order, Answer(self.story.choices)
        narrow = NARROW if order.manner in (Manner.SLOW, Manner.CRAWL) else None
        transport = httpx.AsyncHTTPTransport(socket_options=narrow)
        limits = httpx.Timeout(None, connect=CONNECT_S)
        async with (
            httpx.AsyncClient(base_url=f"http://{self._doors[router]}", timeout=limits, transport=transport) as http,
            http.stream("POST", order.shape.path, json=self._body, headers=self._headers()) as response,
        ):
            if response.status_code != 200:
                return _error(router, response.headers, json.loads(await response.aread())["error"], response.status_code)
            if order.door is Door.WHOLE:
                answer.whole(json.loads(await response.aread()))
                self.story.take(answer)
                return Call(router, 200)
            await self._read(response, answer)
            if answer.error is not None:
                return _error(router, {}, answer.error, int(answer.error["status"]))
            return Call(router, 200)

    async def _read(self, response: httpx.Response, answer: Answer) -> None:
        """All of a stream. Raises _Left, Broken."""
        async for line in response.aiter_lines():
            if not line:
                continue
            if line == "data: [DONE]":
                answer.end()
            else:
                answer.chunk(json.loads(line.removeprefix("data: ")))
                self._seen += 1
            self.story.take(answer)
            self._act()
            await self._rest(answer.done)
        if not answer.done:
            raise Broken("a stream that ends in order and has no [DONE]")

    def _headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.story.request_id}
        if self.order.tenant:
            headers[TENANT_KEY] = self.order.tenant
        if self.order.limit_s:
            headers["X-Request-Timeout"] = f"{self.order.limit_s:.3f}"
        return headers

    def _act(self) -> None:
        """Leave or cancel, when it is time; once. Raises _Left."""
        if self._acted or self._seen < self.order.events:
            return
        if self.order.manner is Manner.CANCEL:
            self._begin_cancel(0.0)
        elif self.order.manner in _LEAVING:
            raise _Left

    def _begin_cancel(self, after_s: float) -> None:
        self._acted = True
        self._cancelling = asyncio.create_task(self._cancel(after_s), name=f"cancel {self.story.request_id}")

    async def _cancel(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        story, wait = self.story, self.order.variant
        story.cancels.append(await cancelled(self._routers, 1 - self.order.router, story.request_id, wait=wait))

    async def _rest(self, done: bool) -> None:
        """A slow reader's pause after an event."""
        if done:
            return
        if self.order.manner is Manner.SLOW:
            await asyncio.sleep(SLOW_S)
        elif self.order.manner is Manner.CRAWL and self._seen <= CRAWL_EVENTS:
            await asyncio.sleep(CRAWL_S)


def _error(router: int, headers: Mapping[str, str], error: dict[str, object], status: int) -> Call:
    """A call that an error ended. Raises Broken when the error is not as it should be."""
    if set(error) != {"message", "type", "param", "code", "status"} or error["status"] != status:
        raise Broken(f"{status} with {error}")
    after = headers.get("retry-after")
    return Call(router, status, str(error["code"]), str(error["message"]), None if after is None else float(after))


AnyClient = Client | HttpClient
