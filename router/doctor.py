"""`python -m router.doctor`: whether a request store is fit for a cell; one JSON object on standard output.

It asks as routers ask: the same address, the same client, the same kind of scripts. It writes under keys of its own that go
away by themselves.
"""

import asyncio
import secrets
import sys
import time
from typing import Annotated, Any

import msgspec
from redis.exceptions import RedisError

from router import redis_address
from router.redis_link import Keys, RedisLink, RedisSettings
from router.redis_scripts import NAMES, script
from router.store import StoreUnavailable
from rpc.settings import load_or_exit, setting

PINGS = 100
PINGS_LIMIT_S = 3.0
KEY_TTL_S = 60
#: Commands that the scripts call, each as it is called on a key of its kind: hash, set, sorted set.
_COMMANDS = (
    ("hash", "HSET", "f", "v"),
    ("hash", "HSETNX", "g", "v"),
    ("hash", "HINCRBY", "n", "1"),
    ("hash", "HGET", "f"),
    ("hash", "HMGET", "f", "g"),
    ("hash", "HGETALL"),
    ("hash", "HDEL", "g"),
    ("hash", "EXISTS"),
    ("set", "SADD", "m"),
    ("set", "SREM", "m"),
    ("sorted", "ZADD", "1", "m"),
    ("sorted", "ZSCORE", "m"),
    ("sorted", "ZCARD"),
    ("sorted", "ZCOUNT", "-inf", "+inf"),
    ("sorted", "ZRANGE", "0", "-1"),
    ("sorted", "ZREM", "m"),
    ("sorted", "ZPOPMIN"),
)
#: Commands outside of scripts.
_DIRECT = (("hash", "HSCAN", "0", "COUNT", "1"), ("set", "SMEMBERS"), ("set", "SRANDMEMBER", "1"))
_CALL = f"redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2)) redis.call('EXPIRE', KEYS[1], {KEY_TTL_S}) return 1"


class StoreDoctorSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Which store is looked at."""

    redis_url: Annotated[str, setting("Address of the request store.", form=redis_address.FORM, min_length=1)]
    cell: Annotated[
        str,
        setting("Name of the cell: the hash tag of its keys.", form="[A-Za-z0-9_.-]", pattern="^[A-Za-z0-9_.-]{1,64}$"),
    ] = "default"


class StoreFindings(msgspec.Struct, frozen=True):
    """What the server says and how it answers. problem: why it cannot be asked, empty when it can. Seconds and bytes.

    denied: commands and scripts that were refused, each with the server's words. ahead_s: how far its clock is ahead of this
    machine's, with the doubt of half a round trip. leases: seconds that each router's lease has left. info: some of INFO.
    """

    problem: str = ""
    info: dict[str, str] = {}
    denied: tuple[str, ...] = ()
    ping_p50_s: float = 0.0
    ping_p99_s: float = 0.0
    ahead_s: float = 0.0
    ahead_doubt_s: float = 0.0
    leases: dict[str, float] = {}


_INFO = (
    *("redis_version", "valkey_version", "server_name", "redis_mode", "role", "connected_slaves", "master_link_status"),
    *("maxmemory", "maxmemory_policy", "used_memory", "aof_enabled", "rdb_last_bgsave_status", "rdb_last_save_time"),
    *("aof_last_write_status", "min_slaves_good_slaves"),
)


async def look(settings: StoreDoctorSettings) -> StoreFindings:
    """Ask everything. A store that cannot be asked is a finding."""
    try:
        link = RedisLink(RedisSettings(url=settings.redis_url, cell=settings.cell))
    except ValueError as bad:
        return StoreFindings(str(bad))
    keys = Keys(settings.cell)
    try:
        info = await _info(link)
        pings = await _pings(link)
        ahead_s, doubt_s = await _clock(link)
        denied = await _denied(link, keys)
        leases = await _leases(link, keys)
    except (StoreUnavailable, RedisError) as error:
        return StoreFindings(f"{error}")
    finally:
        await link.close()
    p50_s, p99_s = (pings[min(len(pings) - 1, int(len(pings) * share))] for share in (0.5, 0.99))
    return StoreFindings("", info, denied, p50_s, p99_s, ahead_s, doubt_s, leases)


async def _info(link: RedisLink) -> dict[str, str]:
    found: Any = await link.command("doctor", "INFO")
    if not isinstance(found, dict):
        return {}
    return {name: str(found[name]) for name in _INFO if name in found}


async def _pings(link: RedisLink) -> list[float]:
    """Seconds of round trips, shortest first."""
    times: list[float] = []
    last = time.monotonic() + PINGS_LIMIT_S
    while not times or (len(times) < PINGS and time.monotonic() < last):
        began = time.perf_counter()
        await link.command("doctor", "PING")
        times.append(time.perf_counter() - began)
    return sorted(times)


async def _clock(link: RedisLink) -> tuple[float, float]:
    """The server's clock against this one, from the quickest of several answers; the doubt is half its round trip."""
    found = []
    for _ in range(5):
        before = time.time()
        seconds, micros = await link.command("doctor", "TIME")
        after = time.time()
        found.append((after - before, int(seconds) + int(micros) / 1e6 - (before + after) / 2))
    trip_s, ahead_s = min(found)
    return ahead_s, trip_s / 2


async def _denied(link: RedisLink, keys: Keys) -> tuple[str, ...]:
    """What the server refuses of what routers ask for."""
    denied = []
    mark = f"{keys.prefix}doctor:{secrets.token_hex(8)}"
    for kind, command, *arguments in _COMMANDS:
        words = ("EVAL", _CALL, 1, f"{mark}:{kind}", command, *arguments)
        if problem := await _problem(link, words):
            denied.append(f"{command} in a script: {problem}")
    for kind, command, *arguments in _DIRECT:
        if problem := await _problem(link, (command, f"{mark}:{kind}", *arguments)):
            denied.append(f"{command}: {problem}")
    for name in NAMES:
        problem = await _problem(link, ("SCRIPT LOAD", script(name).text))
        denied += [f"the script {name}: {problem}"] * bool(problem)
    if problem := await _problem(link, ("PUBLISH", f"{keys.hints}doctor", "")):
        denied.append(f"PUBLISH: {problem}")
    try:
        async with link.subscribed(f"{keys.hints}doctor"):
            pass
    except (StoreUnavailable, RedisError) as error:
        denied.append(f"SUBSCRIBE: {error}")
    return tuple(denied)


async def _problem(link: RedisLink, words: tuple[Any, ...]) -> str:
    """The server's words about a command that it refuses; empty when it does not."""
    try:
        await link.command("doctor", *words)
    except (StoreUnavailable, RedisError) as error:
        return str(error)
    return ""


async def _leases(link: RedisLink, keys: Keys) -> dict[str, float]:
    """Seconds that are left of each router's lease; what has run out is below 0."""
    found: Any = await link.run("overview", [keys.reserved, keys.leases, keys.tombstones], [])
    now, _, leases, _ = found
    return {name: float(end) - float(now) for name, end in zip(leases[::2], leases[1::2], strict=True)}


def main() -> int:
    """Prints what was found; 0 also when the store cannot be asked."""
    settings = load_or_exit(StoreDoctorSettings, prog="python -m router.doctor", description="Whether a request store is fit.")
    print(msgspec.json.encode(asyncio.run(look(settings))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
