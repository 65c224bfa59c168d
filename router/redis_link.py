"""The connection to the Redis-compatible servers: bounded in time, one retry, errors of one kind.

The client repeats a command when an answer is late, so every script must stand being run many times; see the scripts.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from redis.asyncio.client import PubSub
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    SlotNotCoveredError,
    TimeoutError,
    TryAgainError,
)

from router.redis_address import parse_address
from router.redis_clients import make_client
from router.redis_scripts import script
from router.store import OperationStatistics, StoreStatistics, StoreUnavailable
from rpc import clocks

Answer = TypeVar("Answer")

#: A callback for metrics: operation, seconds, whether it failed. It must not raise.
Observe = Callable[[str, float, bool], None]

#: Conditions of the servers that an operator or time ends, not the caller.
_AWAY = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    MasterDownError,
    NoPermissionError,
    ClusterDownError,
    ClusterError,
    RedisClusterException,
    SlotNotCoveredError,
    MovedError,
    AskError,
    TryAgainError,
    OSError,
)
#: The same, of which the client library makes no kinds of their own: too few replicas, no disk, a script that does not end.
_AWAY_CODES = ("NOREPLICAS", "MISCONF", "BUSY")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Where the store is and its limits. Durations in seconds."""

    url: str = field(repr=False)
    """One server, Sentinels or a cluster; see `router.redis_address`."""
    cell: str = "default"
    """Name of the cell: the hash tag of every key, so that all are in one slot."""
    socket_timeout_s: float = 0.5
    connect_timeout_s: float = 0.5
    operation_timeout_s: float = 2.0
    """Most time of one call with its retry, also when no connection is free."""
    max_connections: int = 64
    lease_s: float = 5.0
    """A router that has not renewed its lease for that long is held to be dead."""
    live_ttl_s: int = 900
    """Time to live of everything about live requests; renewed by each write and by `assert_live`."""
    retention_s: int = 3600
    """How long the record of an ended request is kept."""
    tombstone_s: int = 60
    """How long a cancel waits for a request that has not come yet."""
    max_tombstones: int = 10_000
    reap_batch: int = 256
    """Requests that one round of reaping ends at most, and reservations that it looks at."""
    retry_after_s: float = 1.0
    """What StoreUnavailable tells callers to wait."""
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    """What Sentinels ask for; the user in the URL is that of the servers."""

    @property
    def settle_s(self) -> float:
        """How long a store that may have forgotten something takes no new requests: each router renews its lease twice in it."""
        return self.lease_s / 2

    def __post_init__(self) -> None:
        try:
            parse_address(self.url)
        except ValueError as bad:
            raise ValueError(f"redis url: {bad}") from None
        if not self.cell or any(character in self.cell for character in "{}\x1f"):
            raise ValueError("redis cell: must be a name of at least one character without braces")
        for name in ("live_ttl_s", "retention_s", "tombstone_s", "max_tombstones", "max_connections", "reap_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"redis {name}: must be at least 1")
        for name in ("socket_timeout_s", "connect_timeout_s", "operation_timeout_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"redis {name}: must be over 0")


class RedisLink:
    """Commands and scripts with a time limit; StoreUnavailable when the server is away, slow, full or read-only."""

    def __init__(self, settings: RedisSettings, observe: Observe | None = None) -> None:
        self.settings = settings
        self._observe = observe
        self._operations: dict[str, OperationStatistics] = {}
        self._available = True
        self._closed = False
        self._free = asyncio.Semaphore(settings.max_connections)
        login = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        self._client = make_client(
            parse_address(settings.url),
            socket_timeout_s=settings.socket_timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
            max_connections=settings.max_connections,
            sentinel_login={name: value for name, value in login.items() if value},
        )

    async def call(self, operation: str, do: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run one command within the time limit and count it. Raises StoreUnavailable, also after `close`.

        A process that stood still meanwhile finds its time over though the server may have answered: it asks once more. (A
        command that was carried out and is repeated comes to the same.)
        """
        if self._closed:
            raise StoreUnavailable(operation, "the connection was closed on this side", self.settings.retry_after_s)
        began = clocks.monotonic()
        failed = True
        try:
            try:
                answer = await self._in_time(do)
            except _AWAY:
                if clocks.monotonic() - began < self.settings.operation_timeout_s + clocks.STOOD_STILL_S:
                    raise
                answer = await self._in_time(do)
            failed = False
            self._available = True
            return answer
        except _AWAY as error:
            raise self._away(operation, error) from error
        except ResponseError as error:
            if not str(error).startswith(_AWAY_CODES):
                raise
            raise self._away(operation, error) from error
        finally:
            self._count(operation, clocks.monotonic() - began, failed)
            if self._closed:  # the library has connected again for a call that `close` broke off
                await self._client.close()

    async def _in_time(self, do: Callable[[], Awaitable[Answer]]) -> Answer:
        async with asyncio.timeout(self.settings.operation_timeout_s), self._free:
            return await heeding_cancels(lambda: self._twice_if_demoted(do))

    async def _twice_if_demoted(self, do: Callable[[], Awaitable[Answer]]) -> Answer:
        """A server that refuses writes was the master until a failover: where the name leads now another one may be."""
        try:
            return await do()
        except ReadOnlyError:
            await self._client.renew()
            return await do()

    def _away(self, operation: str, error: Exception) -> StoreUnavailable:
        self._available = False
        reason = str(error) or f"no answer within {self.settings.operation_timeout_s} s"
        return StoreUnavailable(operation, reason, self.settings.retry_after_s)

    async def command(self, operation: str, *words: str | int | float) -> Any:
        """Run one command, counted as `operation`; the answer as the client turns it into Python values."""
        return await self.call(operation, lambda: self._client.execute(*words))

    async def run(self, name: str, keys: list[str], arguments: list[str | int | float]) -> object:
        """Run a script by its hash; send its text when the server does not know it (after a restart or a failover)."""
        wanted = script(name)

        async def evaluate() -> object:
            try:
                return await self._client.execute("EVALSHA", wanted.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self._client.execute("EVAL", wanted.text, len(keys), *keys, *arguments)

        return await self.call(name, evaluate)

    @asynccontextmanager
    async def subscribed(self, name: str) -> AsyncIterator[PubSub]:
        """A connection that listens to the channel `name`, for `listen`. Raises StoreUnavailable."""
        try:
            async with self._client.pubsub(name) as channel:
                await self.call("subscribe", lambda: channel.subscribe(name))
                yield channel
        except _AWAY as error:
            raise StoreUnavailable("subscribe", str(error), self.settings.retry_after_s) from error

    async def listen(self, channel: PubSub, wait_s: float) -> str | None:
        """The next published text, None when `wait_s` passed without one. Raises StoreUnavailable when the connection broke."""
        try:
            message = await heeding_cancels(lambda: channel.get_message(ignore_subscribe_messages=True, timeout=wait_s))
        except _AWAY as error:
            raise StoreUnavailable("listen", str(error), self.settings.retry_after_s) from error
        return str(message["data"]) if message is not None and message["type"] == "message" else None

    def _count(self, operation: str, seconds: float, failed: bool) -> None:
        before = self._operations.get(operation, OperationStatistics())
        self._operations[operation] = replace(
            before,
            calls=before.calls + 1,
            errors=before.errors + failed,
            total_s=before.total_s + seconds,
            longest_s=max(before.longest_s, seconds),
        )
        if self._observe is not None:
            self._observe(operation, seconds, failed)

    def statistics(self) -> StoreStatistics:
        """Calls, errors and times by operation."""
        return StoreStatistics(operations=dict(self._operations), available=self._available)

    async def close(self) -> None:
        """Close every connection; none is made after it."""
        self._closed = True
        await self._client.close()


async def heeding_cancels(do: Callable[[], Awaitable[Answer]]) -> Answer:
    """Runs a call of the client library, and is cancelled when its task was.

    The library writes with asyncio.wait_for, which before Python 3.12 loses a cancel that comes just when the write is done:
    the caller would go on as if it had never been cancelled.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await do()
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


class Keys:
    """Names of the cell's keys; all carry the hash tag."""

    def __init__(self, cell: str) -> None:
        self.prefix = f"{{{cell}}}:"
        self.leases = f"{self.prefix}leases"
        self.addresses = f"{self.prefix}addresses"
        self.reserved = f"{self.prefix}reserved"
        self.cancels = f"{self.prefix}cancels"
        self.tombstones = f"{self.prefix}tombstones"
        self.notes = f"{self.prefix}tombstone_notes"
        self.hints = f"{self.prefix}hints:"
        self.memory = f"{self.prefix}memory"

    def record(self, request_id: str) -> str:
        """The record of a request."""
        return f"{self.prefix}request:{request_id}"

    def owned(self, router: str) -> str:
        """Ids of the live requests of a router."""
        return f"{self.prefix}owned:{router}"
