"""What is made of measurements of engine, transports and store. Pure."""

from collections.abc import Iterator

from tandem_cli.doctor.finding import Finding, fails, ok, skipped, warning
from tandem_cli.doctor.machine_judged import size
from tandem_cli.doctor.told import Engine, Store, Transfer

BEST_BACKEND = "native"
#: A hand-over at that rate is hidden behind a prompt's computing on a CPU; below it, first tokens wait for pages.
BANDWIDTH_GOOD = 300e6
#: A request's begin and end are two scripts of the store; each waits so long.
PING_GOOD_S, PING_P99_GOOD_S = 0.002, 0.02
#: The client gives a command up after half a second.
PING_FAILS_S = 0.5
SKEW_GOOD_S, SKEW_FAILS_S = 0.25, 2.0
REDIS_LEAST = (7, 2)
MEMORY_SHARE_GOOD = 0.8
DENIED_SHOWN = 3


def judge_engine(told: Engine) -> Iterator[Finding]:
    """Instructions, compiler, backend."""
    yield ok("cpu features", ", ".join(told.instruction_sets) + f"; kernels use {told.instructions or 'none'}")
    if told.compiler:
        yield ok("compiler", told.compiler)
    else:
        yield warning("compiler", told.compiler_problem, "apt-get install g++: kernels of our own are several times quicker")
    why = "; ".join(told.refused)
    if not told.backend:
        yield fails("engine", f"no backend computes: {why}", "the message names what each one failed at")
    elif told.backend != BEST_BACKEND:
        yield warning("engine", f"{told.backend} computes: {why}", "a C++ compiler, and a CPU with AVX2 or better")
    else:
        yield ok(
            "engine",
            f"{told.backend} ({told.instructions}) computes what the reference computes; checked in {told.check_s:.1f} s",
        )


def judge_transfer(check: str, told: Transfer) -> Finding:
    """Whether pages travel, and how fast."""
    where = f" over {told.net_devices}" if told.net_devices and told.transport == "tcp" else ""
    if told.problem:
        if told.transport == "cma":
            change = (
                "use --transport tcp; shared memory needs CAP_SYS_PTRACE or kernel.yama.ptrace_scope=0, and one pid namespace"
            )
            return warning(check, told.problem, change)
        return fails(check, told.problem, "--net-devices with a device of `ip link`; open files and ports as above")
    words = f"{told.bytes_per_s / 1e6:,.0f} MB/s{where}, {told.writes} writes, {told.connect_s * 1e3:.0f} ms to connect"
    if told.bytes_per_s < BANDWIDTH_GOOD:
        return warning(
            check,
            words,
            f"under {BANDWIDTH_GOOD / 1e6:.0f} MB/s first tokens wait for pages: another device, or a quieter machine",
        )
    return ok(check, words)


def judge_store(told: Store) -> Iterator[Finding]:
    """Everything that a store must be, when it can be asked."""
    if told.problem:
        yield fails("store", told.problem, "start it, or correct --redis-url (user, password, TLS)")
        return
    yield _server(told)
    yield _commands(told)
    yield _eviction(told)
    yield _store_memory(told)
    yield _kept(told)
    yield _latency(told)
    yield judge_skew("store clock", told.ahead_s, told.ahead_doubt_s)


def _server(told: Store) -> Finding:
    version = told.info.get("redis_version", "")
    name = (
        f"Valkey {told.info['valkey_version']}"
        if "valkey_version" in told.info
        else f"Redis {version or 'of an unknown version'}"
    )
    parts = [name, told.info.get("redis_mode", "standalone"), told.info.get("role", "")]
    words = ", ".join(part for part in parts if part)
    if told.info.get("role", "master") != "master":
        return fails("store", f"{words}: it takes no writes", "name the master, or Sentinels: redis-sentinel://host:26379/name")
    known = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if known and tuple(known) < REDIS_LEAST:
        return fails("store", words, "Redis 7.2 or newer, or Valkey")
    return ok("store", words)


def _commands(told: Store) -> Finding:
    if not told.denied:
        return ok("store rights", "every command and script of a router is allowed")
    more = f"; and {len(told.denied) - DENIED_SHOWN} more" if len(told.denied) > DENIED_SHOWN else ""
    change = "ACL SETUSER with +@all on ~{cell}:* and &{cell}:* for this user, or the commands named"
    return fails("store rights", "; ".join(told.denied[:DENIED_SHOWN]) + more, change)


def _eviction(told: Store) -> Finding:
    policy = told.info.get("maxmemory_policy", "")
    if not policy:
        return skipped("store eviction", "the server does not tell its maxmemory-policy")
    if policy != "noeviction":
        return fails("store eviction", f"maxmemory-policy {policy}: records can vanish", "CONFIG SET maxmemory-policy noeviction")
    return ok("store eviction", "noeviction")


def _store_memory(told: Store) -> Finding:
    most, used = int(told.info.get("maxmemory", "0")), int(told.info.get("used_memory", "0"))
    if not most:
        return warning(
            "store memory", f"{size(used)} used, no limit", "set maxmemory: a full server then refuses instead of dying"
        )
    words = f"{size(used)} of {size(most)} used"
    if used > MEMORY_SHARE_GOOD * most:
        return warning("store memory", words, "more maxmemory: about 2 KiB for each request of the last hour")
    return ok("store memory", words)


def _kept(told: Store) -> Finding:
    """Persistence and replication: what is left when the server goes."""
    replicas = int(told.info.get("connected_slaves", "0"))
    words = f"append-only file {'on' if told.info.get('aof_enabled') == '1' else 'off'}, {replicas} replicas"
    if "err" in (told.info.get("rdb_last_bgsave_status", "ok"), told.info.get("aof_last_write_status", "ok")):
        return fails(
            "store durability", f"{words}; the last write to disk failed", "free disk space where the server keeps its data"
        )
    if told.info.get("aof_enabled") != "1" and not replicas:
        change = "appendonly yes, or a replica: without them a restart of the store forgets idempotency for a lease"
        return warning("store durability", words, change)
    return ok("store durability", words)


def _latency(told: Store) -> Finding:
    words = f"p50 {told.ping_p50_s * 1e3:.2f} ms, p99 {told.ping_p99_s * 1e3:.2f} ms"
    if told.ping_p99_s > PING_FAILS_S:
        return fails("store latency", words, f"a router gives a command up after {PING_FAILS_S * 1e3:.0f} ms: a nearer server")
    if told.ping_p50_s > PING_GOOD_S or told.ping_p99_s > PING_P99_GOOD_S:
        return warning(
            "store latency", words, "each request waits for it twice: a nearer or less busy server, no fsync on each write"
        )
    return ok("store latency", words)


def judge_skew(check: str, ahead_s: float, doubt_s: float) -> Finding:
    """A clock against this machine's. doubt_s: how exactly it could be measured."""
    words = f"{ahead_s * 1e3:+.1f} ms against this machine, give or take {doubt_s * 1e3:.1f} ms"
    apart_s = abs(ahead_s) - doubt_s
    if apart_s > SKEW_FAILS_S:
        return fails(check, words, "chrony or ntpd on both machines: times of records contradict one another")
    if apart_s > SKEW_GOOD_S:
        return warning(check, words, "chrony or ntpd on both machines")
    return ok(check, words)


def judge_leases(told: Store, routers: int | None) -> Finding:
    """Leases of routers. routers: how many are known to run, None when nobody knows."""
    alive = sorted(name for name, left_s in told.leases.items() if left_s > 0)
    lapsed = len(told.leases) - len(alive)
    words = f"{len(alive)} alive" + (f" ({', '.join(alive)})" if alive else "") + (f", {lapsed} run out" if lapsed else "")
    if not alive:
        return fails("leases", f"{words}: no router of this cell renews its lease here", "the routers' --redis-url and --cell")
    if routers is not None and len(alive) < routers:
        return fails("leases", f"{words}; {routers} routers are known", "look at the log of the router whose name is missing")
    return ok("leases", words)
