"""Keeping the stored records up to what this router knows, without making a request wait for the store."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router.store import Store, StoreUnavailable, WriteResult
from rpc import clocks

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: A change waits so long for others that follow it: on the way to the first token there are three within some milliseconds.
_SETTLE_S = 0.01
_RETRY_S = 0.1
_RETRY_MAX_S = 2.0

#: Ends that wait for the store, and ends that it took lately.
ENDS_MAX = 10_000
WRITTEN_ENDS_MAX = 4096
#: Cancels that were accepted lately.
CANCELS_MAX = 10_000
#: Creates whose answer was lost, and how many of them are looked at in one round.
CREATES_MAX = 10_000
_LOOKED_AT = 256
#: A request in one of these has no seat: nothing is lost by running it from the start.
SEATLESS = frozenset({State.CREATED, State.QUEUED, State.ADMITTED})


async def has_begun(store: Store, request_id: str) -> bool:
    """Whether a request of this id has, or had, a seat somewhere: who asks for it needs no room. False when the store is away."""
    try:
        record = await store.get(request_id)
    except StoreUnavailable:
        return False
    return record is not None and record.state not in SEATLESS


class Writable(Protocol):
    """As much of a store as a keeper needs."""

    async def advance(self, record: RequestRecord) -> WriteResult:
        """See `Store`."""


class Keeper:
    """Writes one request's changes in the background, in order, the latest state only; retries while the store is away.

    `heed` sees each result: it carries the truth about cancels and ownership. Whoever else writes the record holds
    `writing` meanwhile: a copy made while an answer is under way would be older than what the store holds by then.
    """

    def __init__(self, store: Writable, record: RequestRecord, heed: Callable[[WriteResult], None]) -> None:
        self._store = store
        self._record = record
        self._heed = heed
        self._changed = False
        self._closing = asyncio.Event()
        self.writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None

    def touch(self) -> None:
        """The record has changed; it is written in a moment."""
        self._changed = True
        if self._settling is None and (self._task is None or self._task.done()):
            self._settling = asyncio.get_running_loop().call_later(_SETTLE_S, self._begin)

    async def flushed(self) -> None:
        """Returns when everything is written."""
        if self._settling is not None:
            self._begin()
        await self._written()

    async def close(self) -> None:
        """Ends retrying and waits for a write in flight. What is not written is left to `Store.finish`."""
        self._closing.set()
        if self._settling is not None:
            self._settling.cancel()
        await self._written()

    def _begin(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        self._settling = None
        self._task = asyncio.create_task(self._write(), name=f"record {self._record.request_id}")

    async def _written(self) -> None:
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

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


class Recent(Generic[T]):
    """Things of the last `keep_s` seconds by id, at most `most`, the newest ones. One that is added again keeps its time."""

    def __init__(self, keep_s: float, most: int) -> None:
        self._keep_s = keep_s
        self._most = most
        self._kept: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, thing: T, now: float) -> None:
        """Keep it from `now`, a monotonic time."""
        self._prune(now)
        known = self._kept.get(request_id)
        self._kept[request_id] = (now if known is None else known[0], thing)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def get(self, request_id: str, now: float) -> T | None:
        """What is kept of that id; None when nothing is."""
        self._prune(now)
        known = self._kept.get(request_id)
        return None if known is None else known[1]

    def values(self, now: float) -> list[T]:
        """What is kept, oldest first."""
        self._prune(now)
        return [thing for _, thing in self._kept.values()]

    def _prune(self, now: float) -> None:
        while self._kept and next(iter(self._kept.values()))[0] + self._keep_s <= now:
            self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel that the store has accepted; `at` is wall time in seconds. `tenant`: whose requests alone it ends; empty: any."""

    request_id: str
    reason: str
    at: float
    tenant: str = ""


class AcceptedCancels:
    """Cancels of the last `keep_s` seconds, as long as a tombstone waits: told again to a store that may have forgotten them."""

    def __init__(self, store: Store, *, keep_s: float = 60.0, most: int = CANCELS_MAX) -> None:
        self._store = store
        self._accepted: Recent[Cancel] = Recent(keep_s, most)

    def add(self, cancel: Cancel) -> None:
        """The store has accepted it."""
        self._accepted.add(_grave(cancel.request_id, cancel.tenant), cancel, clocks.monotonic())

    def get(self, request_id: str, tenant: str) -> Cancel | None:
        """The cancel of that id of that tenant, if there was one."""
        now = clocks.monotonic()
        return self._accepted.get(request_id, now) or self._accepted.get(_grave(request_id, tenant), now)

    async def tell_again(self) -> None:
        """All of them; one that the store knows, or whose request has ended, changes nothing. Raises StoreUnavailable."""
        for cancel in self._accepted.values(clocks.monotonic()):
            await self._store.request_cancel(cancel.request_id, cancel.reason, cancel.at, cancel.tenant)


def _grave(request_id: str, tenant: str) -> str:
    """Under what a cancel is kept; neither ids nor tenants hold a control character."""
    return f"{tenant}\x1f{request_id}" if tenant else request_id


class UnwrittenEnds:
    """Ends that the store could not take: kept, at most `most`, and written when it is back.

    Those that it took in the last `keep_s` seconds, at most `most_written`, are kept too, should it turn out to have forgotten.
    """

    def __init__(self, store: Store, most: int = ENDS_MAX, *, keep_s: float = 60.0, most_written: int = WRITTEN_ENDS_MAX) -> None:
        self._store = store
        self._most = most
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._added = asyncio.Event()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._written: Recent[RequestRecord] = Recent(keep_s, most_written)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Keep a record that has ended until it is written. Beyond the bound the oldest is given up.

        Of two with one id the later attempt is kept: an earlier one may not end what the store has.
        """
        known = self._records.get(record.request_id)
        if known is None or known.attempt < record.attempt:
            self._records[record.request_id] = record
        if len(self._records) > self._most:
            lost, _ = self._records.popitem(last=False)
            _log.error("the end of request %s was never written: over %d ends wait for the store", lost, self._most)
        self._added.set()
        self._none_left.clear()

    async def none_left(self) -> None:
        """Returns when the store has taken all of them."""
        await self._none_left.wait()

    def written(self, record: RequestRecord) -> None:
        """The store has taken this end."""
        self._written.add(record.request_id, record, clocks.monotonic())

    def doubt(self) -> None:
        """The store may have forgotten what it took lately: that is written again, and changes nothing if it had not."""
        for record in self._written.values(clocks.monotonic()):
            self.add(record)

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
            if self._records.get(request_id) is record:  # a later attempt may have come meanwhile
                del self._records[request_id]
            self.written(record)
        self._none_left.set()
        return True


class UnansweredCreates:
    """Records of which it is not known whether the store has them: the answer to `create` or `begin` was lost.

    A client that tries again takes such a record over (see `Ledger.create`). One that does not come back within `keep_s`
    has left it for good: it is ended, so that nothing is live that nobody runs. What it holds is given back as soon as the
    store answers again.
    """

    def __init__(self, store: Store, *, keep_s: float = 60.0, most: int = CREATES_MAX) -> None:
        self._store = store
        self._keep_s = keep_s
        self._most = most
        self._due: OrderedDict[str, float] = OrderedDict()
        #: Those that may hold something.
        self._holding: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, request_id: str) -> None:
        """The answer about this id was lost. Beyond the bound the oldest is left to the record's own time to live."""
        self._due[request_id] = clocks.monotonic() + self._keep_s
        self._due.move_to_end(request_id)
        self._holding[request_id] = None
        if len(self._due) > self._most:
            oldest, _ = self._due.popitem(last=False)
            self._holding.pop(oldest, None)

    def may_have_left(self, record: RequestRecord) -> bool:
        """Whether a record of this router, which runs nowhere, is one of these rather than one whose end is still to be
        written."""
        return record.state is State.CREATED or (record.request_id in self._due and record.state in SEATLESS)

    def taken_over(self, request_id: str) -> None:
        """The request runs after all."""
        self._due.pop(request_id, None)
        self._holding.pop(request_id, None)

    async def settle(self) -> None:
        """Gives back what is held, and ends what nobody came back for. Raises StoreUnavailable."""
        for request_id in list(self._holding)[:_LOOKED_AT]:
            await self._give_back(request_id)
        while self._due and next(iter(self._due.values())) <= clocks.monotonic():
            request_id = next(iter(self._due))
            record = await self._store.get(request_id)
            if request_id not in self._due:
                continue
            if record is not None and record.state in SEATLESS and record.router == self._store.router:
                record.advance(Event.FAIL, clocks.wall())
                record.ending = Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
                await self._store.finish(record)
            self.taken_over(request_id)

    async def _give_back(self, request_id: str) -> None:
        """A call that is still on its way can bring the record later: it is looked for until it is due."""
        record = await self._store.get(request_id)
        if request_id not in self._due:
            return
        if record is None:
            self._holding.move_to_end(request_id)
            return
        if record.state is State.ADMITTED and record.router == self._store.router:
            record.advance(Event.REFUSED, clocks.wall())
            await self._store.advance(record)
        self._holding.pop(request_id, None)
