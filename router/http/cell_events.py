"""Views of the cell as server-sent events, for as long as their reader is there."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.json_format import MessageToDict
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.cell_servicer import Wish
from router.http.errors import from_status
from rpc.status import StatusError

#: Makes the views that a wish and a tenant's sight allow, as messages.
Watch = Callable[[Wish, str | None], AsyncGenerator[Any]]

_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class CellEvents(Response):
    """An answer that ends when its reader goes, and with an error object when the router stops."""

    def __init__(self, watch: Watch, wish: Wish, tenant: str | None) -> None:
        super().__init__()
        self._watch, self._wish, self._tenant = watch, wish, tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            # Its answer is over with the headers: a client may send its next request then.
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        telling = asyncio.create_task(self._tell(send), name="live page")
        leaving = asyncio.create_task(_left(receive), name="live page's reader")
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = telling.done()
            for task in (telling, leaving):
                task.cancel()
            await asyncio.gather(telling, leaving, return_exceptions=True)
        if over:
            telling.result()

    async def _tell(self, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._watch(self._wish, self._tenant)) as views:
                async for view in views:
                    if not begun:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        begun = True
                    await _event(send, _plain(view))
        except StatusError as ended:
            if not begun:
                raise
            await _event(send, from_status(ended).body)
        await send({"type": "http.response.body", "body": b""})


async def _event(send: Send, content: object) -> None:
    await send({"type": "http.response.body", "body": b"data: " + json.dumps(content).encode() + b"\n\n", "more_body": True})


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


async def _left(receive: Receive) -> None:
    """Returns when the reader has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
