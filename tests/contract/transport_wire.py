"""A writer and a reader joined by one kind of transport: in this process (memory), or two processes (NIXL)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from tests.contract.transport_node import PAGES, WAIT_S, Node

ROOT = Path(__file__).resolve().parents[2]


class Side(Protocol):
    """A node, wherever it runs. `do` calls one of its methods; `start` and `answer` are its two halves."""

    name: str

    def do(self, method: str, *arguments: Any) -> Any: ...
    def start(self, method: str, *arguments: Any) -> None: ...
    def answer(self) -> Any: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class LocalSide:
    """A node on a fabric in this process."""

    def __init__(self, fabric: MemoryFabric, role: str) -> None:
        self._fabric = fabric
        make = MemorySender if role == "writer" else MemoryReceiver
        self.node = Node(lambda name, slabs: make(fabric, name, slabs), role)
        self.name = self.node.incarnation
        self._thread = ThreadPoolExecutor(1)
        self._started: Future[Any] | None = None

    def do(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def start(self, method: str, *arguments: Any) -> None:
        self._started = self._thread.submit(getattr(self.node, method), *arguments)

    def answer(self) -> Any:
        assert self._started is not None
        return self._started.result(3 * WAIT_S)

    def freeze(self) -> None:
        self.node.end.frozen = True

    def thaw(self) -> None:
        self.node.end.frozen = False

    def kill(self) -> None:
        self.node.close()

    def close(self) -> None:
        self._thread.shutdown()
        self.node.close()


class ProcessSide:
    """A node in a process of its own, over NIXL."""

    def __init__(self, tls: str, role: str, pages: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
        command = [sys.executable, "-m", "tests.contract.transport_node", str(theirs.fileno()), tls, role, str(pages)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,  # UCX tells of each death there
        )
        theirs.close()
        self._line = Connection(ours.detach())
        self.name = ""

    def ready(self) -> None:
        """Wait until it serves."""
        self.name = self.answer()

    def start(self, method: str, *arguments: Any) -> None:
        self._line.send((method, arguments))

    def answer(self) -> Any:
        assert self._line.poll(3 * WAIT_S), "the peer process does not answer"
        ok, value = self._line.recv()
        assert ok, value
        return value

    def do(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._line.close()
        with contextlib.suppress(ProcessLookupError):
            self.thaw()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Wire:
    """Two sides and the kind that joins them: "memory", "tcp" or "cma"."""

    def __init__(self, kind: str, pages: int) -> None:
        self.kind = kind
        self.writer: Any
        self.reader: Any
        if kind == "memory":
            self.fabric = MemoryFabric(seed=7, step_bytes=96 * 1024)
            self.writer, self.reader = LocalSide(self.fabric, "writer"), LocalSide(self.fabric, "reader")
        else:
            self.writer, self.reader = ProcessSide(kind, "writer", pages), ProcessSide(kind, "reader", pages)
            self.writer.ready()
            self.reader.ready()

    def connect(self) -> Any:
        """An endpoint of the reader for this writer, connected."""
        endpoint = self.reader.do("endpoint", self.writer.name)
        assert self.writer.do("connect", endpoint) == ""
        return endpoint

    def close(self) -> None:
        """End both sides."""
        self.writer.close()
        self.reader.close()


@contextlib.contextmanager
def wire_of(kind: str, pages: int = PAGES) -> Iterator[Wire]:
    """A wire that is closed whatever happens."""
    wire = Wire(kind, pages)
    try:
        yield wire
    finally:
        wire.close()
