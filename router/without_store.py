"""Serving while the store is away (`redis_outage = serve`): one request's view of the store, which answers in its place.

Tickets are then those of this router alone, and nobody knows whether the id was used before. When the store is back the
record is written with the next write. If another request of that id stands there by then (two routers served one id), that
one is the record; this request goes on to its end apart from it, and its client gets that end.
"""

import logging
from collections.abc import Sequence
from enum import Enum

from lifecycle.record import RequestRecord
from lifecycle.states import Event
from router.record_copies import become, placed, requeued
from router.store import (
    BeginResult,
    CreateOutcome,
    CreateResult,
    FinishResult,
    LiveRequest,
    Reservations,
    Store,
    StoreUnavailable,
    WriteOutcome,
    WriteResult,
)
from telemetry.router_metrics import RouterMetrics

_log = logging.getLogger(__name__)


class Outage(Enum):
    """What new requests get while the store is away."""

    REFUSE = "refuse"
    SERVE = "serve"


class Recorded(Enum):
    """Whether the record in the store is this request's."""

    YES = "yes"
    LATER = "later"
    """It began while the store was away."""
    NEVER = "never"
    """Another request of the same id has the record."""


#: Answers of a store in which another request has the record.
_OTHERS = (WriteOutcome.ENDED, WriteOutcome.OTHER_OWNER, WriteOutcome.OTHER_ATTEMPT)


class WithoutStore:
    """As much of `Store` as one request needs. A request that has its record is told what the store says, except that it
    need not wait for a ticket."""

    def __init__(self, store: Store, metrics: RouterMetrics) -> None:
        self.recorded = Recorded.YES
        self._store = store
        self._metrics = metrics
        self._holds: Reservations | None = None

    @property
    def apart(self) -> bool:
        """Whether another request has the record: the store is not asked any more."""
        return self.recorded is Recorded.NEVER

    async def create(self, record: RequestRecord) -> CreateResult:
        """The store's word; without one the request is taken as new."""
        try:
            if self._store.statistics().available:
                return await self._store.create(record)
            self._unrecorded(record, "the store is away")
        except StoreUnavailable as away:
            self._unrecorded(record, str(away))
        return CreateResult(CreateOutcome.CREATED, record)

    async def begin(self, record: RequestRecord, holds: Reservations, at: float) -> BeginResult:
        """The store's word; without one the request is taken as new, and this router's own ticket is enough."""
        self._holds = holds
        try:
            if self._store.statistics().available:
                return await self._store.begin(record, holds, at)
            self._unrecorded(record, "the store is away")
        except StoreUnavailable as away:
            self._unrecorded(record, str(away))
        record.advance(Event.ACCEPTED, at)
        become(record, placed(record, holds, at))
        return BeginResult(CreateResult(CreateOutcome.CREATED, record), _applied(record))

    async def admit(self, record: RequestRecord, holds: Reservations, at: float) -> WriteResult:
        """The store's word; without one this router's own ticket is enough."""
        self._holds = holds
        told = await self._asked(record, holds, at)
        if told is not None and not self.apart:
            return told
        become(record, placed(record, holds, at))
        return WriteResult(WriteOutcome.APPLIED, record.state, record.attempt, cancel=told.cancel if told is not None else None)

    async def _asked(self, record: RequestRecord, holds: Reservations, at: float) -> WriteResult | None:
        """What the store says about a ticket; None when it says nothing."""
        if self.apart or not self._store.statistics().available:
            return None
        try:
            if self.recorded is Recorded.LATER:
                made = (await self.assert_live([LiveRequest(record)]))[record.request_id]
                if self.apart:
                    return made
            return await self._store.admit(record, holds, at)
        except StoreUnavailable as away:
            _log.debug("no ticket of the store: %s", away)
            return None

    async def retry(
        self, record: RequestRecord, event: Event, holds: Reservations | None, at: float, detail: str = ""
    ) -> WriteResult:
        """The next attempt, queued. Raises StoreUnavailable as the store does, with the record changed."""
        if self.recorded is Recorded.YES:
            return await self._store.retry(record, event, holds, at, detail)
        become(record, requeued(record, event, at, detail))
        return await self.advance(record)

    async def advance(self, record: RequestRecord) -> WriteResult:
        """Writes the record, and makes it if it is not there yet. Raises StoreUnavailable."""
        if self.apart:
            return _applied(record)
        result = await self._store.advance(record)
        if self.recorded is Recorded.LATER and result.outcome is WriteOutcome.UNKNOWN:
            return (await self.assert_live([LiveRequest(record, self._holds)]))[record.request_id]
        return self._told(record, result)

    async def assert_live(self, live: Sequence[LiveRequest]) -> dict[str, WriteResult]:
        """See `Store`."""
        if self.apart:
            return {one.record.request_id: _applied(one.record) for one in live}
        results = await self._store.assert_live(live)
        return {
            one.record.request_id: self._told(one.record, results[one.record.request_id])
            for one in live
            if one.record.request_id in results
        }

    async def finish(self, record: RequestRecord) -> FinishResult:
        """Writes the end. The client of a request that began without the store gets its own end whoever has the record."""
        if self.apart:
            return FinishResult(won=True, outcome=WriteOutcome.APPLIED, record=record)
        result = await self._store.finish(record)
        if self.recorded is Recorded.LATER and not result.won:
            self._apart(record)
            return FinishResult(won=True, outcome=WriteOutcome.APPLIED, record=record)
        return result

    async def get(self, request_id: str) -> RequestRecord | None:
        """See `Store`."""
        return None if self.apart else await self._store.get(request_id)

    def _unrecorded(self, record: RequestRecord, why: str) -> None:
        _log.warning("request %s is served without idempotency: %s", record.request_id, why)
        self.recorded = Recorded.LATER
        self._metrics.unrecorded.inc(1, Recorded.LATER.value)

    def _told(self, record: RequestRecord, result: WriteResult) -> WriteResult:
        """What the store's answer says about whose the record is."""
        if self.recorded is not Recorded.LATER:
            return result
        if result.applied:
            self.recorded = Recorded.YES
        elif result.outcome in _OTHERS:
            self._apart(record)
            # A cancel of the id is meant for every live request that has it; an end long ago is not.
            cancel = result.cancel if result.outcome is not WriteOutcome.ENDED else None
            return WriteResult(WriteOutcome.APPLIED, record.state, record.attempt, cancel=cancel)
        return result

    def _apart(self, record: RequestRecord) -> None:
        _log.warning("request %s runs apart: another request of that id has the record", record.request_id)
        self.recorded = Recorded.NEVER
        self._metrics.unrecorded.inc(1, Recorded.NEVER.value)


def _applied(record: RequestRecord) -> WriteResult:
    return WriteResult(WriteOutcome.APPLIED, record.state, record.attempt)
