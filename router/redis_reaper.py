"""Repair that any router can do: requests of routers that died, and reservations of requests that are gone."""

import json
from dataclasses import dataclass, field

from lifecycle.finish import Cause, Ending, FinishReason
from router import redis_codec
from router.redis_link import Keys, RedisLink
from router.store import ReapReport

#: Dead routers that one round looks at.
MAX_DEAD_ROUTERS = 64

_LOST = Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST)
_CANCELLED = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


@dataclass(slots=True)
class Reaper:
    """One round handles at most `settings.reap_batch` requests and looks at about as many reservations; the next goes on."""

    link: RedisLink
    keys: Keys
    _cursor: int = field(default=0)

    async def reap(self, at: float, *, bury: bool) -> ReapReport:
        """See `Store.reap`; without `bury` only what nobody owns is given back. Each request is checked again by the script
        that ends it, so many may reap at once."""
        dead = await self.dead_routers() if bury else []
        ended: list[str] = []
        for router in dead:
            ended.extend(await self._end_requests_of(router, at, self.link.settings.reap_batch - len(ended)))
        return ReapReport(ended=tuple(ended), released=await self._sweep(), dead_routers=tuple(dead))

    async def dead_routers(self) -> list[str]:
        """Routers whose lease has run out by the server's clock."""
        seconds, microseconds = await self.link.command("leases", "TIME")
        now_s = seconds + microseconds / 1e6
        names: list[str] = await self.link.command(
            "leases", "ZRANGEBYSCORE", self.keys.leases, "-inf", now_s, "LIMIT", 0, MAX_DEAD_ROUTERS
        )
        return names

    async def _end_requests_of(self, router: str, at: float, most: int) -> list[str]:
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
        most_steps = redis_codec.MAX_TRANSITIONS
        ended = []
        for request_id in ids:
            keys = [self.keys.record(request_id), self.keys.reserved, owned, self.keys.cancels, self.keys.leases]
            outcome = await self.link.run("reap", keys, [request_id, router, repr(at), retention_s, *endings, most_steps])
            if outcome == "ended":
                ended.append(request_id)
        return ended

    async def _forget(self, router: str) -> None:
        """Drop the lease of a dead router that owns nothing. One that is alive again has renewed it, and loses nothing."""
        await self.link.run("forget", [self.keys.leases, self.keys.owned(router)], [router])

    async def _sweep(self) -> int:
        """Look at some reservations and cancel flags, and give back those without a live request."""
        batch = self.link.settings.reap_batch
        self._cursor, found = await self.link.command("sweep", "HSCAN", self.keys.reserved, self._cursor, "COUNT", batch)
        suspects: dict[str, list[tuple[str, int]]] = {}
        for name in found:
            if name.startswith("h\x1f"):
                _, request_id, attempt, label = name.split("\x1f", 3)
                suspects.setdefault(request_id, []).append((label, int(attempt)))
        flagged: list[str] = await self.link.command("sweep", "HKEYS", self.keys.cancels)
        for request_id in flagged[:batch]:
            suspects.setdefault(request_id, [])
        released = 0
        for request_id, holds in suspects.items():
            keys = [self.keys.record(request_id), self.keys.reserved, self.keys.cancels]
            released += int(str(await self.link.run("sweep", keys, [request_id, json.dumps(holds)])))
        return released
