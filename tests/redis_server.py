"""A real Redis-compatible server for tests, one a session, and stores on it. Each test gets a cell of its own."""

import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from lifecycle.record import RequestRecord
from router.budget import Budget, Claim, Resource, Scope
from router.embedded import EmbeddedServer
from router.placement import Placement
from router.redis_link import RedisSettings
from router.redis_store import RedisStore
from router.store import Reservations

_cells = itertools.count()

MakeStore = Callable[..., RedisStore]


class Clock:
    """Monotonic seconds that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def ready_to_reap(store: RedisStore, clock: Clock) -> None:
    """The store's router holds its lease, and has for long enough to judge others."""
    await store.heartbeat()
    for _ in range(2):
        clock.now += store.settings.lease_s / 2
        await store.heartbeat()


def new_cell() -> str:
    """A cell that no other test uses."""
    return f"test-{os.getpid()}-{next(_cells)}"


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Address of a running server."""
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture
def cell() -> str:
    """The cell of this test."""
    return new_cell()


@pytest.fixture
def clock() -> Clock:
    """The clock of the stores of this test."""
    return Clock()


@asynccontextmanager
async def stores_at(where: dict[str, object], cell: str, clock: Clock) -> AsyncIterator[MakeStore]:
    """Makes stores for routers by name, all in one cell; `where` and keyword arguments are settings."""
    made: list[RedisStore] = []

    def make(router: str = "router-a", **settings: object) -> RedisStore:
        store = RedisStore(RedisSettings(**{**where, "cell": cell, **settings}), router, clock=clock)
        made.append(store)
        return store

    try:
        yield make
    finally:
        for store in made:
            await store.close()


#: For servers that nobody harms: a machine that stands still for a second is no outage, and no test waits for these.
PATIENT: dict[str, object] = {"connect_timeout_s": 10.0, "socket_timeout_s": 10.0, "operation_timeout_s": 20.0}


@pytest_asyncio.fixture
async def make_store(redis_url: str, cell: str, clock: Clock) -> AsyncIterator[MakeStore]:
    """Makes stores in the test's cell."""
    async with stores_at({"url": redis_url, **PATIENT}, cell, clock) as make:
        yield make


def new_record(request_id: str, router: str = "router-a", *, fingerprint: str = "body", at: float = 1000.5) -> RequestRecord:
    """A record as a router makes it for a new request."""
    return RequestRecord(
        request_id=request_id,
        tenant="tenant-1",
        model="model",
        model_snapshot="snapshot",
        fingerprint=fingerprint,
        priority=0,
        router=router,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        created_at=at,
    )


def pages(amount: int, limit: int, member: str = "decode-0") -> Claim:
    """A claim on a decode member's pages."""
    return Claim(Budget(Resource.PAGES, Scope.MEMBER, member), amount, limit)


def tokens(amount: int, limit: int, member: str = "prefill-0") -> Claim:
    """A claim on a prefill member's tokens."""
    return Claim(Budget(Resource.TOKENS, Scope.MEMBER, member), amount, limit)


def holds(*claims: Claim, decode: str = "decode-0", prefill: str = "prefill-0") -> Reservations:
    """Reservations with a placement."""
    return Reservations(Placement(decode, prefill), claims)
