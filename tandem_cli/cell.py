"""A whole cell on this machine: store, members, router, each a process of its own."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem_cli.supervisor import Child, StartFailed, Supervisor, supervised

STORE_READY_S = 20.0
MEMBER_READY_S = 600.0
ROUTER_READY_S = 120.0
STOP_BUDGET_S = 40.0
ROUTER_DRAIN_S = 10.0
MEMBER_DRAIN_S = 5.0
PAGE_TOKENS = 16

#: name of the process, what it is doing, seconds waited
Progress = Callable[[str, str, float], None]


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What to start. Zero prefill members means that decode members compute prompts themselves."""

    model: str
    dtype: str = "bfloat16"
    prefill_members: int = 1
    decode_members: int = 1
    routers: int = 1
    listen: str = "127.0.0.1:50051"
    metrics_port: int = 0
    redis_url: str = ""
    threads: int = 1
    kv_tokens: int = 65_536
    transport: str = "tcp"
    otlp_endpoint: str = ""
    log_level: str = "info"
    extra: tuple[tuple[str, str], ...] = ()

    def flags_for(self, role: str) -> list[str]:
        """Extra flags of one role, given as ("prefill", "--step-tokens=128")."""
        return [flag for name, flag in self.extra if name == role]


@dataclass(frozen=True, slots=True)
class Cell:
    """A running cell."""

    routers: tuple[Child, ...]
    prefill: tuple[Child, ...]
    decode: tuple[Child, ...]
    store: Child | None
    supervisor: Supervisor

    @property
    def address(self) -> str:
        """host:port of the first router."""
        return self.routers[0].address


def port_is_free(listen: str) -> bool:
    """Whether nothing listens at host:port yet."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        return True
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError:
            return False
    return True


@contextmanager
def running_cell(options: CellOptions, folder: Path, progress: Progress = lambda name, words, waited_s: None) -> Iterator[Cell]:
    """Start every process, yield the cell, stop every process. Raises StartFailed with the reason."""
    if not port_is_free(options.listen):
        raise StartFailed(f"{options.listen} is in use; stop what listens there or choose another address with --listen")
    with supervised(folder, STOP_BUDGET_S) as supervisor:
        yield _start(supervisor, options, progress)


def _start(supervisor: Supervisor, options: CellOptions, progress: Progress) -> Cell:
    store, redis_url = None, options.redis_url
    if not redis_url:
        store = supervisor.spawn("store", ["router.store_process"])
    members = [
        supervisor.spawn(f"{role}-{number}", _member_argv(role, number, options))
        for role, count in (("prefill", options.prefill_members), ("decode", options.decode_members))
        for number in range(count)
    ]
    if store is not None:
        _wait(supervisor, store, STORE_READY_S, "starting", progress)
        redis_url = str(store.ready["url"])
    for member in members:
        _wait(supervisor, member, MEMBER_READY_S, "loading the model", progress)
    prefill = tuple(member for member in members if member.name.startswith("prefill"))
    decode = tuple(member for member in members if member.name.startswith("decode"))
    routers = tuple(
        supervisor.spawn(f"router-{number}", _router_argv(number, options, redis_url, prefill, decode))
        for number in range(options.routers)
    )
    for router in routers:
        _wait(supervisor, router, ROUTER_READY_S, "meeting its members", progress)
    return Cell(routers, prefill, decode, store, supervisor)


def _wait(supervisor: Supervisor, child: Child, timeout_s: float, words: str, progress: Progress) -> None:
    supervisor.wait_ready(child, timeout_s, lambda waited_s: progress(child.name, words, waited_s))
    progress(child.name, f"ready at {child.ready.get('address') or child.ready.get('url')}", -0.0)


def _member_argv(role: str, number: int, options: CellOptions) -> list[str]:
    flags = {
        "listen": "127.0.0.1:0",
        "name": f"{role}-{number}",
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "total-pages": options.kv_tokens // PAGE_TOKENS + 1,
        "page-tokens": PAGE_TOKENS,
        "transport": options.transport,
        "net-devices": "lo",
        "drain-timeout-s": MEMBER_DRAIN_S,
        "log-level": options.log_level,
        "otlp-endpoint": options.otlp_endpoint,
    }
    return [f"{role}_svc", *_as_argv(flags), *options.flags_for(role)]


def _router_argv(
    number: int, options: CellOptions, redis_url: str, prefill: tuple[Child, ...], decode: tuple[Child, ...]
) -> list[str]:
    flags = {
        "listen": options.listen if number == 0 else "127.0.0.1:0",
        "name": f"router-{number}",
        "drain-timeout-s": ROUTER_DRAIN_S,
        "model": options.model,
        "redis-url": redis_url,
        "prefill": ",".join(child.address for child in prefill) or "none",
        "decode": ",".join(child.address for child in decode),
        "metrics-port": options.metrics_port if number == 0 else 0,
        "log-level": options.log_level,
        "otlp-endpoint": options.otlp_endpoint,
    }
    return ["router", *_as_argv(flags), "--reflection", *options.flags_for("router")]


def _as_argv(flags: dict[str, object]) -> list[str]:
    return [part for name, value in flags.items() if value != "" for part in (f"--{name}", str(value))]
