"""Cores that members of one machine lend one another, for a step at a time.

A prefill and a decode member beside one another have a core each, and half the time one of them has nothing to do. A member says
that it has work by a lock on a file of its own; whoever computes a step sees who has none and uses that core too, until the step
is over or the owner has work again: it counts in that file when it begins and ends to have work, which the step looks at between
its operations, and between its layers for who has none by then. A step's result does not depend on its threads, so nobody notices
but the clock. The system drops the locks of a process that dies; nobody ever waits for one, so a process that stands still holds
nobody up.
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


class Later(Protocol):
    """What a step that uses its own threads alone may find while it runs. `most`: threads. `watched`: addresses of uint32; while
    one of them is even it is worth asking."""

    @property
    def most(self) -> int: ...

    @property
    def watched(self) -> tuple[int, ...]: ...

    @property
    def loans(self) -> "list[Loan]":
        """What was taken so far."""
        ...

    def take(self) -> "Loan":
        """Use what is there now. What was taken before was recalled and is not used any more."""
        ...


@dataclass(frozen=True, slots=True)
class Loan:
    """What a step may use beside its own: so many threads, until one of the owners recalls its; and then what it finds later."""

    threads: int = 0
    recalls: tuple[Recall, ...] = ()
    later: Later | None = None

    @property
    def lent(self) -> bool:
        """Whether it used anything."""
        return self.threads > 0 or (self.later is not None and any(loan.lent for loan in self.later.loans))

    @property
    def recalled(self) -> bool:
        """Whether an owner wants its cores back by now."""
        found = self.later.loans if self.later is not None else ()
        return any(recall.wanted for recall in self.recalls) or any(loan.recalled for loan in found)


#: Nothing is lent.
NO_LOAN = Loan()


class Cores(Protocol):
    """What a runner asks for each step. Used by one thread."""

    def borrowed(self) -> contextlib.AbstractContextManager[Loan]:
        """While a step runs: what it may use beside its own threads. From then on this member has work, until `rest`."""
        ...

    def working(self) -> None:
        """A step begins that can use nothing else: from then on this member has work, until `rest`."""
        ...

    def rest(self) -> None:
        """This member has nothing to compute for now."""
        ...


class OwnCores:
    """A member that shares with nobody."""

    def borrowed(self) -> contextlib.AbstractContextManager[Loan]:
        return contextlib.nullcontext(NO_LOAN)

    def working(self) -> None:
        pass

    def rest(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Member:
    """Open files of one member: `busy` is locked while it has work, `lent` while another one uses its threads.

    turns: how often it began or ended to have work, modulo 2^32, so even while it has none; memory of the file `busy`, which only
        its owner writes.
    """

    busy: int
    lent: int
    threads: int
    turns: ctypes.c_uint32

    def recall(self) -> Recall:
        return Recall(self.turns_at, self.turns.value)

    @property
    def turns_at(self) -> int:
        return ctypes.addressof(self.turns)

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
        self.working()
        self._look()
        with contextlib.closing(_Found(self)) as found:
            now = found.take()
            yield Loan(now.threads, now.recalls, found)

    def working(self) -> None:
        """See Cores."""
        if self._busy:
            return
        # In this order, and the other way round in `take`: who sees the lock free sees the count change.
        self._busy = _lock(self._own.busy, fcntl.LOCK_EX)
        # Odd from now on, and another number than before: somebody who looked may have kept the lock from us the last time.
        self._own.turns.value += 2 if self._own.turns.value % 2 else 1

    def rest(self) -> None:
        """See Cores."""
        if self._busy:
            _unlock(self._own.busy)
            self._busy = False
        self._own.turns.value += self._own.turns.value % 2

    def close(self) -> None:
        """Gives everything back."""
        for member in (self._own, *self._others.values()):
            member.close()
        self._others.clear()

    @property
    def most(self) -> int:
        """Threads that all others together may lend."""
        return max(0, min(self._cores - self._own.threads, sum(member.threads for member in self._others.values())))

    @property
    def watched(self) -> tuple[int, ...]:
        """Where the others count their turns."""
        return tuple(member.turns_at for member in self._others.values())

    def take(self) -> list[tuple[_Member, Recall]]:
        """The members whose threads this one may use from now on, until their `lent` is unlocked."""
        room, idle = self._cores - self._own.threads, []
        for member in self._others.values():
            recall = member.recall()
            if _rests(member):
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


class _Found:
    """What one step has borrowed. Implements Later."""

    def __init__(self, share: CoreShare) -> None:
        self._share = share
        self._taken: list[_Member] = []
        self.loans: list[Loan] = []
        self.most, self.watched = share.most, share.watched

    def take(self) -> Loan:
        self.close()
        taken = self._share.take()
        self._taken = [member for member, _ in taken]
        self.loans.append(Loan(sum(member.threads for member in self._taken), tuple(recall for _, recall in taken)))
        return self.loans[-1]

    def close(self) -> None:
        """Give it back."""
        for member in self._taken:
            _unlock(member.lent)
        self._taken.clear()


def _rests(member: _Member) -> bool:
    """Whether it has no work, or is gone."""
    free = _lock(member.busy, fcntl.LOCK_SH)
    if free:
        _unlock(member.busy)
    return free


def _open(folder: Path, name: str, threads: int, *, new: bool = True) -> _Member:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0)
    busy = os.open(folder / f"{name}.busy", flags, 0o600)
    try:
        turns = _turns(folder / f"{name}.busy", new=new)
        lent = os.open(folder / f"{name}.lent", flags, 0o600)
    except (OSError, ValueError):
        os.close(busy)
        raise
    if new:
        # Last: from now on the others look at it.
        partial = folder / f"{name}.new"
        partial.write_text(str(threads))
        partial.replace(folder / f"{name}.threads")
    return _Member(busy, lent, threads, turns)


def _turns(path: Path, *, new: bool) -> ctypes.c_uint32:
    """The number in a file, as memory. Of an opening of its own: a mapping holds what it was made from, and a lock with that."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if new:
            os.ftruncate(file, _COUNT_BYTES)
        turns = ctypes.c_uint32.from_buffer(mmap.mmap(file, _COUNT_BYTES))
    finally:
        os.close(file)
    if new:
        # What one of this name left: it has no work now, and its count only rises.
        turns.value += turns.value % 2
    return turns


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
