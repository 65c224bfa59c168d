"""The connection to the Redis-compatible server: bounded in time, one retry, errors of one kind.

The client repeats a command when an answer is late, so every script must stand being run many times; see the scripts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
    TryAgainError,
)

from router.redis_scripts import script
from router.store import OperationStatistics, StoreStatistics, StoreUnavailable

Answer = TypeVar("Answer")

#: A callback for metrics: operation, seconds, whether it failed. It must not raise.
Observe = Callable[[str, float, bool], None]

_SCHEMES = ("redis", "rediss", "unix")
#: Conditions of the server that an operator ends, not the caller.
_AWAY = (
    ConnectionError,
    TimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    MasterDownError,
    TryAgainError,
    NoPermissionError,
    OSError,
)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Where the store is and its limits. Durations in seconds."""

    url: str
    """redis://, rediss:// or unix://."""
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

    def __post_init__(self) -> None:
        scheme = urlsplit(self.url).scheme
        if scheme not in _SCHEMES:
            raise ValueError(f"redis url: scheme {scheme!r} is not one of {', '.join(_SCHEMES)}")
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
        tcp = {} if urlsplit(settings.url).scheme == "unix" else {"socket_keepalive": True}
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=settings.max_connections,
            timeout=settings.operation_timeout_s,
            decode_responses=True,
            protocol=2,
            socket_timeout=settings.socket_timeout_s,
            socket_connect_timeout=settings.connect_timeout_s,
            health_check_interval=15,
            retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.1), 1),
            **tcp,
        )
        self.client: Redis = Redis.from_pool(pool)

    async def call(self, operation: str, do: Callable[[], Awaitable[Answer]]) -> Answer:
        """Run one command within the time limit and count it. Raises StoreUnavailable."""
        began = time.monotonic()
        failed = True
        try:
            async with asyncio.timeout(self.settings.operation_timeout_s):
                answer = await do()
            failed = False
            self._available = True
            return answer
        except _AWAY as error:
            self._available = False
            limit_s = self.settings.operation_timeout_s
            reason = str(error) or f"no answer within {limit_s} s"
            raise StoreUnavailable(operation, reason, self.settings.retry_after_s) from error
        finally:
            self._count(operation, time.monotonic() - began, failed)

    async def command(self, operation: str, *words: str | int | float) -> Any:
        """Run one command, counted as `operation`; the answer as the client turns it into Python values."""
        return await self.call(operation, lambda: self.client.execute_command(*words))  # type: ignore[no-untyped-call]

    async def run(self, name: str, keys: list[str], arguments: list[str | int | float]) -> object:
        """Run a script by its hash; send its text when the server does not know it (after a restart or a failover)."""
        wanted = script(name)

        async def evaluate() -> object:
            try:
                return await self.client.evalsha(wanted.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self.client.eval(wanted.text, len(keys), *keys, *arguments)

        return await self.call(name, evaluate)

    async def listen(self, channel: PubSub, wait_s: float) -> str | None:
        """The next published text, None when `wait_s` passed without one. Raises StoreUnavailable when the connection broke."""
        try:
            message = await channel.get_message(ignore_subscribe_messages=True, timeout=wait_s)
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
        """Close every connection."""
        await self.client.aclose()
        await self.client.connection_pool.disconnect()


class Keys:
    """Names of the cell's keys; all carry the hash tag."""

    def __init__(self, cell: str) -> None:
        self.prefix = f"{{{cell}}}:"
        self.leases = f"{self.prefix}leases"
        self.reserved = f"{self.prefix}reserved"
        self.cancels = f"{self.prefix}cancels"
        self.tombstones = f"{self.prefix}tombstones"
        self.notes = f"{self.prefix}tombstone_notes"
        self.hints = f"{self.prefix}hints:"

    def record(self, request_id: str) -> str:
        """The record of a request."""
        return f"{self.prefix}request:{request_id}"

    def owned(self, router: str) -> str:
        """Ids of the live requests of a router."""
        return f"{self.prefix}owned:{router}"
