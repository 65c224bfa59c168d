"""The record of one request as its router keeps it: the only place that writes it, here and in the store.

The copy here leads. Changes are written in the background; what needs the store's answer (the record itself, a ticket, the
end) is asked for and waited for.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router import endings
from router.budget import Shortage
from router.cell import Cell
from router.keeping import SEATLESS, Keeper, has_begun
from router.stop import Stop, Stopped
from router.store import (
    CreateOutcome,
    CreateResult,
    LiveRequest,
    Orphan,
    Reservations,
    StoreUnavailable,
    WriteOutcome,
    WriteResult,
)
from router.without_store import Outage, Recorded, WithoutStore
from rpc import clocks

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: How often a ticket is asked for again after the store turned out to have lost its memory.
_FORGOTTEN_TRIES = 3


class KnownRequest(Exception):
    """The id is that of a request which runs elsewhere, or has ended: it is not to be run again."""


class EndedBefore(Exception):
    """A cancel had come first: the request has ended before it began, as `record` says."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record.request_id)
        self.record = record


class StoreRefused(Exception):
    """The store will not have this request go on."""


class Ledger:
    """See the module. A cancel shows in the record's state as soon as it was asked for."""

    def __init__(self, cell: Cell, record: RequestRecord, stop: Stop) -> None:
        store = cell.store if cell.outage is Outage.REFUSE else WithoutStore(cell.store, cell.metrics)
        self.record = record
        self.created = False
        #: Whether another router has taken the request over: it has no end here.
        self.disowned = False
        #: Whether that one went on from what was sent here, rather than begun anew.
        self.goes_on = True
        self.holds: Reservations | None = None
        self._store = store
        self._cell = cell
        self._unwritten = cell.unwritten
        self._unanswered = cell.unanswered
        self._stop = stop
        self._keeper = Keeper(store, record, self._heed)
        self._in_store = False
        self._idempotent = True

    @property
    def idempotent(self) -> bool:
        """Whether the record was made before the request began: a second request of its id meets it."""
        return self._idempotent

    @property
    def apart(self) -> bool:
        """Whether another request of the same id has the record in the store; see `router.without_store`."""
        return isinstance(self._store, WithoutStore) and self._store.apart

    async def assert_live(self) -> None:
        """Writes a live record again, with what it holds. Raises StoreUnavailable."""
        async with self._keeper.writing:
            if self.created and not self.record.ended:
                results = await self._store.assert_live([LiveRequest(self.record, self.holds)])
                self._heed(results[self.record.request_id])

    async def unless_begun(self) -> None:
        """There is no room for it here. Raises KnownRequest when it has begun, and so needs none."""
        if await has_begun(self._cell.store, self.record.request_id):
            raise KnownRequest(self.record.request_id)

    async def create(self) -> None:
        """Creates the record, queued.

        Raises StatusError when the id is that of another request or the store does not answer, KnownRequest when it is this
        very request and has a router already, EndedBefore after a cancel, and Stopped.
        """
        await self._taken_in(await self._answered(self._store.create(self.record)))
        self._accept()

    async def begin(self, holds: Reservations) -> Shortage | None:
        """Creates the record with its first ticket: None when it is given. Raises what `create` and `admit` raise."""
        result = await self._answered(self._store.begin(self.record, holds, clocks.wall()))
        ticket = result.ticket
        if ticket is not None and ticket.applied:
            self.holds = holds
        await self._taken_in(result.created)
        if ticket is not None:
            self._heed(ticket)
        self._accept()
        if ticket is None or (not ticket.applied and ticket.shortage is None):
            return await self.admit(holds)
        return ticket.shortage

    def _accept(self) -> None:
        self._stop.check()
        if self.record.state is State.CREATED:
            self.advance(Event.ACCEPTED)

    async def _answered(self, made: Awaitable[T]) -> T:
        """The store's answer about a new record. Raises StatusError."""
        try:
            return await made
        except StoreUnavailable as away:
            self._unanswered.add(self.record.request_id)
            raise endings.store_away(away.retry_after_s) from None

    async def _taken_in(self, result: CreateResult) -> None:
        """Goes by what became of a new record. Raises as `create` does."""
        if result.outcome is CreateOutcome.ALREADY_CANCELLED:
            raise EndedBefore(result.record)
        left_over = result.record.router == self.record.router and self._unanswered.may_have_left(result.record)
        if result.outcome is CreateOutcome.CREATED or (result.outcome is CreateOutcome.EXISTING and left_over):
            self._unanswered.taken_over(self.record.request_id)
            self.created = True
            self._idempotent = not isinstance(self._store, WithoutStore) or self._store.recorded is Recorded.YES
            self.observe()
            if not self._idempotent:
                self._heed_own()
            return
        if result.outcome is CreateOutcome.CONFLICT:
            raise endings.id_reused(self.record.request_id)
        if not await self._begins_anew(result.record):
            raise KnownRequest(self.record.request_id)

    async def _begins_anew(self, known: RequestRecord) -> bool:
        """Takes over this very request from a dead router that had not got a seat for it: it is to be run from the start."""
        if known.state not in SEATLESS or known.router == self.record.router:
            return False
        try:
            result = await self._cell.store.adopt(Orphan(known.request_id, known.router), seatless=True)
        except StoreUnavailable as away:
            self._unanswered.add(known.request_id)  # it may be this router's now
            raise endings.store_away(away.retry_after_s) from None
        left = result.record
        if left is None:
            return False
        record = self.record
        record.state, record.transitions, record.attempt = left.state, left.transitions, left.attempt
        record.created_at, record.traceparent = left.created_at, left.traceparent
        record.cancel_requested_at, record.cancel_reason = left.cancel_requested_at, left.cancel_reason
        self._cell.metrics.adoptions.inc(1, "begun_anew")
        self.taken_over(None)
        if record.state is State.ADMITTED:
            await self.retry(Event.REFUSED, Cause.ROUTER_LOST.value)
        return True

    def _heed_own(self) -> None:
        """A cancel that this router has accepted holds, though the store can not be asked for its tombstone.

        It came before the request, and so before a clock that ran out while the store was asked: as with a tombstone, the
        request ends cancelled. Raises Stopped.
        """
        cancel = self._cell.cancels.get(self.record.request_id, self.record.tenant)
        if cancel is not None:
            self.record.cancel_requested_at, self.record.cancel_reason = cancel.at, cancel.reason
            cancelled = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)
            self._stop.request(cancelled)
            raise Stopped(cancelled)

    def taken_over(self, holds: Reservations | None) -> None:
        """The record is in the store, as this router's, and its attempt holds that."""
        self.created, self.holds = True, holds
        if self.record.cancel_requested_at is not None:
            self._stop.request(Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))
        elif self.record.state is State.CANCEL_REQUESTED:  # nobody asked for it: its router had seen its client leave
            self._stop.request(Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE))
        self._keeper.touch()

    async def admit(self, holds: Reservations) -> Shortage | None:
        """The store's word about a ticket: None when it is given. Asked until the store answers.

        Raises Stopped when the request has to end first, StoreRefused when it can never be given.
        """
        for _ in range(_FORGOTTEN_TRIES):
            result = await self._ask(lambda: self._store.admit(self.record, holds, clocks.wall()))
            if result.applied:
                self.holds = holds
                self._stop.check()
                return None
            if result.outcome is WriteOutcome.SHORT and result.shortage is not None:
                return result.shortage
            self._stop.check()
            if result.outcome is not WriteOutcome.UNKNOWN:
                break
            await self._ask(self._write_live)
        raise StoreRefused(f"the store refuses a ticket: {result.outcome.value}")

    async def retry(self, event: Event, detail: str = "") -> None:
        """The next attempt, queued, here and in the store; `detail` is the label of what was lost. A store that is away
        learns of it with a later write. Raises Stopped when the request has to end first.
        """
        try:
            async with self._keeper.writing:
                self._in_store = True
                self._stop.check()  # a cancel shows in the state while another write is waited for
                result = await self._retry(event, detail)
            self._heed(result)
        except StoreUnavailable as away:
            _log.warning("attempt %d is not written yet: %s", self.record.attempt, away)
            self._keeper.touch()
        finally:
            self._in_store = False
        self.holds = None
        self.observe()

    def advance(self, event: Event) -> None:
        """Follow an edge and have it written. After a cancel was seen only its end is left, see `end`."""
        if self.record.state is not State.CANCEL_REQUESTED and not self.record.ended:
            self.record.advance(event, clocks.wall())
            self._keeper.touch()

    def observe(self) -> None:
        """Lets a cancel that was asked for show in the state, unless the store is writing to the record right now."""
        ending = self._stop.ending
        if ending is not None and ending.reason is FinishReason.CANCELLED and self.created and not self._in_store:
            self.advance(Event.CANCEL)

    async def close(self) -> None:
        """No more writes in the background: the end comes."""
        await self._keeper.close()

    async def learn_cancel(self) -> None:
        """When and why the cancel was asked for, when it was noted elsewhere and no write has brought it yet."""
        if self.record.cancel_requested_at is not None:
            return
        try:
            stored = await self._store.get(self.record.request_id)
        except StoreUnavailable:
            return
        if stored is not None:
            self.record.cancel_requested_at, self.record.cancel_reason = stored.cancel_requested_at, stored.cancel_reason

    async def finish(self) -> RequestRecord:
        """Writes the end of the record, which has ended. Returns the record that stands: of whoever was first.

        A store that is away gets it later.
        """
        try:
            result = await self._store.finish(self.record)
        except StoreUnavailable as away:
            _log.warning("the end is written later: %s", away)
            self._unwritten.add(self.record)
            return self.record
        if result.outcome is WriteOutcome.OTHER_OWNER and result.record is not None:
            self._give_up(result.record.attempt)
        if result.won or result.record is None or not result.record.ended:
            if result.won and not self.apart:
                self._unwritten.written(self.record)
            return self.record
        if result.record.router != self.record.router:  # it has the events that are still to be told, too
            self._give_up(result.record.attempt)
        _log.warning("another end was written first: %s by %s", result.record.state.value, result.record.router)
        return result.record

    async def _retry(self, event: Event, detail: str) -> WriteResult:
        """Asks again when the store has lost its memory. Raises StoreUnavailable; the record has its next attempt then too."""
        for _ in range(_FORGOTTEN_TRIES):
            result = await self._store.retry(self.record, event, None, clocks.wall(), detail)
            if result.outcome is not WriteOutcome.UNKNOWN:
                return result
            with contextlib.suppress(StoreUnavailable):
                await self._write_live()
        self._stop.request(Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST))
        return result

    async def seat_taken(self) -> None:
        """The decode member gave the seat to another router's call. The store knows whether the request is that one's too: a
        router that had it for a moment and stood still can come for the seat after it has lost the record."""
        try:
            stored = await self._store.get(self.record.request_id)
        except StoreUnavailable:
            stored = None
        if stored is None or stored.ended or stored.router != self.record.router:
            self._give_up(self.record.attempt)

    def leave(self) -> None:
        """This router stops: another one takes the request over when the lease has been given up."""
        self._give_up(self.record.attempt)

    def _give_up(self, attempt: int) -> None:
        """Another router has the request, or will, at `attempt`: a later one than this router's was not begun here."""
        self.disowned, self.goes_on = True, attempt <= self.record.attempt
        self._stop.request(Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST))

    async def _write_live(self) -> WriteResult:
        """The store lost its memory: the record is written anew."""
        results = await self._store.assert_live([LiveRequest(self.record)])
        return results[self.record.request_id]

    async def _ask(self, operation: Callable[[], Awaitable[WriteResult]]) -> WriteResult:
        """Calls the store until it answers. Raises Stopped."""
        while True:
            self._stop.check()
            try:
                async with self._keeper.writing:
                    self._in_store = True
                    self._stop.check()
                    result = await operation()
            except StoreUnavailable as away:
                _log.debug("waiting for the request store: %s", away)
                wait_s = away.retry_after_s
            else:
                self._heed(result)
                return result
            finally:
                self._in_store = False
                self.observe()
            await self._stop.sleep(wait_s)

    def _heed(self, result: WriteResult) -> None:
        """A write's answer tells of cancels, and of an end that somebody else has written."""
        if result.cancel_requested:
            self._stop.request(Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))
        elif result.outcome in (WriteOutcome.ENDED, WriteOutcome.OTHER_OWNER):
            if result.outcome is WriteOutcome.OTHER_OWNER:
                self._give_up(result.attempt)
                return
            self._stop.request(result.ending or Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST))
