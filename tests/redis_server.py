"""A real Redis-compatible server for tests, one a session, and stores on it. Each test gets a cell of its own."""

import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator

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


@pytest_asyncio.fixture
async def make_store(redis_url: str, cell: str) -> AsyncIterator[MakeStore]:
    """Makes stores for routers by name, all in the test's cell; keyword arguments are settings."""
    made: list[RedisStore] = []

    def make(router: str = "router-a", **settings: object) -> RedisStore:
        store = RedisStore(RedisSettings(**{"url": redis_url, "cell": cell, **settings}), router)
        made.append(store)
        return store

    yield make
    for store in made:
        await store.close()


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
