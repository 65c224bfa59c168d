"""Starts, watches and stops the processes of a cell on this machine."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

READY_LINE_BYTES_MAX = 65_536
LOG_TAIL_LINES = 20
POLL_S = 0.1


class StartFailed(Exception):
    """A process did not become ready. The message holds the end of its log."""


@dataclass(slots=True)
class Child:
    """One running process of the cell."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_fd: int
    ready: dict[str, object] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """host:port that it serves on, as it said when it became ready."""
        return str(self.ready["address"])

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(it wrote nothing)"


class Supervisor:
    """Owns the processes. `stop` ends them in reverse order of start within one total time budget."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def spawn(self, name: str, argv: Sequence[str], environment: dict[str, str] | None = None) -> Child:
        """Start module argv[0] with the rest as its arguments. It says that it is ready by one JSON line on --ready-fd."""
        read_fd, write_fd = os.pipe()
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem_cli.child", *argv, "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        os.close(write_fd)
        child = Child(name, process, log, read_fd)
        self.children.append(child)
        return child

    def wait_ready(self, child: Child, timeout_s: float, tick: Callable[[float], None] = lambda waited_s: None) -> None:
        """Block until the child is ready; `tick` is called with the seconds waited. Raises StartFailed."""
        start, line = time.monotonic(), b""
        while not line.endswith(b"\n"):
            waited_s = time.monotonic() - start
            tick(waited_s)
            if waited_s > timeout_s:
                raise StartFailed(f"{child.name} was not ready after {timeout_s:.0f} s; the end of its log:\n{child.tail()}")
            if not select.select([child.ready_fd], [], [], POLL_S)[0]:
                continue
            piece = os.read(child.ready_fd, READY_LINE_BYTES_MAX)
            if not piece:
                code = self._reap(child)
                raise StartFailed(f"{child.name} ended with code {code} before it was ready; the end of its log:\n{child.tail()}")
            line += piece
        child.ready = json.loads(line)

    def ended(self) -> Child | None:
        """A child that has ended by itself, if any."""
        return next((child for child in self.children if child.process.poll() is not None), None)

    def stop(self, budget_s: float) -> list[str]:
        """SIGTERM to each in reverse order of start, SIGKILL to what is left at the end. Returns the names that were killed."""
        deadline, killed = time.monotonic() + budget_s, []
        for child in reversed(self.children):
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(POLL_S, deadline - time.monotonic()))
            if child.process.poll() is None:
                child.process.kill()
                killed.append(child.name)
                child.process.wait()
            with contextlib.suppress(OSError):
                os.close(child.ready_fd)
        self.children.clear()
        return killed

    @staticmethod
    def _reap(child: Child) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.process.wait(5)
        return None


@contextlib.contextmanager
def supervised(folder: Path, budget_s: float) -> Iterator[Supervisor]:
    """A supervisor whose processes are gone when the block ends."""
    supervisor = Supervisor(folder)
    try:
        yield supervisor
    finally:
        supervisor.stop(budget_s)
