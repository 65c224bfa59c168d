"""What stands around every HTTP route: nothing but an error object leaves it, and its end is counted."""

import asyncio
import logging
import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.errors import CLIENT_CLOSED, HttpError, from_status
from rpc.status import StatusError
from telemetry import logs

#: Told at the end of each call: path of the route, status, seconds.
Ended = Callable[[str, int, float], None]
#: The route of a call that none answers.
NO_ROUTE = "none"

_LOG = logging.getLogger("router.http")


class Guard:
    """An ASGI application around another one. `route_of` names the route of a path."""

    def __init__(self, app: ASGIApp, route_of: Callable[[Scope], str], ended: Ended) -> None:
        self._app = app
        self._route_of = route_of
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_at, status = time.monotonic(), CLIENT_CLOSED
        scope["app"] = self  # Starlette's router then raises what it does not find, instead of answering in plain text

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            error = await self._answered(scope, receive, sending)
            if error is not None:
                if status != CLIENT_CLOSED:
                    raise ConnectionAbortedError("the answer broke off")  # its headers are out: closing says it
                await send_error(sending, error)
        finally:
            self._ended(self._route_of(scope), status, time.monotonic() - started_at)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> HttpError | None:
        """Runs the application; the error that it ended with."""
        try:
            await self._app(scope, receive, send)
        except HttpError as error:
            return error
        except StatusError as error:
            return from_status(error)
        except HTTPException as error:
            return HttpError(error.status_code, error.detail, "NOT_FOUND" if error.status_code == 404 else "BAD_REQUEST")
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001  (top of an RPC)
            _LOG.exception("%s %s failed", scope["method"], self._route_of(scope))
            request_id = logs.current().request_id
            words = f"internal error; the log tells more under {request_id!r}" if request_id else "internal error"
            return HttpError(500, words, "INTERNAL")
        return None


async def send_error(send: Send, error: HttpError, close: bool = False) -> None:
    """Answers with an error; with `close` the connection ends with it."""
    body = error.encoded()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if close:
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
