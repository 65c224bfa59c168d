"""The thread that owns tensors, page tables and sequences: turn after turn while there is work, asleep when there is none."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from member.inbox import Inbox
from rpc import clocks

#: Longest sleep without a look round, in seconds: the heartbeat of an idle engine.
IDLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts and times since the start; `busy_s` and `idle_s` in seconds, `last_turn_at` on the monotonic clock."""

    turns: int
    busy_s: float
    idle_s: float
    last_turn_at: float
    in_turn: bool
    crashed: bool

    @property
    def busy_ratio(self) -> float:
        """Share of the time spent in turns, 0 to 1."""
        total_s = self.busy_s + self.idle_s
        return self.busy_s / total_s if total_s > 0 else 0.0


class Worker(Protocol):
    """What an engine thread runs: see EngineThread."""

    def turn(self) -> bool: ...

    def next_wake(self) -> float | None: ...


class EngineThread:
    """Calls `turn` again and again in one thread of its own.

    `turn` returns True when there is more to do at once; after False the thread sleeps until the inbox has something or
    the monotonic clock reaches `next_wake()` (None: nothing is due). An exception ends the thread: the inbox is closed
    and `on_crash` gets it, in this thread.
    """

    def __init__(
        self,
        turn: Callable[[], bool],
        inbox: Inbox[Any],
        *,
        on_crash: Callable[[BaseException], None],
        next_wake: Callable[[], float | None] | None = None,
        name: str = "engine",
    ) -> None:
        self._turn = turn
        self._inbox = inbox
        self._on_crash = on_crash
        self._next_wake = next_wake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Written by the engine thread only; single reads of them from other threads are whole.
        self._turns = 0
        self._busy_s = 0.0
        self._idle_s = 0.0
        self._last_at = clocks.monotonic()
        self._in_turn = False
        self._crashed = False

    def start(self) -> None:
        """Start the thread, once."""
        self._last_at = clocks.monotonic()
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after its turn and wait for it; False when it is still in a turn after `timeout_s`."""
        self._stop.set()
        self._inbox.close()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return not self._thread.is_alive()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stalled(self, now: float, stall_after_s: float) -> bool:
        """Whether the heart stopped: a crash, or one turn that has lasted longer than `stall_after_s`.

        `now` is a reading of the monotonic clock. An engine with nothing to do sleeps and is not stalled.
        """
        return self._crashed or (self._in_turn and now - self._last_at > stall_after_s)

    def statistics(self) -> EngineStatistics:
        """Counts and times at this moment."""
        return EngineStatistics(self._turns, self._busy_s, self._idle_s, self._last_at, self._in_turn, self._crashed)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._one_turn() and not self._stop.is_set():
                    self._sleep()
        except BaseException as crash:  # noqa: BLE001  (top of the thread: whatever it is, the streams must be told)
            self._crashed = True
            self._inbox.close()
            self._on_crash(crash)

    def _one_turn(self) -> bool:
        started_at = self._mark(in_turn=True)
        more = self._turn()
        self._turns += 1
        self._busy_s += self._mark(in_turn=False) - started_at
        return more

    def _sleep(self) -> None:
        wait_s = IDLE_WAIT_S
        if self._next_wake is not None:
            due_at = self._next_wake()
            if due_at is not None:
                wait_s = min(wait_s, max(0.0, due_at - clocks.monotonic()))
        started_at = clocks.monotonic()
        self._inbox.wait(wait_s)
        self._idle_s += self._mark(in_turn=False) - started_at

    def _mark(self, *, in_turn: bool) -> float:
        now = clocks.monotonic()
        # The time first: a reader between the two lines then sees a fresh time with either value.
        self._last_at = now
        self._in_turn = in_turn
        return now


def thread_for(worker: Worker, inbox: Inbox[Any], on_crash: Callable[[BaseException], None]) -> EngineThread:
    """The thread of one worker."""
    return EngineThread(worker.turn, inbox, on_crash=on_crash, next_wake=worker.next_wake)
