"""How requests come into the store on Redis: `create`, and `begin` with the first ticket."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router import redis_codec
from router.record_copies import become, placed
from router.redis_codec import copied
from router.redis_link import Keys, RedisLink
from router.store import BeginResult, CreateOutcome, CreateResult, Reservations, StoreUnavailable, WriteOutcome

_UNSETTLED = "unsettled"


class Beginnings:
    """The part of a RedisStore that makes records. `revisions` are those of all its writes.

    memory: the mark of what the server remembers, as the last heartbeat found it; empty before the first one.
    """

    def __init__(self, link: RedisLink, keys: Keys, router: str, revisions: Iterator[int]) -> None:
        self._link = link
        self._keys = keys
        self._router = router
        self._revisions = revisions
        self.memory = ""

    async def create(self, record: RequestRecord) -> CreateResult:
        """See `Store`."""
        revision = next(self._revisions)
        names, arguments = self._creation(record, record, revision)
        return _told(msgspec.json.decode(str(await self._link.run("create", names, arguments))))

    async def begin(self, record: RequestRecord, holds: Reservations, at: float) -> BeginResult:
        """See `Store`."""
        queued = copied(record)
        queued.advance(Event.ACCEPTED, at)
        granted = placed(queued, holds, at)
        revision = next(self._revisions)
        names, arguments = self._creation(record, queued, revision)
        copy = redis_codec.copy_text(granted, next(self._revisions))
        answer = await self._link.run(
            "begin", [*names, self._keys.reserved], [*arguments, copy, redis_codec.claims_text(holds.claims)]
        )
        reply = msgspec.json.decode(str(answer))
        if reply["outcome"] != CreateOutcome.CREATED.value:
            return BeginResult(_told(reply))
        told = msgspec.json.decode(reply["placed"])
        if told["outcome"] == "stale":
            raise StoreUnavailable("begin", "a repetition was overtaken by another write of this router")
        result = redis_codec.write_result(told)
        become(record, granted if result.outcome is WriteOutcome.APPLIED else queued)
        return BeginResult(CreateResult(CreateOutcome.CREATED, record), result)

    async def check_settled(self) -> None:
        """See `Store`."""
        settle_s, known = self.settling()
        arguments: list[str | int | float] = [settle_s, self._link.settings.live_ttl_s, known]
        wait_s = float(str(await self._link.run("settled", [self._keys.memory], arguments)))
        if wait_s:
            raise _unsettled("get", wait_s)

    def settling(self) -> tuple[float, str]:
        """What scripts are told that look whether the server remembers everything."""
        return self._link.settings.settle_s, self.memory

    def _creation(
        self, record: RequestRecord, as_made: RequestRecord, revision: int
    ) -> tuple[list[str], list[str | int | float]]:
        """Keys and arguments of what makes a record, in the state of `as_made`."""
        if record.state is not State.CREATED:
            raise ValueError(f"create: request {record.request_id!r} is {record.state.value}, not created")
        keys, settings = self._keys, self._link.settings
        names = [keys.record(record.request_id), keys.tombstones, keys.notes, keys.owned(self._router), keys.leases, keys.memory]
        return names, [
            redis_codec.copy_text(as_made, revision),
            uuid.uuid4().hex,
            settings.live_ttl_s,
            settings.retention_s,
            settings.lease_s,
            *self.settling(),
            redis_codec.copy_text(redis_codec.cancelled_at_once(record), revision),
        ]


def _told(reply: Mapping[str, Any]) -> CreateResult:
    if reply["outcome"] == _UNSETTLED:
        raise _unsettled("create", float(reply["wait_s"]))
    return CreateResult(CreateOutcome(reply["outcome"]), redis_codec.record_from_fields(reply["record"]))


def _unsettled(operation: str, wait_s: float) -> StoreUnavailable:
    return StoreUnavailable(operation, "it came back, and routers are telling it what it may have forgotten", wait_s)
