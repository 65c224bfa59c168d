"""The store on several servers: the contract of `test_store` holds with a master that Sentinels name, and on a cluster."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.contract import test_store
from tests.contract.test_store_outage import test_callers_that_leave_in_the_middle_mix_up_no_answers
from tests.redis_server import PATIENT, Clock, MakeStore, cell, clock, stores_at
from tests.redis_sets import ClusterSet, SentinelSet, cluster_set, sentinel_set

__all__ = ["cell", "clock", "test_callers_that_leave_in_the_middle_mix_up_no_answers"]

pytestmark = pytest.mark.slow

# The whole contract, with the stores that are made here.
globals().update({name: test for name, test in vars(test_store).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def shared_sentinel() -> Iterator[SentinelSet]:
    with sentinel_set() as servers:
        yield servers


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ClusterSet]:
    with cluster_set() as servers:
        yield servers


@pytest.fixture(params=["shared_sentinel", "shared_cluster"])
def servers(request: pytest.FixtureRequest) -> SentinelSet | ClusterSet:
    """Both kinds of sets, not to be harmed."""
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture
async def make_store(servers: SentinelSet | ClusterSet, cell: str, clock: Clock) -> AsyncIterator[MakeStore]:
    """Makes stores in the test's cell."""
    async with stores_at({**servers.settings(), **PATIENT}, cell, clock) as make:
        yield make
