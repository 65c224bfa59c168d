"""The requests that run at this router: one task each, found by id."""

import asyncio
import logging
from collections.abc import Iterable, Iterator

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from router import endings
from router.cell import Arrival, Cell
from router.kept_streams import Held, KeptStreams
from router.request import ValidatedRequest
from router.route import Route
from router.store import StoreUnavailable
from router.takeover import Takeover
from router.tenant_limits import OverLimit
from rpc import clocks
from rpc.status import draining

_log = logging.getLogger(__name__)


class Routes:
    """Live routes. A request's task is owned here, not by the RPC that asked for it: a client that leaves cannot tear it
    out of its clean-up."""

    def __init__(self, cell: Cell, kept: KeptStreams) -> None:
        self.cell = cell
        self._kept = kept
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

    def live(self) -> Iterator[Route]:
        """All live routes, oldest first; to be read within this turn of the event loop."""
        return iter(self._routes.values())

    def held(self, request_id: str) -> Held | None:
        """The stream of a request that runs here, or has ended here a short while ago."""
        route = self._routes.get(request_id)
        if route is not None and not route.stream.moved:
            # One that the store does not know as this router's may be another's, with more events than there are here.
            begins = route.takeover is not None or not route.ledger.created
            filling = begins and not route.stream.ended
            return Held(route.request.tenant, route.request.fingerprint, route.stream, route.record.traceparent, filling)
        return self._kept.get(request_id)

    def check(self, request: ValidatedRequest) -> bool:
        """Whether the request is new here, rather than one whose stream is held or whose end waits for the store. Raises
        StatusError when it is new and this router takes none now, or when its id is another request's."""
        known = self.held(request.request_id) or self.cell.unwritten.get(request.request_id)
        if known is not None:
            if known.fingerprint != request.fingerprint:
                raise endings.id_reused(request.request_id)
            return False
        if self.draining:
            raise draining("this router")
        if not self.cell.admission.has_members():
            raise endings.no_member()
        if request.delivery.scores_prompt and not self.cell.admission.computes_prompts():
            raise endings.scores_no_prompts()
        try:
            self.cell.tenants.check(request.tenant, request.prompt_tokens, clocks.monotonic())
        except OverLimit as over:
            raise endings.over_limit(over, request.tenant) from None
        return True

    def start(self, arrival: Arrival, takeover: Takeover | None = None) -> Route:
        """Begins a request that `check` has passed in this same turn of the event loop, or goes on with another router's."""
        request_id = arrival.request.request_id
        route = Route(self.cell, arrival, takeover)
        self._routes[request_id] = route
        self.cell.tenants.began(route.request.tenant, route.request.prompt_tokens, clocks.monotonic())
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

    def readers(self) -> int:
        """Connections that read live requests."""
        return sum(route.stream.readers for route in self._routes.values())

    def kept_streams(self) -> tuple[int, int]:
        """Streams kept after their end, and the bytes of their events."""
        return len(self._kept), self._kept.bytes

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
        """Ends what still runs, with its reason, and waits for it; what nobody reads is left to other routers."""
        self.draining = True
        try:
            await self._leave_detached()
        except StoreUnavailable as away:
            _log.warning("requests that nobody reads end here, others could not learn of them: %s", away)
        for route in list(self._routes.values()):
            route.stop.request(Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN))
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._kept.close()

    async def _leave_detached(self) -> None:
        """Leaves requests as a dead router does, with records as they are now. Raises StoreUnavailable."""
        for route in list(self._routes.values()):
            if route.detached:
                refresh(route)
                await route.ledger.assert_live()
                if route.detached:
                    route.ledger.leave()

    async def _run(self, route: Route) -> None:
        request = route.request
        try:
            await route.run()
        finally:
            self.cell.tenants.ended(request.tenant, route.progress.usage().selected_tokens, clocks.monotonic())
            if self._routes.get(request.request_id) is route:
                del self._routes[request.request_id]
            # What a router that was taken for dead knows of its request is not what others tell of it.
            if route.ledger.created and not route.stream.moved and route.standing.counted:
                held = Held(request.tenant, request.fingerprint, route.stream, route.record.traceparent)
                self._kept.add(request.request_id, held)
            if not self._routes:
                self._idle.set()


def refresh(route: Route) -> RequestRecord:
    """The record of a live request with counts and times as they are now."""
    record = route.record
    if not record.ended:
        record.usage = route.progress.usage()
        record.timings = route.progress.timings(clocks.monotonic(), route.stream.send_s)
        record.sent_bytes = route.stream.sent_text_bytes
    return record
