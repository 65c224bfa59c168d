"""What a router does all the time: its lease, its live records, cancels noted elsewhere, requests of dead routers."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from router.adoption import Adopter
from router.keeping import UnwrittenEnds
from router.routes import Routes
from router.store import Store, StoreUnavailable
from rpc import clocks
from rpc.application import lasting

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
#: Live records are written again that often: a store that lost its memory heals by itself.
ASSERT_S = 5.0
REAP_S = 2.0
SETTLE_S = 5.0
#: Between two rounds of telling a store again what it may have forgotten. Several: calls that were under way can have been
#: answered by a server that is not the master any more, for as long as such a call may take.
REMIND_S = 2.0
REMINDERS = 3


class Upkeep:
    """Tasks that run as long as the router. A store that is away makes none of them fail; a fault of ours ends the router:
    without its lease others would take its requests for lost. `address` is where other routers reach this one."""

    def __init__(
        self,
        store: Store,
        address: str,
        routes: Routes,
        unwritten: UnwrittenEnds,
        adopter: Adopter,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._store = store
        self._address = address
        self._routes = routes
        self._unwritten = unwritten
        self._adopter = adopter
        self._crashed = crashed
        self._tasks: list[asyncio.Task[None]] = []
        self._away = False
        self._forgets = 0
        self._reminders = 0
        self.lease_at = 0.0

    async def start(self) -> None:
        """Takes the lease, if the store answers, and starts the tasks."""
        await self._try(self._heartbeat)
        work = {
            "lease": self._every(HEARTBEAT_S, self._heartbeat),
            "live records": self._every(ASSERT_S, self._routes.assert_live),
            "reaper": self._every(REAP_S, self._reap),
            "unanswered creates": self._every(SETTLE_S, self._routes.cell.unanswered.settle),
            "cancel hints": self._hints(),
            "unwritten ends": self._unwritten.run(),
            "memory of the store": self._every(REMIND_S, self._remind),
        }
        self._tasks = [lasting(asyncio.create_task(one, name=name), self._crashed) for name, one in work.items()]

    async def stop(self) -> None:
        """Ends the tasks; ends that are still unwritten get one more try, then the lease is given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not await self._unwritten.write():
            _log.error("%d ends were not written: the store is away", len(self._unwritten))
        await self._try(self._store.leave)

    @property
    def holds_lease(self) -> bool:
        """Whether the lease was renewed lately."""
        return clocks.monotonic() - self.lease_at < 5 * HEARTBEAT_S

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds * random.uniform(0.9, 1.1))
            await self._try(work)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StoreUnavailable as away:
            if not self._away:
                _log.warning("the request store is away: %s", away)
            self._away = True
        else:
            if self._away:
                _log.warning("the request store is back")
            self._away = False

    async def _heartbeat(self) -> None:
        flagged = await self._store.heartbeat(self._address)
        self.lease_at = clocks.monotonic()
        self._routes.cancel_flagged(flagged)
        forgets = self._store.statistics().forgets
        if forgets != self._forgets:
            self._forgets, self._reminders = forgets, REMINDERS
            _log.warning("the request store restarted or failed over: it is told again what it may have forgotten")
            await self._remind()  # in time for who comes back to another router: see scripts/memory.lua

    async def _remind(self) -> None:
        """Live records, late ends and late cancels once more; what the store still knows is not changed by it."""
        if self._reminders:
            await self._routes.assert_live()
            self._unwritten.doubt()
            await self._routes.cell.cancels.tell_again()
            self._reminders -= 1

    async def _reap(self) -> None:
        report = await self._store.reap(clocks.wall(), spare_seated=True)
        if report.ended or report.released:
            _log.warning("reaped %d requests of %s and %d reservations", len(report.ended), report.dead_routers, report.released)
        await self._adopter.adopt_all(report.seated)

    async def _hints(self) -> None:
        async with aclosing(self._store.cancel_hints()) as hints:
            async for request_id in hints:
                self._routes.cancel_flagged([request_id])
