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
from tests.contract.transport_node import WAIT_S, Node

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
        self.node = Node(lambda name, slabs, **more: make(fabric, name, slabs, **more), role)
        self.name = self.node.incarnation
        self._thread = ThreadPoolExecutor(1)
        self._started: Future[Any] | None = None

    def ready(self) -> None:
        """It is."""

    def do(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.answer()

    def start(self, method: str, *arguments: Any) -> None:
        self._started = self._thread.submit(getattr(self.node, method), *arguments)

    def answer(self) -> Any:
        assert self._started is not None
        return self._started.result(3 * WAIT_S)

    def freeze(self) -> None:
        self._set_frozen(True)

    def thaw(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        if isinstance(self.node.end, MemorySender):
            self.node.end.frozen = frozen
        else:
            for agent in self.node.agents:
                if self._fabric.slabs_of(agent):
                    self._fabric.freeze(agent, frozen)

    def kill(self) -> None:
        self.node.close()

    def close(self) -> None:
        self._thread.shutdown()
        self.node.close()


class ProcessSide:
    """A node in a process of its own, over NIXL."""

    def __init__(self, tls: str, role: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
        command = [sys.executable, "-m", "tests.contract.transport_node", str(theirs.fileno()), tls, role]
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
        # The signal is on its way: what its other threads do until it arrives is not yet the frozen node's.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

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

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fabric = MemoryFabric(seed=7, step_bytes=96 * 1024)
        # Both start at once.
        self.writer, self.reader = self._side("writer"), self._side("reader")
        self.writer.ready()
        self.reader.ready()

    def connect(self) -> Any:
        """An endpoint of the reader for this writer, connected."""
        endpoint = self.reader.do("endpoint", self.writer.name)
        assert self.writer.do("connect", endpoint) == ""
        return endpoint

    @contextlib.contextmanager
    def another(self, role: str) -> Iterator[Any]:
        """One more side, which a test may end."""
        side = self._side(role)
        try:
            side.ready()
            yield side
        finally:
            side.close()

    def close(self) -> None:
        """End both sides."""
        self.writer.close()
        self.reader.close()

    def _side(self, role: str) -> Any:
        return LocalSide(self.fabric, role) if self.kind == "memory" else ProcessSide(self.kind, role)


@contextlib.contextmanager
def wire_of(kind: str) -> Iterator[Wire]:
    """A wire that is closed whatever happens."""
    wire = Wire(kind)
    try:
        yield wire
    finally:
        wire.close()
