"""The client library behind one small port: one server, the master that Sentinels name, or a cluster.

The library repeats a command when an answer is late, so every script must stand being run many times; see the scripts.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import SlotNotCoveredError

from router.redis_address import StoreAddress, StoreKind

#: Connections beyond those of calls: the one that listens, and one of a call that is being given up.
_SPARE_CONNECTIONS = 8
#: Idle connections are asked whether they live after so many seconds.
_HEALTH_CHECK_S = 15


class RedisClient(Protocol):
    """What the link needs. Errors are those of the client library."""

    async def execute(self, *words: Any) -> Any:
        """One command. Its keys, if it has any, are of one cell."""

    def pubsub(self, key: str) -> AbstractAsyncContextManager[PubSub]:
        """A connection for listening, to a server that has the key's slot."""

    async def renew(self) -> None:
        """Drops what is known about who is the master, and idle connections: the next call looks anew."""

    async def close(self) -> None:
        """Ends every connection."""


class PooledClient:
    """One server, or the master that Sentinels name: then each new connection asks them first."""

    def __init__(self, client: Redis, sentinel: Sentinel | None = None) -> None:
        self._client = client
        self._sentinel = sentinel

    async def execute(self, *words: Any) -> Any:
        """See `RedisClient`."""
        return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def pubsub(self, key: str) -> AsyncIterator[PubSub]:
        """See `RedisClient`."""
        async with self._client.pubsub() as channel:
            yield channel

    async def renew(self) -> None:
        """See `RedisClient`. Connections in use find out by themselves."""
        await self._client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """See `RedisClient`."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()
        if self._sentinel is not None:
            await self._sentinel.aclose()


class ClusterClient:
    """A cluster. All keys of a cell are in one slot, so nearly everything goes to one of its nodes."""

    def __init__(self, client: RedisCluster, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options

    async def execute(self, *words: Any) -> Any:
        """See `RedisClient`. A command without keys goes to any master."""
        try:
            return await self._client.execute_command(*words)
        except AttributeError as gone:
            # When the library looks for the nodes anew it takes connections away from calls that have just got one.
            raise ConnectionError("the connection was closed while the nodes of the cluster were looked for") from gone

    @asynccontextmanager
    async def pubsub(self, key: str) -> AsyncIterator[PubSub]:
        """See `RedisClient`. It has a client of its own: it outlives each look at which node has which slot."""
        await self._client.initialize()
        node = self._client.get_node_from_key(key)
        if node is None:
            raise SlotNotCoveredError("no node of the cluster has the cell's slot")
        client = Redis(host=node.host, port=int(node.port), **self._options)
        try:
            async with client.pubsub() as channel:
                yield channel
        finally:
            await client.aclose()

    async def renew(self) -> None:
        """See `RedisClient`."""
        await self._client.aclose()

    async def close(self) -> None:
        """See `RedisClient`."""
        await self._client.aclose()


def make_client(
    address: StoreAddress,
    *,
    socket_timeout_s: float,
    connect_timeout_s: float,
    max_connections: int,
    sentinel_login: dict[str, str],
) -> RedisClient:
    """A client for the address; it connects at the first command. `sentinel_login`: username and password of Sentinels."""
    basics: dict[str, Any] = {
        "decode_responses": True,
        "protocol": 2,
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    tls: dict[str, Any] = {"ssl": True, **address.tls_options} if address.tls else {}
    login: dict[str, Any] = {**address.login, "health_check_interval": _HEALTH_CHECK_S}
    most = max_connections + _SPARE_CONNECTIONS
    retry = Retry(ExponentialWithJitterBackoff(base=0.01, cap=0.1), 1)
    if address.kind is StoreKind.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in address.nodes]
        options = {**basics, **login, **tls, "retry": retry}
        # A slot that moved is noted; without reinitialize_steps no other call loses its connection over it.
        cluster = RedisCluster(startup_nodes=nodes, max_connections=most, reinitialize_steps=0, **options)
        return ClusterClient(cluster, options)
    if address.kind is StoreKind.SENTINEL:
        asking = {**basics, **tls, **sentinel_login, "retry": Retry(NoBackoff(), 0)}
        sentinel = Sentinel(address.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        master = sentinel.master_for(
            address.service, db=address.db, max_connections=most, retry=retry, socket_keepalive=True, **basics, **login, **tls
        )
        return PooledClient(master, sentinel)
    where: dict[str, Any] = {"path": address.path, "connection_class": UnixDomainSocketConnection}
    if not address.path:
        ((host, port),) = address.nodes
        kind = SSLConnection if address.tls else Connection
        where = {"host": host, "port": port, "socket_keepalive": True, "connection_class": kind, **address.tls_options}
    pool = ConnectionPool(db=address.db, max_connections=most, retry=retry, **where, **basics, **login)
    return PooledClient(Redis.from_pool(pool))
