"""Repair that any router can do: requests of routers that died, and reservations of requests that are gone."""

import json
from dataclasses import dataclass, field
from typing import Any

from lifecycle.finish import Cause, Ending, FinishReason
from router import redis_codec
from router.redis_link import Keys, RedisLink
from router.store import Orphan, ReapReport

#: Dead routers that one round looks at.
MAX_DEAD_ROUTERS = 64

_LOST = Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST)
_CANCELLED = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


@dataclass(slots=True)
class Reaper:
    """One round handles at most `settings.reap_batch` requests and looks at about as many reservations; the next goes on."""

    link: RedisLink
    keys: Keys
    router: str
    """Who reaps: it puts its own list of live requests in order too."""
    _reserved_at: int = field(default=0)
    _cancels_at: int = field(default=0)

    async def reap(self, at: float, *, bury: bool, spare_seated: bool) -> ReapReport:
        """See `Store.reap`; without `bury` only what nobody owns is given back. Each request is checked again by the script
        that ends it, so many may reap at once."""
        dead = await self.dead_routers() if bury else []
        ended: list[str] = []
        seated: list[Orphan] = []
        for router in dead:
            left = self.link.settings.reap_batch - len(ended) - len(seated)
            for request_id, outcome in await self._end_requests_of(router, at, left, spare_seated):
                if outcome == "ended":
                    ended.append(request_id)
                elif outcome == "seated":
                    seated.append(Orphan(request_id, router))
        return ReapReport(tuple(ended), await self._sweep(), tuple(dead), tuple(seated))

    async def dead_routers(self) -> list[str]:
        """Routers whose lease has run out by the server's clock."""
        names: Any = await self.link.run("lapsed", [self.keys.leases], [MAX_DEAD_ROUTERS])
        return list(names)

    async def _end_requests_of(self, router: str, at: float, most: int, spare_seated: bool) -> list[tuple[str, str]]:
        """What became of each request that was looked at."""
        owned = self.keys.owned(router)
        if most <= 0:
            return []
        ids: list[str] = await self.link.command("owned", "SRANDMEMBER", owned, most)
        if not ids:
            await self._forget(router)
            return []
        endings: list[str | int | float] = [
            redis_codec.ending_text(_LOST),
            redis_codec.ending_text(_CANCELLED),
            redis_codec.MAX_TRANSITIONS,
        ]
        retention_s = self.link.settings.retention_s
        outcomes = []
        for request_id in ids:
            keys = [self.keys.record(request_id), self.keys.reserved, owned, self.keys.cancels, self.keys.leases]
            spare = "spare" if spare_seated else ""
            arguments = [request_id, router, repr(at), retention_s, *endings, spare]
            outcomes.append((request_id, str(await self.link.run("reap", keys, arguments))))
        return outcomes

    async def _forget(self, router: str) -> None:
        """Drop the lease of a dead router that owns nothing. One that is alive again has renewed it, and loses nothing."""
        await self.link.run("forget", [self.keys.leases, self.keys.owned(router), self.keys.addresses], [router])

    async def _sweep(self) -> int:
        """Look at some reservations, cancel flags and requests of this router, and give back those without a live request."""
        self._reserved_at, found = await self._scan(self.keys.reserved, self._reserved_at)
        suspects: dict[str, list[tuple[str, int]]] = {}
        for name in found:
            if name.startswith("h\x1f"):
                _, request_id, attempt, label = name.split("\x1f", 3)
                suspects.setdefault(request_id, []).append((label, int(attempt)))
        self._cancels_at, flagged = await self._scan(self.keys.cancels, self._cancels_at)
        owned = self.keys.owned(self.router)
        listed: list[str] = await self.link.command("sweep", "SRANDMEMBER", owned, self.link.settings.reap_batch)
        for request_id in (*flagged, *listed):
            suspects.setdefault(request_id, [])
        released = 0
        for request_id, holds in suspects.items():
            keys = [self.keys.record(request_id), self.keys.reserved, self.keys.cancels, owned]
            released += int(str(await self.link.run("sweep", keys, [request_id, json.dumps(holds), self.router])))
        return released

    async def _scan(self, key: str, cursor: int) -> tuple[int, list[str]]:
        """Some field names of a hash from the cursor on, and where to go on (0: from the beginning)."""
        cursor, found = await self.link.command("sweep", "HSCAN", key, cursor, "COUNT", self.link.settings.reap_batch)
        return int(cursor), list(found)
