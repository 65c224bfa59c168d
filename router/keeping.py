"""Keeping the stored records up to what this router knows, without making a request wait for the store."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.store import Store, StoreUnavailable, WriteResult

_log = logging.getLogger(__name__)

_RETRY_S = 0.1
_RETRY_MAX_S = 2.0


class Keeper:
    """Writes one request's changes in the background, in order, the latest state only; retries while the store is away.

    `heed` sees each result: it carries the truth about cancels and ownership. Whoever else writes the record holds
    `writing` meanwhile: a copy made while an answer is under way would be older than what the store holds by then.
    """

    def __init__(self, store: Store, record: RequestRecord, heed: Callable[[WriteResult], None]) -> None:
        self._store = store
        self._record = record
        self._heed = heed
        self._changed = False
        self._closing = asyncio.Event()
        self.writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def touch(self) -> None:
        """The record has changed."""
        self._changed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write(), name=f"record {self._record.request_id}")

    async def flushed(self) -> None:
        """Returns when everything is written."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Ends retrying and waits for a write in flight. What is not written is left to `Store.finish`."""
        self._closing.set()
        await self.flushed()

    async def _write(self) -> None:
        delay_s = _RETRY_S
        while self._changed and not self._closing.is_set():
            self._changed = False
            try:
                async with self.writing:
                    if self._closing.is_set():
                        return
                    result = await self._store.advance(self._record)
            except StoreUnavailable as away:
                self._changed = True
                _log.debug("record not written yet: %s", away)
                await self._pause(delay_s)
                delay_s = min(_RETRY_MAX_S, delay_s * 2)
                continue
            self._heed(result)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return


class UnwrittenEnds:
    """Ends that the store could not take: kept, at most `most`, and written when it is back."""

    def __init__(self, store: Store, most: int = 10_000) -> None:
        self._store = store
        self._most = most
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Keep a record that has ended until it is written. Beyond the bound the oldest is given up."""
        self._records[record.request_id] = record
        if len(self._records) > self._most:
            lost, _ = self._records.popitem(last=False)
            _log.error("the end of request %s was never written: over %d ends wait for the store", lost, self._most)
        self._added.set()

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of an end that waits."""
        return self._records.get(request_id)

    async def run(self) -> None:
        """Writes for ever."""
        delay_s = _RETRY_S
        while True:
            await self._added.wait()
            if await self.write():
                self._added.clear()
                delay_s = _RETRY_S
            else:
                await asyncio.sleep(delay_s)
                delay_s = min(_RETRY_MAX_S, delay_s * 2)

    async def write(self) -> bool:
        """Writes what it can; whether nothing is left."""
        while self._records:
            request_id, record = next(iter(self._records.items()))
            try:
                await self._store.finish(record)
            except StoreUnavailable:
                return False
            self._records.pop(request_id, None)
        return True


class UnansweredCreates:
    """Records of which it is not known whether the store has them: the answer to `create` was lost.

    A client that tries again takes such a record over (see `Ledger.create`). One that does not come back within `keep_s`
    has left it for good: it is ended, so that nothing is live that nobody runs.
    """

    def __init__(self, store: Store, *, keep_s: float = 60.0, most: int = 10_000) -> None:
        self._store = store
        self._keep_s = keep_s
        self._most = most
        self._due: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, request_id: str) -> None:
        """The answer about this id was lost. Beyond the bound the oldest is left to the record's own time to live."""
        self._due[request_id] = time.monotonic() + self._keep_s
        self._due.move_to_end(request_id)
        if len(self._due) > self._most:
            self._due.popitem(last=False)

    def taken_over(self, request_id: str) -> None:
        """The request runs after all."""
        self._due.pop(request_id, None)

    async def settle(self) -> None:
        """Ends what nobody came back for. Raises StoreUnavailable."""
        while self._due and next(iter(self._due.values())) <= time.monotonic():
            request_id = next(iter(self._due))
            record = await self._store.get(request_id)
            if request_id not in self._due:
                continue
            if record is not None and record.state is State.CREATED and record.router == self._store.router:
                record.advance(Event.FAIL, time.time())
                record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
                await self._store.finish(record)
            self._due.pop(request_id, None)
