"""Cores that members of one machine lend one another, for a step at a time.

A prefill and a decode member beside one another have a core each, and half the time one of them has nothing to do. A member says
that it has work by a lock on a file of its own; whoever begins a step sees who has none and uses that core too, until the step is
over. A step's result does not depend on its threads, so nobody notices but the clock. The system drops the locks of a process
that dies; nobody ever waits for one, so a process that stands still holds nobody up.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

#: How often the folder is looked at for new members, in seconds.
LOOK_EVERY_S = 1.0
#: Members that are looked at; more of them lend nothing.
MEMBERS_MAX = 64


class Cores(Protocol):
    """What a runner asks for each step. Used by one thread."""

    def borrowed(self) -> contextlib.AbstractContextManager[int]:
        """While a step runs: how many threads it may use beside its own. From then on this member has work, until `rest`."""
        ...

    def rest(self) -> None:
        """This member has nothing to compute for now."""
        ...


class OwnCores:
    """A member that shares with nobody."""

    def borrowed(self) -> contextlib.AbstractContextManager[int]:
        return contextlib.nullcontext(0)

    def rest(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Member:
    """Open files of one member: `busy` is locked while it has work, `lent` while another one uses its threads."""

    busy: int
    lent: int
    threads: int

    def close(self) -> None:
        os.close(self.busy)
        os.close(self.lent)


class CoreShare:
    """One member's side of a folder that all of them use.

    name: this member's, unlike all others'. threads: of its own, which it lends. cores: of the machine, for all members.
    Raises OSError when the folder can not be written.
    """

    def __init__(self, folder: Path, name: str, threads: int, cores: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._cores = cores if cores is not None else len(os.sched_getaffinity(0))
        self._own = _open(folder, name, threads)
        self._others: dict[str, _Member] = {}
        self._look_at = 0.0
        self._busy = False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[int]:
        """See Cores."""
        self._busy = self._busy or _lock(self._own.busy, fcntl.LOCK_EX)
        self._look()
        taken = self._take()
        try:
            yield sum(member.threads for member in taken)
        finally:
            for member in taken:
                _unlock(member.lent)

    def rest(self) -> None:
        """See Cores."""
        if self._busy:
            _unlock(self._own.busy)
            self._busy = False

    def close(self) -> None:
        """Gives everything back."""
        for member in (self._own, *self._others.values()):
            member.close()
        self._others.clear()

    def _take(self) -> list[_Member]:
        room, idle = self._cores - self._own.threads, []
        for member in self._others.values():
            if _lock(member.busy, fcntl.LOCK_SH):
                _unlock(member.busy)
                idle.append(member)
            else:
                room -= member.threads
        taken = []
        for member in idle:
            if member.threads <= room and _lock(member.lent, fcntl.LOCK_EX):
                taken.append(member)
                room -= member.threads
        return taken

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for path in sorted(self._folder.glob("*.threads"))[:MEMBERS_MAX]:
            if path.stem in self._others or path.stem == self._name:
                continue
            # Another one's file can go while it is looked at.
            with contextlib.suppress(OSError, ValueError):
                self._others[path.stem] = _open(self._folder, path.stem, int(path.read_text()), new=False)


def _open(folder: Path, name: str, threads: int, *, new: bool = True) -> _Member:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0)
    busy = os.open(folder / f"{name}.busy", flags, 0o600)
    try:
        lent = os.open(folder / f"{name}.lent", flags, 0o600)
    except OSError:
        os.close(busy)
        raise
    if new:
        # Last: from now on the others look at it.
        partial = folder / f"{name}.new"
        partial.write_text(str(threads))
        partial.replace(folder / f"{name}.threads")
    return _Member(busy, lent, threads)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
