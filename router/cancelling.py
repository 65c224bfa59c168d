"""Cancel: any router, any state, any number of times; and the answer when it is effective, for those who wait."""

import asyncio
import logging
from dataclasses import dataclass

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import State
from router import endings
from router.keeping import Cancel
from router.route import Route
from router.routes import Routes
from router.store import CancelOutcome, StoreUnavailable
from rpc import clocks
from rpc.status import unavailable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CancelAnswer:
    """What a cancel did. `state` is None for an id never seen; `reason` is set when the request had ended before."""

    already_ended: bool
    state: State | None
    reason: FinishReason | None = None


class Canceller:
    """Answers Cancel. `wait_s` bounds the wait for the effect."""

    def __init__(self, routes: Routes, wait_s: float) -> None:
        self._routes = routes
        self._wait_s = wait_s

    async def cancel(self, request_id: str, reason: str, *, wait: bool, tenant: str = "") -> CancelAnswer:
        """Notes the cancel where every router sees it, and ends the request when it runs here. `tenant`: only a request of that
        tenant; empty: anybody's.

        Raises StatusError: UNAVAILABLE when the store is away and the request does not run here, NOT_FOUND for somebody else's.
        """
        store, now = self._routes.cell.store, clocks.wall()
        route = self._routes.get(request_id)
        if route is not None and tenant not in ("", route.request.tenant):
            raise endings.unknown_request(request_id)
        try:
            result = await store.request_cancel(request_id, reason, now, tenant)
        except StoreUnavailable as away:
            return await self._without_store(request_id, reason, wait, tenant, away)
        if result.outcome is CancelOutcome.NOT_THEIRS:
            raise endings.unknown_request(request_id)
        route = self._routes.get(request_id)
        if result.outcome is CancelOutcome.ALREADY_ENDED and (route is None or not route.ledger.apart):
            self._routes.cell.metrics.cancels.inc(1, "ended")
            return CancelAnswer(True, result.state, result.ending.reason if result.ending else None)
        self._routes.cell.cancels.add(Cancel(request_id, reason, now, tenant))
        if result.state is None:
            self._routes.cell.metrics.cancels.inc(1, "unknown")
        if route is not None:
            self._end(route, reason, now)
        if not wait:
            return CancelAnswer(False, _state(route) if route is not None else result.state)
        if route is not None:
            return CancelAnswer(False, await self._effective(route))
        if result.state is None:
            return CancelAnswer(False, None)
        return await self._effective_elsewhere(request_id, result.state)

    async def _without_store(self, request_id: str, reason: str, wait: bool, tenant: str, away: StoreUnavailable) -> CancelAnswer:
        """The store is away: what runs here, or ended here, is known all the same."""
        ended = self._routes.cell.unwritten.get(request_id)
        if ended is not None and tenant not in ("", ended.tenant):
            raise endings.unknown_request(request_id)
        if ended is not None:
            return CancelAnswer(True, ended.state, ended.ending.reason if ended.ending else None)
        route = self._routes.get(request_id)
        if route is not None and tenant not in ("", route.request.tenant):
            raise endings.unknown_request(request_id)
        if route is None or not route.ledger.created:
            message = "the request store does not answer, and the request does not run at this router; try again"
            raise unavailable(message, "STORE_UNAVAILABLE", retry_after_s=away.retry_after_s) from None
        self._end(route, reason, clocks.wall())
        return CancelAnswer(False, await self._effective(route) if wait else _state(route))

    def _end(self, route: Route, reason: str, now: float) -> None:
        record = route.record
        if route.ledger.created and not record.ended and record.cancel_requested_at is None:
            record.cancel_requested_at, record.cancel_reason = now, reason
        route.stop.request(Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))

    async def _effective(self, route: Route) -> State | None:
        try:
            async with asyncio.timeout(self._wait_s):
                await route.ended.wait()
        except TimeoutError:
            _log.warning("cancel of %s is not effective after %g s", route.request.request_id, self._wait_s)
        return _state(route)

    async def _effective_elsewhere(self, request_id: str, state: State) -> CancelAnswer:
        try:
            record: RequestRecord | None = await self._routes.cell.store.wait_ended(request_id, self._wait_s)
        except StoreUnavailable:
            record = None
        return CancelAnswer(False, record.state if record is not None else state)


def _state(route: Route) -> State | None:
    """None while the record is being created: the store has the word."""
    return route.standing.state if route.ledger.created else None
