"""The record of one request as its router keeps it: the only place that writes it, here and in the store.

The copy here leads. Changes are written in the background; what needs the store's answer (the record itself, a ticket, the
end) is asked for and waited for.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router import endings
from router.cell import Cell
from router.keeping import Keeper
from router.stop import Stop
from router.store import (
    CreateOutcome,
    LiveRequest,
    Reservations,
    Shortage,
    StoreUnavailable,
    WriteOutcome,
    WriteResult,
)
from rpc.status import unavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: How often a ticket is asked for again after the store turned out to have lost its memory.
_FORGOTTEN_TRIES = 3


class StoreRefused(Exception):
    """The store will not have this request go on."""


class Ledger:
    """See the module. A cancel shows in the record's state as soon as it was asked for."""

    def __init__(self, cell: Cell, record: RequestRecord, stop: Stop) -> None:
        store = cell.store
        self.record = record
        self.created = False
        self.holds: Reservations | None = None
        self._store = store
        self._unwritten = cell.unwritten
        self._unanswered = cell.unanswered
        self._stop = stop
        self._keeper = Keeper(store, record, self._heed)
        self._in_store = False

    async def assert_live(self) -> None:
        """Writes a live record again, with what it holds. Raises StoreUnavailable."""
        async with self._keeper.writing:
            if self.created and not self.record.ended:
                results = await self._store.assert_live([LiveRequest(self.record, self.holds)])
                self._heed(results[self.record.request_id])

    async def create(self) -> RequestRecord | None:
        """Creates the record. A record comes back when a cancel had come first: the request has ended before it began.

        Raises StatusError when the id is taken or the store does not answer.
        """
        try:
            result = await self._store.create(self.record)
        except StoreUnavailable as away:
            self._unanswered.add(self.record.request_id)
            message = "the request store does not answer; try again"
            raise unavailable(message, "STORE_UNAVAILABLE", retry_after_s=away.retry_after_s) from None
        if result.outcome is CreateOutcome.ALREADY_CANCELLED:
            return result.record
        # A new record of this router that nobody runs is left from a create whose answer was lost.
        left_over = result.record.router == self.record.router and result.record.state is State.CREATED
        if result.outcome is CreateOutcome.CREATED or (result.outcome is CreateOutcome.EXISTING and left_over):
            self._unanswered.taken_over(self.record.request_id)
            self.created = True
            self.observe()
            return None
        raise endings.repeated(result.record, same_body=result.outcome is CreateOutcome.EXISTING)

    async def admit(self, holds: Reservations) -> Shortage | None:
        """The store's word about a ticket: None when it is given. Asked until the store answers.

        Raises Stopped when the request has to end first, StoreRefused when it can never be given.
        """
        for _ in range(_FORGOTTEN_TRIES):
            result = await self._ask(lambda: self._store.admit(self.record, holds, time.time()))
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

    async def retry(self, event: Event) -> None:
        """The next attempt, queued, here and in the store. A store that is away learns of it with a later write."""
        try:
            async with self._keeper.writing:
                self._in_store = True
                result = await self._store.retry(self.record, event, None, time.time())
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
            self.record.advance(event, time.time())
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
        if result.won or result.record is None or not result.record.ended:
            return self.record
        _log.warning("another end was written first: %s by %s", result.record.state.value, result.record.router)
        return result.record

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
            self._stop.request(result.ending or Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST))
