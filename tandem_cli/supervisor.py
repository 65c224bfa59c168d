"""Starts, watches and stops the processes of a cell on this machine."""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import TracebackType

from tandem_cli.log_tail import tail

READY_LINE_BYTES_MAX = 65_536
POLL_S = 0.1
#: How long a process that closed its ready pipe may take to end.
REAP_S = 5.0
#: How long a process may take to say whether its settings are right.
CHECK_S = 60.0


class CellFailed(Exception):
    """A process did not become ready, or ended by itself. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class StopOrder:
    """When a process is stopped: lower ranks first, equal ranks together. `budget_s`: then it is killed."""

    rank: int
    budget_s: float


@dataclass(slots=True)
class Child:
    """One running process of the cell."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_fd: int
    stop_order: StopOrder
    ready: dict[str, object] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """host:port that it serves on, as it said when it became ready."""
        return str(self.ready["address"])

    def how_it_ended(self) -> str:
        """In words, once it has."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"


def wrong_settings(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """What the module argv[0] says is wrong with the rest as its arguments, without starting; empty when nothing is.

    `variables`: as for `Supervisor.spawn`. Raises CellFailed when it does not say within CHECK_S.
    """
    command = [sys.executable, "-m", *argv, "--check-settings"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
            env={**os.environ, **variables},
        )
    except subprocess.TimeoutExpired:
        raise CellFailed(f"{argv[0]} did not check its settings within {CHECK_S:.0f} s") from None
    return done.stderr.strip() if done.returncode else ""


class Supervisor:
    """Owns the processes: when its `with` block ends they are gone."""

    def __init__(self, folder: Path, lifeline: int | None = None, stopping: Callable[[], None] = lambda: None) -> None:
        """`folder` gets the logs. `lifeline`: a descriptor that every process keeps open as long as it lives.

        `stopping` is called at the end of the block, before the processes are stopped.
        """
        self.folder = folder
        self._stopping = stopping
        self.children: list[Child] = []
        #: Names of those that did not end by themselves in the last stop.
        self.killed: list[str] = []
        self._lifeline = (lifeline,) if lifeline is not None else ()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping()
        self.stop()

    def spawn(self, name: str, argv: Sequence[str], stop_order: StopOrder, variables: Mapping[str, str] | None = None) -> Child:
        """Start module argv[0] with the rest as its arguments, and with `variables` beside those of this process. It says that it
        is ready by one JSON line on --ready-fd."""
        read_fd, write_fd = os.pipe()
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem_cli.child", str(os.getpid()), *argv, "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd, *self._lifeline),
                env={**os.environ, **(variables or {})},
                # Ctrl-C is for the supervisor, which stops the processes in an order that loses nothing.
                start_new_session=True,
            )
        os.close(write_fd)
        child = Child(name, process, log, read_fd, stop_order)
        self.children.append(child)
        return child

    def wait_ready(
        self,
        children: Sequence[Child],
        timeout_s: float,
        ready: Callable[[Child], None] = lambda child: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Block until all are ready; `ready` is called for each when it is, `tick` every POLL_S. Raises CellFailed."""
        deadline = time.monotonic() + timeout_s
        lines = {child.ready_fd: b"" for child in children}
        waiting = {child.ready_fd: child for child in children}
        while waiting:
            tick()
            for fd in select.select(list(waiting), [], [], POLL_S)[0]:
                piece = os.read(fd, READY_LINE_BYTES_MAX)
                lines[fd] += piece
                if not piece:
                    raise CellFailed(self._last_words(waiting[fd], "before it was ready"))
                if lines[fd].endswith(b"\n"):
                    child = waiting.pop(fd)
                    child.ready = json.loads(lines[fd])
                    ready(child)
            self.check()
            if waiting and time.monotonic() > deadline:
                late = next(iter(waiting.values()))
                raise CellFailed(f"{late.name} was not ready after {timeout_s:.0f} s; the end of its log:\n{tail(late.log)}")

    def check(self) -> None:
        """Raises CellFailed when a process has ended by itself."""
        for child in self.children:
            if child.process.poll() is not None:
                raise CellFailed(self._last_words(child, "by itself" if child.ready else "before it was ready"))

    def stop(self) -> None:
        """SIGTERM by stop order, SIGKILL to what is left when its budget is over; those are in `killed`."""
        self.killed = []
        by_rank = sorted(self.children, key=lambda child: child.stop_order.rank)
        for _, group in itertools.groupby(by_rank, key=attrgetter("stop_order.rank")):
            self.killed += _end(list(group))
        for child in self.children:
            with contextlib.suppress(OSError):
                os.close(child.ready_fd)
        self.children.clear()

    def kill(self) -> None:
        """SIGKILL to every process at once; `stop` still has to reap them. May be called in a signal handler."""
        for child in self.children:
            child.process.kill()

    @staticmethod
    def _last_words(child: Child, when: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(REAP_S)
        return f"{child.name} {child.how_it_ended()} {when}; the end of its log:\n{tail(child.log)}"


def _end(children: Sequence[Child]) -> list[str]:
    """Ends processes side by side; returns the names of those that had to be killed."""
    started = time.monotonic()
    for child in children:
        child.process.terminate()
    killed = []
    for child in children:
        try:
            child.process.wait(max(POLL_S, started + child.stop_order.budget_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            killed.append(child.name)
    return killed
