"""tandem.v1.CellService: the cell as it looks now, told to watchers at the pace that they ask for."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from router.cell_messages import cell_message
from router.cell_picture import MAX_LISTED
from router.cell_view import CellView
from router.cell_watch import CellWatch
from router.recent_ends import MAX_ENDED
from router.wire import parse
from rpc.status import Violation, invalid_argument
from tandem.v1 import cell_pb2 as pb

SERVICE_NAME = "tandem.v1.CellService"
#: Bounds of a watcher's period, in seconds, and what it is unless it is told.
LEAST_PERIOD_S = 0.2
LONGEST_PERIOD_S = 60.0
DEFAULT_PERIOD_S = 1.0
#: What is listed unless it is told.
DEFAULT_REQUESTS = 100
DEFAULT_ENDED = 20

#: Whose requests the caller of a context may see: a tenant's, or None for all. Raises StatusError for one that is not known.
Sight = Callable[[Any], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a watcher wants: a view each `period_s`, with at most so many requests listed."""

    period_s: float = DEFAULT_PERIOD_S
    max_requests: int = DEFAULT_REQUESTS
    max_ended: int = DEFAULT_ENDED

    def __post_init__(self) -> None:
        """Raises StatusError (INVALID_ARGUMENT) naming each field that is out of its bounds."""
        wrong = []
        if not LEAST_PERIOD_S <= self.period_s <= LONGEST_PERIOD_S:
            words = f"must be {LEAST_PERIOD_S:g} s to {LONGEST_PERIOD_S:g} s, not {self.period_s:g} s"
            wrong.append(Violation("period", words, "OUT_OF_RANGE"))
        for field, value, most in (("max_requests", self.max_requests, MAX_LISTED), ("max_ended", self.max_ended, MAX_ENDED)):
            if not 0 <= value <= most:
                wrong.append(Violation(field, f"must be 0 to {most}, not {value}", "OUT_OF_RANGE"))
        if wrong:
            raise invalid_argument(wrong)


def seen_by(view: CellView, wish: Wish, tenant: str | None) -> Any:
    """The view as a message, with as much as is wanted and may be seen."""
    return cell_message((view if tenant is None else view.of_tenant(tenant)).cut(wish.max_requests, wish.max_ended))


class CellServicer:
    """See the module."""

    def __init__(self, watch: CellWatch, sight: Sight) -> None:
        self._watch = watch
        self.sight = sight

    async def watch(self, raw: bytes, context: Any) -> None:
        """Views until the caller leaves. Raises StatusError for bad bounds, too many watchers, and at the router's end."""
        tenant = await self.sight(context)
        async with aclosing(self.watch_as(wish_of(raw), tenant)) as views:
            async for view in views:
                await context.write(pb.WatchResponse(view=view))

    async def watch_as(self, wish: Wish, tenant: str | None) -> AsyncGenerator[Any]:
        """CellView messages for one who may see a tenant's requests, or all (None), to the router's end. Raises StatusError."""
        async with aclosing(self._watch.views(wish.period_s)) as views:
            async for view in views:
                yield seen_by(view, wish, tenant)


def wish_of(raw: bytes) -> Wish:
    """What a WatchRequest asks for. Raises StatusError (INVALID_ARGUMENT) naming what is wrong."""
    request: Any = parse(pb.WatchRequest, raw)
    return Wish(
        period_s=request.period.ToNanoseconds() / 1e9 if request.HasField("period") else DEFAULT_PERIOD_S,
        max_requests=request.max_requests if request.HasField("max_requests") else DEFAULT_REQUESTS,
        max_ended=request.max_ended if request.HasField("max_ended") else DEFAULT_ENDED,
    )


def generic_handler(serving: Callable[[], CellServicer]) -> Any:
    """The service as gRPC takes it. `serving` gives the servicer at the time of a call."""

    async def watch(raw: bytes, context: Any) -> None:
        await serving().watch(raw, context)

    method = grpc.unary_stream_rpc_method_handler(watch, response_serializer=pb.WatchResponse.SerializeToString)
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Watch": method})
