"""A whole cell on this machine: store, members, router, each a process of its own."""

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem_cli.cell_file import CellFile, process_of, write_cell_file
from tandem_cli.supervisor import CellFailed, Child, StopOrder, Supervisor, wrong_settings

STORE_READY_S = 20.0
MEMBER_READY_S = 600.0
ROUTER_READY_S = 120.0
PAGE_TOKENS = 16
#: What runs gets that long to end after a stop signal. Members are stopped when no router is left, so little runs there.
ROUTER_DRAIN_S = 10.0
MEMBER_DRAIN_S = 5.0
#: Closing what is open takes a process that much longer than its drain, at most.
CLOSE_MARGIN_S = 5.0
#: Routers first: they let requests end. The store last: they write there how the requests ended.
ROUTER_STOP = StopOrder(0, ROUTER_DRAIN_S + CLOSE_MARGIN_S)
MEMBER_STOP = StopOrder(1, MEMBER_DRAIN_S + CLOSE_MARGIN_S)
STORE_STOP = StopOrder(2, CLOSE_MARGIN_S)
ROLES = ("router", "prefill", "decode")
#: Carries the address of the store, which may hold a password.
REDIS_VARIABLE = "TANDEM_REDIS_URL"
#: Stands for an address that is not known yet.
NOWHERE = "127.0.0.1:1"

_SETTING = re.compile(r"(router|prefill|decode)\.([a-z][a-z0-9_]*)=(.*)", re.DOTALL)


class BadOption(Exception):
    """An option of the cell that cannot be right. The message says what it must be."""


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What to start. Zero prefill members means that decode members compute prompts themselves."""

    model: str
    dtype: str = "bfloat16"
    weight_quantisation: str = "off"
    #: Adapters of all members, each as name=folder.
    adapters: tuple[str, ...] = ()
    prefill_members: int = 1
    decode_members: int = 1
    routers: int = 1
    listen: str = "127.0.0.1:50051"
    metrics_port: int = 0
    redis_url: str = ""
    threads: int = 1
    #: Whether a member's step also uses the threads of members that have nothing to compute; all share this machine.
    lend_cores: bool = True
    kv_tokens: int = 16_384
    context_tokens: int = 0
    transport: str = "tcp"
    otlp_endpoint: str = ""
    log_level: str = "info"
    #: host:port of the first router's HTTP door, others take a free port; empty: there is none.
    http: str = ""
    #: More flags, each as (role, flag): ("prefill", "--max-step-tokens=128").
    extra: tuple[tuple[str, str], ...] = ()

    def flags_for(self, role: str) -> list[str]:
        """The extra flags of one role."""
        return [flag for name, flag in self.extra if name == role]


class StartView(Protocol):
    """Who is told how the start goes on."""

    def starting(self, names: Sequence[str], words: str) -> None:
        """These processes were started; `words` say what they do."""

    def ready(self, name: str, address: str) -> None:
        """One of them is ready."""

    def tick(self) -> None:
        """Time goes on; called several times a second."""


class Unseen:
    """A StartView that shows nothing."""

    def starting(self, names: Sequence[str], words: str) -> None:
        pass

    def ready(self, name: str, address: str) -> None:
        pass

    def tick(self) -> None:
        pass


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

    @property
    def http_address(self) -> str:
        """host:port of the first router's HTTP door; empty without one."""
        return str(self.routers[0].ready.get("http_address", ""))

    @property
    def http_url(self) -> str:
        """The same with http:// or https:// before it."""
        return str(self.routers[0].ready.get("http_url", ""))

    @property
    def processes(self) -> tuple[Child, ...]:
        """Every process, the ones that clients meet first."""
        return (*self.routers, *self.prefill, *self.decode, *((self.store,) if self.store else ()))


def parse_setting(text: str) -> tuple[str, str]:
    """ROLE.SETTING=VALUE, such as prefill.max_step_tokens=128, as an extra flag of that role. Raises BadOption."""
    match = _SETTING.fullmatch(text)
    if match is None:
        roles = ", ".join(ROLES)
        raise BadOption(f"--set {text}: it must be ROLE.SETTING=VALUE with a role of {roles}, as prefill.max_step_tokens=128")
    role, name, value = match.groups()
    return role, f"--{name.replace('_', '-')}={value}"


def check_adapters(adapters: Sequence[str]) -> tuple[str, ...]:
    """Entries of the form name=folder, the folders absolute. Raises BadOption."""
    found = []
    for entry in adapters:
        name, _, folder = entry.partition("=")
        if not name or not folder or "," in entry:
            raise BadOption(f"--adapter {entry}: it must be name=folder, without a comma")
        if not Path(folder).is_dir():
            raise BadOption(f"--adapter {entry}: {folder} is no folder")
        found.append(f"{name}={Path(folder).absolute()}")
    return tuple(found)


def check_listen(listen: str, option: str = "--listen") -> None:
    """Raises BadOption for what is no host:port, CellFailed when something listens there already. `option` gave it."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise BadOption(f"{option} {listen}: it must be host:port with a port from 0 (any free one) to 65535")
    if int(port) == 0:
        return
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except socket.gaierror as error:
            raise BadOption(f"{option} {listen}: the host is not known ({error.strerror})") from None
        except OSError as error:
            raise CellFailed(
                f"cannot listen on {listen}: {error.strerror}. Stop what listens there, or choose another address with {option}; "
                "port 0 takes a free one"
            ) from None


@contextmanager
def running_cell(
    options: CellOptions, folder: Path, view: StartView | None = None, supervisor: Supervisor | None = None
) -> Iterator[Cell]:
    """Start every process, yield the cell, stop every process. Logs go into `folder`.

    Raises BadOption, or CellFailed with the reason when a process does not start.
    """
    check_listen(options.listen)
    if options.http:
        check_listen(options.http, "--http")
    with supervisor or Supervisor(folder) as owner:
        yield _start(owner, options, view or Unseen())


def _start(supervisor: Supervisor, options: CellOptions, view: StartView) -> Cell:
    store = None if options.redis_url else supervisor.spawn("store", ["router.store_process"], STORE_STOP)
    cores = str((supervisor.folder / "cores").absolute()) if options.lend_cores else ""
    members = {
        role: tuple(
            supervisor.spawn(f"{role}-{number}", _member_argv(role, number, options, cores), MEMBER_STOP)
            for number in range(count)
        )
        for role, count in (("prefill", options.prefill_members), ("decode", options.decode_members))
    }
    if options.flags_for("router"):  # members say at once what is wrong with theirs; routers start only when models are loaded
        _check_router(options)
    if store is not None:
        _wait(supervisor, [store], STORE_READY_S, "starting the store", view)
    redis_url = str(store.ready["url"]) if store is not None else options.redis_url
    _wait(supervisor, [*members["prefill"], *members["decode"]], MEMBER_READY_S, "loading the model", view)
    prefill, decode = (",".join(child.address for child in members[role]) for role in ("prefill", "decode"))
    routers = tuple(
        supervisor.spawn(
            f"router-{number}", _router_argv(number, options, prefill, decode), ROUTER_STOP, {REDIS_VARIABLE: redis_url}
        )
        for number in range(options.routers)
    )
    _wait(supervisor, routers, ROUTER_READY_S, "meeting the members", view)
    started = (*routers, *members["prefill"], *members["decode"])
    known = tuple(process_of(child.name, child.process.pid, child.ready) for child in started)
    write_cell_file(supervisor.folder, CellFile(redis_url, known))
    return Cell(routers, members["prefill"], members["decode"], store, supervisor)


def _check_router(options: CellOptions) -> None:
    """Raises BadOption for extra flags that a router will refuse."""
    said = wrong_settings(_router_argv(0, options, "", NOWHERE), {REDIS_VARIABLE: f"redis://{NOWHERE}"})
    if said:
        raise BadOption(said)


def _wait(supervisor: Supervisor, children: Sequence[Child], timeout_s: float, words: str, view: StartView) -> None:
    view.starting([child.name for child in children], words)
    supervisor.wait_ready(children, timeout_s, lambda child: view.ready(child.name, child.address), view.tick)


def _member_argv(role: str, number: int, options: CellOptions, cores: str) -> list[str]:
    flags = {
        "listen": "127.0.0.1:0",
        "name": f"{role}-{number}",
        "model": options.model,
        "dtype": options.dtype,
        "weight-quantisation": options.weight_quantisation,
        "adapters": ",".join(options.adapters),
        "threads": options.threads,
        "core-share": cores,
        "total-pages": -(-options.kv_tokens // PAGE_TOKENS) + 1,
        "page-tokens": PAGE_TOKENS,
        "context-tokens": options.context_tokens,
        "transport": options.transport,
        "net-devices": "lo",
        "drain-timeout-s": MEMBER_DRAIN_S,
        # Nobody balances calls over these processes: there is nothing to settle.
        "drain-settle-s": 0,
        "log-level": options.log_level,
        "otlp-endpoint": options.otlp_endpoint,
    }
    return [f"{role}_svc", *_as_argv(flags), *options.flags_for(role)]


def _router_argv(number: int, options: CellOptions, prefill: str, decode: str) -> list[str]:
    flags = {
        "listen": options.listen if number == 0 else "127.0.0.1:0",
        "http-listen": (options.http if number == 0 else "127.0.0.1:0") if options.http else "",
        "name": f"router-{number}",
        "model": options.model,
        "prefill": prefill or "none",
        "decode": decode,
        "metrics-port": options.metrics_port if number == 0 else 0,
        "drain-timeout-s": ROUTER_DRAIN_S,
        "drain-settle-s": 0,
        "log-level": options.log_level,
        "otlp-endpoint": options.otlp_endpoint,
    }
    page = ["--ui"] * bool(options.http)
    return ["router", *_as_argv(flags), "--reflection", *page, *options.flags_for("router")]


def _as_argv(flags: dict[str, object]) -> list[str]:
    return [part for name, value in flags.items() if value != "" for part in (f"--{name}", str(value))]
