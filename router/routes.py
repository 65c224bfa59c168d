"""The requests that run at this router: one task each, found by id."""

import asyncio
import time
from collections.abc import Iterable

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from router import endings
from router.cell import Arrival, Cell
from router.request import ValidatedRequest
from router.route import Route
from rpc.status import draining


class Routes:
    """Live routes. A request's task is owned here, not by the RPC that asked for it: a client that leaves cannot tear it
    out of its clean-up."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.draining = False
        self._routes: dict[str, Route] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, request_id: str) -> Route | None:
        """The live route of an id."""
        return self._routes.get(request_id)

    def check(self, request: ValidatedRequest) -> None:
        """Raises StatusError when this router takes no request now, or runs this id already."""
        if self.draining:
            raise draining("this router")
        known = self._routes.get(request.request_id)
        if known is not None:
            raise endings.repeated(known.record, same_body=known.request.fingerprint == request.fingerprint)
        if not self.cell.admission.has_members():
            raise endings.no_member()

    def start(self, arrival: Arrival) -> Route:
        """Begins a request that `check` has passed in this same turn of the event loop."""
        request_id = arrival.request.request_id
        route = Route(self.cell, arrival)
        self._routes[request_id] = route
        self._idle.clear()
        task = asyncio.create_task(self._run(route), name=f"request {request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return route

    def cancel(self, request_id: str, ending: Ending) -> bool:
        """Ask a live request to end; False when it does not run here or an earlier reason stands."""
        route = self._routes.get(request_id)
        return route is not None and route.stop.request(ending)

    def cancel_flagged(self, request_ids: Iterable[str]) -> None:
        """Cancels that were noted in the store."""
        for request_id in request_ids:
            self.cancel(request_id, Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))

    async def assert_live(self) -> None:
        """Writes all live records to the store again, with counts and times as they are now. Raises StoreUnavailable."""
        for route in list(self._routes.values()):
            if not route.ended.is_set():
                refresh(route)
                await route.ledger.assert_live()

    def seats(self) -> int:
        """Open seats."""
        return sum(route.seat is not None for route in self._routes.values())

    def streams(self) -> int:
        """Client streams that have not come to their end."""
        return sum(not route.stream.ended for route in self._routes.values())

    def unsent_bytes(self) -> int:
        """Bytes that wait in the buffers of all streams."""
        return sum(route.stream.unsent_bytes for route in self._routes.values())

    def begin_drain(self) -> None:
        """Refuse new requests."""
        self.draining = True

    async def drained(self) -> None:
        """Returns when nothing runs."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends what still runs, with its reason, and waits for it."""
        self.draining = True
        for route in list(self._routes.values()):
            route.stop.request(Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN))
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, route: Route) -> None:
        try:
            await route.run()
        finally:
            del self._routes[route.request.request_id]
            if not self._routes:
                self._idle.set()


def refresh(route: Route) -> RequestRecord:
    """The record of a live request with counts and times as they are now."""
    record = route.record
    if not record.ended:
        record.usage = route.progress.usage()
        record.timings = route.progress.timings(time.monotonic(), route.stream.send_s)
        record.sent_bytes = route.stream.sent_text_bytes
    return record
