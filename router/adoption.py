"""Requests of dead routers whose decode member may still have their seat: this router takes over the record, then the seat,
and goes on with both. Without the seat the request ends here, as it would have been ended by a reaper."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey, RequestRecord
from lifecycle.states import Event, State
from router.adopted_request import adopted_deadlines, adopted_request
from router.cell import Arrival
from router.members import Members
from router.observing import observe_end
from router.request import ServedModel
from router.routes import Routes
from router.seat import SeatLost, SeatRefused, adopt_seat
from router.spans import request_attributes
from router.store import AdoptOutcome, Orphan, Reservations, StoreUnavailable
from router.takeover import Takeover
from rpc import clocks
from telemetry import names

_log = logging.getLogger(__name__)

#: First event that is asked for: all that the decode member keeps.
_FIRST_NO = 1


@dataclass(frozen=True, slots=True)
class AdoptionLimits:
    """`grace_s`: for the client of an adopted request to come back, in seconds. `most_at_once`: adoptions under way.
    `most_undecided`: those of which the store has not told whether it carried them out; with so many, no other begins."""

    grace_s: float = 10.0
    most_at_once: int = 64
    most_undecided: int = 1024


class Adopter:
    """See the module. Each adoption is a task of its own until the request is a route, which `routes` owns."""

    def __init__(self, routes: Routes, members: Members, model: ServedModel, limits: AdoptionLimits) -> None:
        self._routes = routes
        self._cell = routes.cell
        self._members = members
        self._model = model
        self._limits = limits
        self._room = asyncio.Semaphore(limits.most_at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Asked of the store and not answered: this router may be the owner in the record, and then nobody else takes it over.
        self._undecided: dict[str, Orphan] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    async def adopt_all(self, orphans: Sequence[Orphan]) -> None:
        """Takes over what can be, first what is undecided. Raises StoreUnavailable when the store went away meanwhile."""
        await self._adopt_each(tuple(self._undecided.values()))
        await self._adopt_each(orphans)

    async def _adopt_each(self, orphans: Sequence[Orphan]) -> None:
        outcomes = await asyncio.gather(*(self.adopt(one) for one in orphans), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def adopt(self, orphan: Orphan) -> None:
        """Takes one over, or ends it, unless its router lives or another one has it. Raises StoreUnavailable."""
        if self._routes.get(orphan.request_id) is not None:
            self._undecided.pop(orphan.request_id, None)
            return
        if self._routes.draining:
            return
        task = self._tasks.get(orphan.request_id)
        if task is None:
            task = asyncio.create_task(self._adopt(orphan), name=f"adopt {orphan.request_id}")
            self._tasks[orphan.request_id] = task
            task.add_done_callback(self._done)
        await asyncio.shield(task)

    async def settled(self, request_id: str) -> None:
        """Returns when no adoption of the request is under way: only then it shows whether it runs here."""
        task = self._tasks.get(request_id)
        if task is not None:
            await asyncio.wait([task])

    async def stop(self) -> None:
        """Ends what is under way; what was taken over by then has no owner once the lease is given up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks = {request_id: one for request_id, one in self._tasks.items() if one is not task}
        if not task.cancelled():
            task.exception()  # whoever waits gets it; perhaps nobody does any more

    async def _adopt(self, orphan: Orphan) -> None:
        async with self._room:
            known = orphan.request_id in self._undecided
            if not known and len(self._undecided) >= self._limits.most_undecided:
                return
            self._undecided[orphan.request_id] = orphan
            result = await self._cell.store.adopt(orphan)
            if not known or result.outcome is not AdoptOutcome.UNTIMELY:
                self._undecided.pop(orphan.request_id, None)
            if result.outcome is not AdoptOutcome.ADOPTED or result.record is None:
                return
            record = result.record
            try:
                await self._take_seat(record, result.holds)
            except (SeatLost, SeatRefused) as lost:
                _log.warning("the seat of %s is gone with its router %s: %s", record.request_id, orphan.router, lost)
                self._cell.metrics.adoptions.inc(1, "seat_gone")
                await self._bury(record)

    async def _take_seat(self, record: RequestRecord, holds: Reservations | None) -> None:
        """Raises SeatLost, SeatRefused."""
        member = self._members.find(record.decode_member, record.decode_incarnation)
        if member is None:
            raise SeatLost(f"decode member {record.decode_member!r} is not there, or was started again")
        key = AttemptKey(record.request_id, record.attempt)
        async with AsyncExitStack() as stack:
            limits = self._cell.limits.seat
            seat = await stack.enter_async_context(adopt_seat(member, key, _FIRST_NO, limits, traceparent=record.traceparent))
            adopted = await seat.adopted()
            request = adopted_request(record, adopted.opening, self._model)
            span = self._cell.tracing.start(
                names.SPAN_GENERATE,
                parent=record.traceparent,
                attributes=request_attributes(request, names.OPERATION_TEXT_COMPLETION),
                kind=SpanKind.SERVER,
            )
            deadlines = adopted_deadlines(record, adopted.opening, clocks.monotonic(), clocks.wall())
            arrival = Arrival(request, deadlines, rpc_bound=record.rpc_bound, span=span)
            takeover = Takeover(record, holds, seat, stack.pop_all(), adopted, self._limits.grace_s)
            self._routes.start(arrival, takeover)
        self._cell.metrics.adoptions.inc(1, "adopted")
        _log.info("request %s is adopted from event %d on", record.request_id, adopted.next_sequence_no)

    async def _bury(self, record: RequestRecord) -> None:
        """Ends a request that lost its router and its seat."""
        now = clocks.wall()
        if record.cancel_requested_at is None:
            record.advance(Event.FAIL, now)
            record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST)
        else:
            if record.state is not State.CANCEL_REQUESTED:
                record.advance(Event.CANCEL, now)
            record.advance(Event.RELEASED, now)
            record.ending = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
            record.cancel_observed_at = record.cancel_observed_at or now
            record.cancel_effective_at = now
        try:
            result = await self._cell.store.finish(record)
        except StoreUnavailable:
            self._cell.unwritten.add(record)
        else:
            if not result.won:
                return
        observe_end(self._cell.metrics, record)
