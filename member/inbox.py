"""The engine thread's mailbox: many writers, one reader, bounded."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class InboxFull(Exception):
    """There is no room. Nothing was put; the sender refuses its own caller."""

    def __init__(self, bound: int) -> None:
        super().__init__(f"the inbox holds its limit of {bound} messages")
        self.bound = bound


class InboxClosed(InboxFull):
    """The reader is gone: there will never be room again."""

    def __init__(self) -> None:
        super().__init__(0)
        self.args = ("the inbox is closed: its reader has ended",)


@dataclass(frozen=True, slots=True)
class InboxStatistics:
    """Counts of messages: waiting now (of them under the bound), most ever waiting, put and refused since the start."""

    waiting: int
    waiting_bounded: int
    bound: int
    most_waiting: int
    put: int
    refused: int
    closed: bool


class Inbox(Generic[T]):
    """Messages in order of arrival. `bound` limits those of `put_nowait`; those of `put_always` do not count towards it."""

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"bound is {bound}; an inbox holds at least 1 message")
        self.bound = bound
        self._wakeup = threading.Condition()
        self._items: deque[T] = deque()
        self._bounded = 0
        self._woken = False
        self._closed = False
        self._most = 0
        self._put = 0
        self._refused = 0

    def put_nowait(self, item: T) -> None:
        """Put a message that may be refused. Raises InboxFull, or InboxClosed when the reader has ended."""
        with self._wakeup:
            if self._closed or self._bounded >= self.bound:
                self._refused += 1
                raise InboxClosed() if self._closed else InboxFull(self.bound)
            self._bounded += 1
            self._append(item)

    def put_always(self, item: T) -> None:
        """Put a message that must not be lost, such as the completion of something that was bounded when it started.

        A closed inbox drops it: nobody is left to whom it could matter.
        """
        with self._wakeup:
            if not self._closed:
                self._append(item)

    def drain(self) -> list[T]:
        """Take everything that is there, oldest first; never waits."""
        with self._wakeup:
            items = list(self._items)
            self._items.clear()
            self._bounded = 0
            return items

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something is there, `wake` was called or the time is over; True when a message is there."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: bool(self._items) or self._woken, timeout_s)
            self._woken = False
            return bool(self._items)

    def wake(self) -> None:
        """Let the reader's present or next `wait` return."""
        with self._wakeup:
            self._woken = True
            self._wakeup.notify()

    def close(self) -> None:
        """Refuse everything from now on. What is there can still be drained."""
        with self._wakeup:
            self._closed = True
            self._woken = True
            self._wakeup.notify()

    def statistics(self) -> InboxStatistics:
        """Counts at this moment."""
        with self._wakeup:
            return InboxStatistics(
                len(self._items), self._bounded, self.bound, self._most, self._put, self._refused, self._closed
            )

    def _append(self, item: T) -> None:
        self._items.append(item)
        self._put += 1
        self._most = max(self._most, len(self._items))
        self._wakeup.notify()
