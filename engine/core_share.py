"""Cores that members of one machine lend one another, for a step at a time.

A prefill and a decode member beside one another have a core each, and half the time one of them has nothing to do. A member says
that it has work by a lock on a file of its own; whoever begins a step sees who has none and uses that core too, until the step is
over or the owner has work again: it counts in that file how often it had, which the step looks at between its operations. A
step's result does not depend on its threads, so nobody notices but the clock. The system drops the locks of a process that dies;
nobody ever waits for one, so a process that stands still holds nobody up.
"""

import contextlib
import ctypes
import fcntl
import mmap
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


_COUNT_BYTES = ctypes.sizeof(ctypes.c_uint32)


@dataclass(frozen=True, slots=True)
class Recall:
    """Where an owner says that it wants its cores back: when the uint32 at `address` is not `seen` any more."""

    address: int
    seen: int

    @property
    def wanted(self) -> bool:
        return ctypes.c_uint32.from_address(self.address).value != self.seen


@dataclass(frozen=True, slots=True)
class Loan:
    """What a step may use beside its own: so many threads, until one of the owners recalls its."""

    threads: int = 0
    recalls: tuple[Recall, ...] = ()

    @property
    def recalled(self) -> bool:
        """Whether an owner wants its cores back by now."""
        return any(recall.wanted for recall in self.recalls)


#: Nothing is lent.
NO_LOAN = Loan()


class Cores(Protocol):
    """What a runner asks for each step. Used by one thread."""

    def borrowed(self) -> contextlib.AbstractContextManager[Loan]:
        """While a step runs: what it may use beside its own threads. From then on this member has work, until `rest`."""
        ...

    def rest(self) -> None:
        """This member has nothing to compute for now."""
        ...


class OwnCores:
    """A member that shares with nobody."""

    def borrowed(self) -> contextlib.AbstractContextManager[Loan]:
        return contextlib.nullcontext(NO_LOAN)

    def rest(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Member:
    """Open files of one member: `busy` is locked while it has work, `lent` while another one uses its threads.

    begun: how often it had work after it had none, modulo 2^32; memory of the file `busy`, which only its owner writes.
    """

    busy: int
    lent: int
    threads: int
    begun: ctypes.c_uint32

    def recall(self) -> Recall:
        return Recall(ctypes.addressof(self.begun), self.begun.value)

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
    def borrowed(self) -> Iterator[Loan]:
        """See Cores."""
        self._begin()
        self._look()
        taken = self._take()
        try:
            yield Loan(sum(member.threads for member, _ in taken), tuple(recall for _, recall in taken))
        finally:
            for member, _ in taken:
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

    def _begin(self) -> None:
        if self._busy:
            return
        # In this order, and the other way round in `_take`: who sees the lock free sees the count change.
        self._busy = _lock(self._own.busy, fcntl.LOCK_EX)
        self._own.begun.value += 1

    def _take(self) -> list[tuple[_Member, Recall]]:
        room, idle = self._cores - self._own.threads, []
        for member in self._others.values():
            recall = member.recall()
            if _lock(member.busy, fcntl.LOCK_SH):
                _unlock(member.busy)
                idle.append((member, recall))
            else:
                room -= member.threads
        taken = []
        for member, recall in idle:
            if member.threads <= room and _lock(member.lent, fcntl.LOCK_EX):
                taken.append((member, recall))
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
        begun = _count(folder / f"{name}.busy", new=new)
        lent = os.open(folder / f"{name}.lent", flags, 0o600)
    except (OSError, ValueError):
        os.close(busy)
        raise
    if new:
        # Last: from now on the others look at it.
        partial = folder / f"{name}.new"
        partial.write_text(str(threads))
        partial.replace(folder / f"{name}.threads")
    return _Member(busy, lent, threads, begun)


def _count(path: Path, *, new: bool) -> ctypes.c_uint32:
    """The number in a file, as memory. Of an opening of its own: a mapping holds what it was made from, and a lock with that."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if new:
            os.ftruncate(file, _COUNT_BYTES)
        return ctypes.c_uint32.from_buffer(mmap.mmap(file, _COUNT_BYTES))
    finally:
        os.close(file)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
