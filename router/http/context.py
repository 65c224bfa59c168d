"""An HTTP call as the servicer sees it: with what it uses of a gRPC servicer context."""

import math
from collections.abc import Awaitable, Callable, Iterable

from starlette.datastructures import Headers

from router.http.errors import HttpError
from router.refused import TRIED_KEYS
from router.router_peers import TENANT_KEY
from rpc import clocks
from telemetry.tracing import TRACEPARENT_KEY

#: Header with a call's time limit in seconds.
REQUEST_TIMEOUT = "x-request-timeout"
#: Headers that are metadata of the call, under the same names.
METADATA_KEYS = ("authorization", TRACEPARENT_KEY, "tracestate", TENANT_KEY, *TRIED_KEYS)

Metadata = tuple[tuple[str, str], ...]


class HttpContext:
    """The context of one request. `write` takes each event; `due_at`: when the caller's time limit is over, on rpc.clocks."""

    def __init__(self, metadata: Metadata, due_at: float | None, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._metadata = metadata
        self._due_at = due_at
        self.write = write
        #: Headers that the answer has because the servicer wants so.
        self.headers: dict[str, str] = {}

    def invocation_metadata(self) -> Metadata:
        """The headers that are metadata."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds, 0 when the time is over; None when there is no limit."""
        return None if self._due_at is None else max(0.0, self._due_at - clocks.monotonic())

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Headers of the answer, which begins later."""
        self.headers.update(metadata)

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        """Headers of the answer, if it has not begun: OpenAI's clients read no trailers."""
        self.headers.update(metadata)


def metadata_of(headers: Headers) -> Metadata:
    """What of a call's headers the servicer is given."""
    return tuple((key, headers[key]) for key in METADATA_KEYS if key in headers)


def due_at(headers: Headers) -> float | None:
    """When the call's time limit is over, on rpc.clocks; None without one. Raises HttpError (400)."""
    text = headers.get(REQUEST_TIMEOUT)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        words = f"must be a number of seconds over 0; got {text[:32]!r}"
        raise HttpError(400, f"X-Request-Timeout: {words}", "OUT_OF_RANGE", "X-Request-Timeout")
    return clocks.monotonic() + seconds
