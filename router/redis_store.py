"""The request store on a Redis-compatible server. The rules are in the scripts; here are arguments and answers."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from lifecycle.record import RequestRecord
from lifecycle.states import TERMINAL, Event, State, next_state
from router import redis_codec
from router.record_copies import become, learn, placed, replaced, requeued
from router.redis_beginnings import Beginnings
from router.redis_books import read_books, read_totals
from router.redis_codec import checked_id
from router.redis_link import Keys, Observe, RedisLink, RedisSettings
from router.redis_reaper import Reaper
from router.store import (
    AdoptOutcome,
    AdoptResult,
    BeginResult,
    CancelOutcome,
    CancelResult,
    CreateResult,
    FinishResult,
    LiveRequest,
    Orphan,
    Owner,
    ReapReport,
    Reservations,
    StoreBooks,
    StoreHealth,
    StoreStatistics,
    StoreUnavailable,
    WriteOutcome,
    WriteResult,
)
from router.store_totals import StoreTotals
from rpc import clocks

#: Writes of one owner to one record can overtake each other; one that was overtaken is made again, at most that often.
OVERTAKEN_TRIES = 4
#: Longest pause between two looks of `wait_ended`, in seconds.
WAIT_PAUSE_S = 0.25
#: Longest pause before the hint channel is opened again after an outage, in seconds.
HINT_PAUSE_S = 2.0
#: How long one wait for a hint may take before the connection is looked after, in seconds.
HINT_WAIT_S = 5.0

_STALE = "stale"


class RedisStore:
    """`router.store.Store` on Redis 7.2 or Valkey. `router` is this router's name with its incarnation.

    `link` and `clock` (monotonic seconds) are for tests: of calls that are repeated, delayed or lost, and of leases.
    """

    def __init__(
        self,
        settings: RedisSettings,
        router: str,
        observe: Observe | None = None,
        link: RedisLink | None = None,
        clock: Callable[[], float] = clocks.monotonic,
    ) -> None:
        if not router or "\x1f" in router:
            raise ValueError("store: the router's name must not be empty")
        self.settings = settings
        self._router = router
        self._link = link or RedisLink(settings, observe)
        self._keys = Keys(settings.cell)
        # Rises over restarts too, should a router's name come back.
        self._revisions = itertools.count(int(clocks.wall() * 1e6))
        self._beginnings = Beginnings(self._link, self._keys, router, self._revisions)
        self._reaper = Reaper(self._link, self._keys, router)
        self._clock = clock
        self._renewed_at: float | None = None
        self._held_since = 0.0
        self._lease_lapses = 0
        self._history = ""
        self._forgets = 0
        self._unsure_since: float | None = None

    @property
    def router(self) -> str:
        """The name under which this router owns records."""
        return self._router

    @property
    def leased_since(self) -> float | None:
        """See `Store`. A gap is more than half a lease between two renewals, or since the last."""
        if self._renewed_at is None or self._missed_renewals(self._clock()):
            return None
        return self._held_since

    # Records

    async def create(self, record: RequestRecord) -> CreateResult:
        """See `Store`. Raises ValueError for a record that is not new or not this router's."""
        self._must_own(record)
        return await self._beginnings.create(record)

    async def begin(self, record: RequestRecord, holds: Reservations, at: float) -> BeginResult:
        """See `Store`. Raises ValueError for a record that is not new or not this router's."""
        self._must_own(record)
        result = await self._beginnings.begin(record, holds, at)
        if result.ticket is not None:
            learn(record, result.ticket)
        return result

    async def admit(self, record: RequestRecord, holds: Reservations, at: float) -> WriteResult:
        """See `Store`. Raises IllegalTransition when the record is not QUEUED."""
        self._must_own(record)
        next_state(record.state, Event.TICKET)
        granted = placed(record, holds, at)
        result = await self._place(record, granted, record, holds)
        if result.applied:
            become(record, granted)
        learn(record, result)
        return result

    async def retry(
        self, record: RequestRecord, event: Event, holds: Reservations | None, at: float, detail: str = ""
    ) -> WriteResult:
        """See `Store`."""
        self._must_own(record)
        short = requeued(record, event, at, detail)
        granted = replaced(record, event, holds, at, detail) if holds is not None else None
        try:
            if granted is None or holds is None:
                result = await self.advance(short)
            else:
                result = await self._place(record, granted, short, holds)
        except StoreUnavailable:
            become(record, short)
            raise
        if result.outcome is WriteOutcome.SHORT or (result.applied and granted is None):
            become(record, short)
        elif result.applied and granted is not None:
            become(record, granted)
        learn(record, result)
        return result

    async def advance(self, record: RequestRecord) -> WriteResult:
        """See `Store`. Raises ValueError for a record that has ended: that is for `finish`."""
        self._must_own(record)
        if record.ended:
            raise ValueError(f"advance: request {record.request_id!r} has ended; use finish")
        reply = await self._json(
            "advance",
            [self._keys.record(record.request_id), self._keys.reserved],
            [redis_codec.copy_text(record, next(self._revisions)), self.settings.live_ttl_s],
        )
        result = redis_codec.write_result(reply)
        learn(record, result)
        return result

    async def finish(self, record: RequestRecord) -> FinishResult:
        """See `Store`. Raises ValueError for a record that has not ended or says not how."""
        self._must_own(record)
        if not record.ended or record.ending is None:
            raise ValueError(f"finish: request {record.request_id!r} is {record.state.value} with ending {record.ending}")
        keys = self._keys
        names = [keys.record(record.request_id), keys.reserved, keys.owned(self._router), keys.cancels]
        for _ in range(OVERTAKEN_TRIES):
            copy = redis_codec.copy_text(record, next(self._revisions))
            reply = await self._json("finish", names, [copy, self.settings.retention_s])
            if reply["outcome"] != _STALE:
                break
        else:
            raise StoreUnavailable("finish", f"overtaken by {OVERTAKEN_TRIES} other writes of this router")
        outcome = WriteOutcome(reply["outcome"])
        stored = reply.get("record")
        return FinishResult(
            won=outcome is WriteOutcome.APPLIED,
            outcome=outcome,
            record=None if stored is None else redis_codec.record_from_fields(stored),
        )

    async def request_cancel(self, request_id: str, reason: str, at: float, tenant: str = "") -> CancelResult:
        """See `Store`."""
        keys, settings = self._keys, self.settings
        reply = await self._json(
            "request_cancel",
            [keys.record(checked_id(request_id)), keys.tombstones, keys.notes, keys.cancels],
            [
                *(request_id, repr(at), reason, settings.tombstone_s, settings.max_tombstones),
                *(keys.hints, settings.live_ttl_s, tenant),
            ],
        )
        return CancelResult(
            outcome=CancelOutcome(reply["outcome"]),
            state=State(reply["state"]) if reply["state"] else None,
            ending=redis_codec.ending_from_text(reply["ending"]),
            owner=reply["owner"],
        )

    async def get(self, request_id: str) -> RequestRecord | None:
        """See `Store`."""
        key = self._keys.record(checked_id(request_id))
        stored: dict[str, str] = await self._link.command("get", "HGETALL", key)
        return redis_codec.record_from_fields(stored) if stored else None

    async def wait_ended(self, request_id: str, timeout_s: float) -> RequestRecord | None:
        """See `Store`. Looks rather than listens: a published message can be lost, so looking is needed anyway."""
        until = clocks.monotonic() + timeout_s
        pause_s = 0.01
        while True:
            record = await self.get(request_id)
            left_s = until - clocks.monotonic()
            if record is None or record.state in TERMINAL or left_s <= 0:
                return record
            await asyncio.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 2, WAIT_PAUSE_S)

    # Leases and repair

    async def assert_live(self, live: Sequence[LiveRequest]) -> dict[str, WriteResult]:
        """See `Store`. Records that end meanwhile are left alone. One call each, so that a slow server is noticed early."""
        results: dict[str, WriteResult] = {}
        keys = self._keys
        for request in live:
            record = request.record
            self._must_own(record)
            if record.ended:
                continue
            claims = request.holds.claims if request.holds is not None else ()
            reply = await self._json(
                "assert_live",
                [keys.record(record.request_id), keys.reserved, keys.owned(self._router), keys.cancels, keys.leases],
                [
                    redis_codec.copy_text(record, next(self._revisions)),
                    redis_codec.claims_text(claims, tokens=redis_codec.phase(record) == "everything"),
                    self.settings.live_ttl_s,
                    self.settings.lease_s,
                ],
            )
            result = redis_codec.write_result(reply)
            learn(record, result)
            results[record.request_id] = result
        return results

    async def heartbeat(self, address: str = "") -> frozenset[str]:
        """See `Store`."""
        keys = self._keys
        began = self._clock()
        reply: Any = await self._link.run(
            "heartbeat",
            [keys.leases, keys.cancels, keys.owned(self._router), keys.addresses, keys.memory],
            [self._router, self.settings.lease_s, self.settings.live_ttl_s, address, *self._beginnings.settling()],
        )
        was, flagged, history, self._beginnings.memory = reply
        moved = history not in ("", self._history) and self._history != ""
        forgot = moved or (was == "new" and self._renewed_at is not None)
        self._forgets += forgot
        self._history = history or self._history
        missed = self._missed_renewals(began)
        if forgot or missed:
            self._unsure_since = self._clock()
        if self._renewed_at is None or missed or was != "held":
            self._held_since = self._clock()
            self._lease_lapses += was == "lapsed"
        self._renewed_at = began
        return frozenset(flagged)

    async def check_settled(self) -> None:
        """See `Store`."""
        await self._beginnings.check_settled()

    async def owner(self, router: str) -> Owner:
        """See `Store`."""
        reply: Any = await self._link.run("owner", [self._keys.leases, self._keys.addresses], [router, self._router])
        alive, address, known_here = reply
        now = self._clock()
        lately = self._unsure_since is not None and now - self._unsure_since < self.settings.lease_s
        lost = self._renewed_at is not None and not known_here
        unsure = not alive and (lately or lost or self._missed_renewals(now))
        return Owner(alive=bool(alive), address=str(address), unsure=unsure)

    def _missed_renewals(self, now: float) -> bool:
        """Whether this router's lease was renewed so long ago that the store may have been away for everybody."""
        return self._renewed_at is not None and now - self._renewed_at > self.settings.lease_s / 2

    async def leave(self) -> None:
        """See `Store`. The lease stays, as one that ran out long ago, until nothing is owned under it."""
        await self._link.command("leave", "ZADD", self._keys.leases, "XX", 0, self._router)

    async def adopt(self, orphan: Orphan, *, seatless: bool = False) -> AdoptResult:
        """See `Store`."""
        if not self._may_bury():
            return AdoptResult(AdoptOutcome.UNTIMELY)
        keys, request_id, router = self._keys, checked_id(orphan.request_id), orphan.router
        reply = await self._json(
            "adopt",
            [
                *(keys.record(request_id), keys.reserved, keys.owned(router), keys.owned(self._router)),
                *(keys.cancels, keys.leases),
            ],
            [request_id, router, self._router, self.settings.live_ttl_s, "seatless" if seatless else ""],
        )
        outcome = AdoptOutcome(reply["outcome"])
        if outcome is not AdoptOutcome.ADOPTED:
            return AdoptResult(outcome)
        record = redis_codec.record_from_fields(reply["record"])
        return AdoptResult(outcome, record, redis_codec.holds_of(record, msgspec.json.decode(reply["holds"])))

    async def reap(self, at: float, *, spare_seated: bool = False) -> ReapReport:
        """See `Store`."""
        return await self._reaper.reap(at, bury=self._may_bury(), spare_seated=spare_seated)

    def _may_bury(self) -> bool:
        """Whether this router may end requests of others whose lease ran out.

        While the store was away nobody could renew, and the first one back must not end everybody else's requests. So a
        router has to have held its own lease for a whole lease's time (by then the others are back too) without a gap (so that no
        outage was there, nor has begun since, that could have kept the others from renewing).
        """
        since = self.leased_since
        return since is not None and self._clock() - since >= self.settings.lease_s

    async def books(self) -> StoreBooks:
        """See `Store`."""
        return await read_books(self._link, self._keys)

    async def totals(self, labels: Sequence[str]) -> StoreTotals:
        """See `Store`."""
        return await read_totals(self._link, self._keys, labels)

    async def cancel_hints(self) -> AsyncGenerator[str, None]:
        """See `Store`."""
        pause_s = 0.0
        while True:
            try:
                async with aclosing(self._listen()) as hints:
                    async for request_id in hints:
                        pause_s = 0.0
                        yield request_id
            except StoreUnavailable:
                pause_s = min(HINT_PAUSE_S, 2 * pause_s + 0.05)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _listen(self) -> AsyncGenerator[str, None]:
        """Hints of one connection, until it breaks (StoreUnavailable)."""
        async with self._link.subscribed(self._keys.hints + self._router) as channel:
            while True:
                message = await self._link.listen(channel, HINT_WAIT_S)
                if message is not None:
                    yield message

    async def health(self) -> StoreHealth:
        """See `Store`."""
        began = clocks.monotonic()
        try:
            info: Mapping[str, Any] = await self._link.command("health", "INFO", "server")
        except StoreUnavailable as error:
            return StoreHealth(ok=False, latency_s=clocks.monotonic() - began, error=str(error))
        name = f"{info.get('server_name', 'redis')} {info.get('valkey_version', info.get('redis_version', ''))}"
        return StoreHealth(ok=True, latency_s=clocks.monotonic() - began, server=name)

    def statistics(self) -> StoreStatistics:
        """See `Store`."""
        return replace(self._link.statistics(), lease_lapses=self._lease_lapses, forgets=self._forgets)

    async def close(self) -> None:
        """See `Store`."""
        await self._link.close()

    async def _place(
        self, record: RequestRecord, granted: RequestRecord, short: RequestRecord, holds: Reservations
    ) -> WriteResult:
        keys = [self._keys.record(record.request_id), self._keys.reserved]
        claims = redis_codec.claims_text(holds.claims)
        for _ in range(OVERTAKEN_TRIES):
            revision = next(self._revisions)
            copies = [redis_codec.copy_text(copy, revision) for copy in (granted, short)]
            reply = await self._json("admit", keys, [*copies, claims, self.settings.live_ttl_s])
            if reply["outcome"] != _STALE:
                return redis_codec.write_result(reply)
        raise StoreUnavailable("admit", f"overtaken by {OVERTAKEN_TRIES} other writes of this router")

    async def _json(self, name: str, keys: list[str], arguments: list[str | int | float]) -> dict[str, Any]:
        reply = await self._link.run(name, keys, arguments)
        answer: dict[str, Any] = msgspec.json.decode(str(reply))
        return answer

    def _must_own(self, record: RequestRecord) -> None:
        checked_id(record.request_id)
        if record.router != self._router:
            raise ValueError(f"request {record.request_id!r} is owned by {record.router!r}, this store is {self._router!r}")
