"""The request store's server in virtual time: the commands that store and scripts use, and a client like that of redis.asyncio.

The scripts are the real ones. Time to live counts by the server's own clock, which may jump.
"""

import asyncio
import builtins
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

from router.redis_link import Keys, Observe, RedisLink, RedisSettings
from router.redis_scripts import NAMES, script
from tests.simulation.loop import BEGIN_S, BEGIN_WALL_S, PROCESS, Process
from tests.simulation.lua import ScriptError, scripts
from tests.simulation.pubsub import PubSub
from tests.simulation.store_watch import Late, Traps, no_watch
from tests.simulation.wires import Network

STORE = "store"
#: How often a command that is stuck in a cut tries to get through, in seconds.
STUCK_S = 0.2


class StoreServer:
    """All data of one server. `away`: it does not run now."""

    def __init__(self, network: Network, change: Callable[[str], str]) -> None:
        self.network = network
        self.process = Process(STORE)
        self.away = False
        self.clients: dict[Client, None] = {}
        self.runs = 0
        self._data: dict[str, Any] = {}
        self._expiry: dict[str, float] = {}
        self._known: set[str] = set()
        self._texts = {script(name).sha: change(script(name).text) for name in NAMES}
        self._shas = {script(name).text: script(name).sha for name in NAMES}
        self._names = {script(name).sha: name for name in NAMES}
        self._leases = Keys("default").leases
        self.traps = Traps()
        self.watch: Callable[..., None] = no_watch

    def stop(self) -> None:
        """The server goes: connections break."""
        self.away = True
        for client in list(self.clients):
            client.connection_lost()

    def start(self, empty: bool) -> None:
        """It is back, with its data or without."""
        self.away = False
        self._known.clear()
        if empty:
            self._data.clear()
            self._expiry.clear()

    def hash_of(self, key: str) -> dict[str, str]:
        """A hash as it is now, for who looks from outside."""
        return dict(self._data.get(key, {}))

    def now(self) -> float:
        """Its clock on the wall."""
        return BEGIN_WALL_S + self.network.loop.time() - BEGIN_S + self.process.wall_offset_s

    def perform(self, words: list[str]) -> Any:
        """One command."""
        for key in words[1:2]:
            self._forget_expired(key)
        method: Callable[..., Any] | None = getattr(self, f"_{words[0].lower()}", None)
        if method is None:
            raise ResponseError(f"the simulated store has no command {words[0]}")
        return method(*words[1:])

    def evaluate(self, sha: str, text: str | None, keys: list[str], arguments: list[str]) -> Any:
        """One script, by its hash or with its text."""
        if text is None:
            if sha not in self._known:
                raise NoScriptError("NOSCRIPT No matching script")
        else:
            sha = self._shas[text]
            self._known.add(sha)
        self.runs += 1
        self._forget_expired(keys[0])
        before = dict(self._data.get(keys[0], {}))
        try:
            return scripts().run(self._texts[sha], keys, arguments, self.perform)
        except ScriptError as error:
            raise ResponseError(str(error)) from None
        finally:
            if "request_id" in before:
                after = self._data.get(keys[0])
                self.watch(self._names[sha], before, after, self._data.get(self._leases, {}).get, self.now())

    def name_of(self, sha: str, text: str | None) -> str:
        """Of a script."""
        return self._names[sha if text is None else self._shas[text]]

    def _forget_expired(self, key: str) -> None:
        if self._expiry.get(key, math.inf) <= self.now():
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._data.pop(key, None)
        self._expiry.pop(key, None)

    def _table(self, key: str, kind: type = dict) -> Any:
        return self._data.setdefault(key, kind())

    def _tidy(self, key: str) -> None:
        if not self._data.get(key):
            self._drop(key)

    # hashes

    def _hgetall(self, key: str) -> list[str]:
        return [part for pair in self._data.get(key, {}).items() for part in pair]

    def _hget(self, key: str, field: str) -> str | None:
        found: str | None = self._data.get(key, {}).get(field)
        return found

    def _hmget(self, key: str, *fields: str) -> list[str | None]:
        return [self._data.get(key, {}).get(field) for field in fields]

    def _hset(self, key: str, *flat: str) -> int:
        table = self._table(key)
        before = len(table)
        table.update(zip(flat[::2], flat[1::2], strict=True))
        return len(table) - before

    def _hsetnx(self, key: str, field: str, value: str) -> int:
        table = self._table(key)
        if field in table:
            return 0
        table[field] = value
        return 1

    def _hincrby(self, key: str, field: str, amount: str) -> int:
        table = self._table(key)
        table[field] = str(int(table.get(field, "0")) + int(amount))
        return int(table[field])

    def _hdel(self, key: str, *fields: str) -> int:
        table = self._data.get(key, {})
        gone = sum(table.pop(field, None) is not None for field in fields)
        self._tidy(key)
        return gone

    def _hkeys(self, key: str) -> list[str]:
        return list(self._data.get(key, {}))

    def _hlen(self, key: str) -> int:
        return len(self._data.get(key, {}))

    def _hscan(self, key: str, cursor: str, *options: str) -> list[Any]:
        return ["0", self._hgetall(key)]

    # sets

    def _sadd(self, key: str, *members: str) -> int:
        table = self._table(key)
        before = len(table)
        table.update(dict.fromkeys(members))
        return len(table) - before

    def _srem(self, key: str, *members: str) -> int:
        table = self._data.get(key, {})
        gone = sum(table.pop(member, "") is None for member in members)
        self._tidy(key)
        return gone

    def _smembers(self, key: str) -> list[str]:
        return list(self._data.get(key, {}))

    def _scard(self, key: str) -> int:
        return len(self._data.get(key, {}))

    def _srandmember(self, key: str, count: str) -> list[str]:
        members = list(self._data.get(key, {}))
        return self.network.rng.sample(members, min(int(count), len(members)))

    # sorted sets

    def _zadd(self, key: str, *rest: str) -> int:
        flags, pairs = {word for word in rest if word in ("NX", "XX")}, [word for word in rest if word not in ("NX", "XX")]
        table = self._table(key)
        before = len(table)
        for score, member in zip(pairs[::2], pairs[1::2], strict=True):
            if not ("NX" in flags and member in table) and not ("XX" in flags and member not in table):
                table[member] = float(score)
        added = len(table) - before
        self._tidy(key)
        return added

    def _zscore(self, key: str, member: str) -> str | None:
        score = self._data.get(key, {}).get(member)
        return None if score is None else repr(score)

    def _zrem(self, key: str, *members: str) -> int:
        return self._hdel(key, *members)

    def _zcard(self, key: str) -> int:
        return len(self._data.get(key, {}))

    def _in_order(self, key: str) -> list[tuple[str, float]]:
        return sorted(self._data.get(key, {}).items(), key=lambda pair: (pair[1], pair[0]))

    def _between(self, key: str, low: str, high: str) -> list[tuple[str, float]]:
        return [pair for pair in self._in_order(key) if float(low) <= pair[1] <= float(high)]

    def _zcount(self, key: str, low: str, high: str) -> int:
        return len(self._between(key, low, high))

    def _zrange(self, key: str, low: str, high: str, *options: str) -> list[Any]:
        if "BYSCORE" in options:
            found = [member for member, _ in self._between(key, low, high)]
            return found[int(options[-2]) : int(options[-2]) + int(options[-1])] if "LIMIT" in options else found
        assert (low, high) == ("0", "-1"), "the simulated store ranges over all members only"
        pairs = self._in_order(key)
        return [part for pair in pairs for part in pair] if "WITHSCORES" in options else [member for member, _ in pairs]

    def _zpopmin(self, key: str) -> list[str]:
        pairs = self._in_order(key)
        if not pairs:
            return []
        self._hdel(key, pairs[0][0])
        return [pairs[0][0], repr(pairs[0][1])]

    # keys and the server

    def _exists(self, key: str) -> int:
        return int(key in self._data)

    def _del(self, key: str) -> int:
        known = key in self._data
        self._drop(key)
        return int(known)

    def _expire(self, key: str, seconds: str) -> int:
        if key not in self._data:
            return 0
        self._expiry[key] = self.now() + float(seconds)
        return 1

    def _time(self) -> list[str]:
        now = self.now()
        return [str(int(now)), str(int(now * 1e6) % 1_000_000)]

    def _publish(self, channel: str, text: str) -> int:
        for client in self.clients:
            self.network.later(self.network.delay(), client.published, channel, text)
        return len(self.clients)


class Client:
    """What RedisLink uses of redis.asyncio.Redis, from one process."""

    def __init__(self, server: StoreServer, settings: RedisSettings) -> None:
        process = PROCESS.get()
        assert process is not None, "only a process has a client"
        self._server = server
        self._network = server.network
        self._settings = settings
        self._process = process
        self._channels: list[PubSub] = []
        server.clients[self] = None

    async def execute(self, *words: Any) -> Any:
        """One command; a lost answer is asked for once more, as the real client does."""
        texts = [_word(word) for word in words]
        if texts[0] in ("EVALSHA", "EVAL"):
            count, rest = int(texts[2]), texts[3:]
            sha, text = (texts[1], None) if texts[0] == "EVALSHA" else ("", texts[1])
            name = self._server.name_of(sha, text)
            return await self._ask(lambda: self._server.evaluate(sha, text, rest[:count], rest[count:]), name)
        return _shaped(texts, await self._ask(lambda: self._server.perform(texts)))

    @asynccontextmanager
    async def pubsub(self, key: str) -> AsyncIterator[PubSub]:
        """A connection that listens."""
        channel = PubSub(self)
        self._channels.append(channel)
        try:
            yield channel
        finally:
            self._channels.remove(channel)

    async def renew(self) -> None:
        """There is one server only."""

    def published(self, channel: str, text: str) -> None:
        """Something was published."""
        if not self._process.dead and not self.is_cut():
            for one in self._channels:
                one.heard(channel, text)

    def connection_lost(self) -> None:
        """The server went away."""
        for one in self._channels:
            one.broke()

    async def close(self) -> None:
        """Nothing is open any more."""
        self._server.clients.pop(self, None)

    def is_cut(self) -> bool:
        """Whether the server cannot be reached."""
        return self._server.away or self._network.is_cut(self._process.name, STORE)

    async def _ask(self, operate: Callable[[], Any], script: str = "") -> Any:
        try:
            return await self._once(operate, script)
        except (ConnectionError, TimeoutError):
            await asyncio.sleep(0.05)
            return await self._once(operate, script)

    async def _once(self, operate: Callable[[], Any], script: str) -> Any:
        if self._server.away:
            await asyncio.sleep(self._network.delay())
            raise ConnectionError("connection refused")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        trap = self._server.traps.caught(self._process.name, script)
        delay_s = self._network.delay()
        if trap is not None and trap.late is not Late.ANSWER:
            delay_s += trap.late_s
        self._network.later(delay_s, self._reach, operate, answer)
        if trap is not None:
            self._network.later(delay_s + 1e-7 if trap.late is Late.ANSWER else 0.0, trap.spring)
        try:
            async with asyncio.timeout(self._settings.socket_timeout_s):
                return await answer
        except builtins.TimeoutError:
            raise TimeoutError("Timeout reading from the store") from None

    def _reach(self, operate: Callable[[], Any], answer: "asyncio.Future[Any]") -> None:
        """The command is at the server. One that meets a cut is lost, and so is its answer."""
        if self.is_cut():
            if (
                self._network.weather.stuck_commands and not self._server.away
            ):  # the kernel sends it when it can, whether anybody waits for it or not
                self._network.later(STUCK_S, self._reach, operate, answer)
            return
        try:
            result, error = operate(), None
        except Exception as failure:  # noqa: BLE001  (the answer to whoever asked)
            result, error = None, failure
        self._network.later(self._network.delay(), self._answer, answer, result, error)

    def _answer(self, answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
        if answer.done() or self.is_cut():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)


class SimulatedLink(RedisLink):
    """The real link over the simulated client."""

    def __init__(self, server: StoreServer, settings: RedisSettings, observe: Observe | None) -> None:
        super().__init__(settings, observe)
        self._client = Client(server, settings)  # type: ignore[assignment]


def _word(word: Any) -> str:
    return repr(word) if isinstance(word, float) else str(word)


def _shaped(words: list[str], answer: Any) -> Any:
    """An answer as the client turns it into Python values."""
    if words[0] == "HGETALL":
        return dict(zip(answer[::2], answer[1::2], strict=True))
    if words[0] == "HSCAN":
        return int(answer[0]), dict(zip(answer[1][::2], answer[1][1::2], strict=True))
    if words[0] == "TIME":
        return int(answer[0]), int(answer[1])
    return answer
