"""What members run beside their event loop, in virtual time: the engine thread, its inbox and the transfer thread.

A turn of the engine has three parts with time between them, so that what arrives while a step runs arrives there.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from kv_transfer.pump import ReceivePump, SendPump
from kv_transfer.pump_thread import PumpThread
from member.engine_thread import EngineThread
from member.inbox import Inbox
from rpc import clocks

#: Shortest and longest sleep of a transfer thread: coarser than the real one's, for speed.
POLL_ARMED_S = 0.002
POLL_IDLE_S = 0.05


class WakingInbox(Inbox[Any]):
    """An inbox that tells its engine at once."""

    wake_engine: Callable[[], None] | None = None

    def _append(self, item: Any) -> None:
        super()._append(item)
        if self.wake_engine is not None:
            self.wake_engine()


class SimulatedEngine(EngineThread):
    """The engine thread as callbacks of the loop. `step_s` bounds how long a step takes; `stepped` is called after each turn."""

    def __init__(self, worker: Any, inbox: WakingInbox, on_crash: Callable[[BaseException], None], pace: "Pace") -> None:
        super().__init__(worker.turn, inbox, on_crash=on_crash, next_wake=worker.next_wake)
        self.worker = worker
        self._waking = inbox
        self._pace = pace
        self._broken = on_crash
        self._ended = False
        self._due: asyncio.TimerHandle | asyncio.Handle | None = None
        self._asleep = False
        self._running: Any = None
        inbox.wake_engine = self._woken

    def start(self) -> None:
        """See EngineThread."""
        self._mark(in_turn=False)
        self._later(0.0, self._begin)

    def stop(self, timeout_s: float) -> bool:
        """See EngineThread: the step that runs is finished first."""
        if self._due is not None:
            self._due.cancel()
        if self._running is not None:
            self._running()
        self._ended = True
        self._waking.close()
        return True

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.call_later(seconds, self._guarded, do) if seconds > 0 else loop.call_soon(self._guarded, do)

    def _guarded(self, do: Callable[[], None]) -> None:
        if self._ended:
            return
        try:
            do()
        except Exception as crash:  # noqa: BLE001  (as in a real thread)
            self._ended = self._crashed = True
            self._waking.close()
            self._broken(crash)

    def _begin(self) -> None:
        self._asleep = False
        self._mark(in_turn=True)
        begun = self.worker.begin()
        self._pace.after_turn(self.worker)
        if begun is None:
            self._mark(in_turn=False)
            self._sleep_until_due()
            return
        seconds = self._pace.step_s()
        self._running = lambda: self.worker.settle(self.worker.compute(begun))
        self._later(seconds / 2, lambda: self._compute(begun, seconds / 2))

    def _compute(self, begun: Any, rest_s: float) -> None:
        computed = self.worker.compute(begun)
        self._running = lambda: self.worker.settle(computed)
        self._later(rest_s, lambda: self._settle(computed))

    def _settle(self, computed: Any) -> None:
        self._running = None
        self.worker.settle(computed)
        self._turns += 1
        self._mark(in_turn=False)
        self._pace.after_turn(self.worker)
        self._later(0.0, self._begin)

    def _sleep_until_due(self) -> None:
        self._asleep = True
        due_at = self.worker.next_wake()
        wait_s = 1.0 if due_at is None else min(1.0, max(0.0, due_at - clocks.monotonic()))
        self._later(max(wait_s, 1e-3), self._begin)

    def _woken(self) -> None:
        if self._asleep and not self._ended:
            self._asleep = False
            assert self._due is not None
            self._due.cancel()
            self._later(1e-5, self._begin)


class Pace:
    """How long steps take, and who looks after each turn."""

    def __init__(self, rng: random.Random, least_s: float, most_s: float, after_turn: Callable[[Any], None]) -> None:
        self._rng = rng
        self._least_s = least_s
        self._most_s = most_s
        self.after_turn = after_turn

    def step_s(self) -> float:
        """The next step's seconds; one in fifty is slow."""
        seconds = self._rng.uniform(self._least_s, self._most_s)
        return seconds * 10 if self._rng.random() < 0.02 else seconds


class _Driven(PumpThread[Any]):
    """A transfer thread as callbacks of the loop."""

    _end: Any = None
    _open = False
    _due: asyncio.TimerHandle | None = None

    def start(self, timeout_s: float = 0.0) -> None:
        """See PumpThread."""
        self._end = self._make()
        self._open = True
        self._again(0.0)

    def close(self, timeout_s: float = 0.0) -> bool:
        """See PumpThread: what is in flight is cut off."""
        if not self._open:
            return True
        self._stopping.set()
        self._finish(self._end)
        self._open = False
        if self._due is not None:
            self._due.cancel()
        self._end.close()
        self._closed()
        return self._settled()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._open

    def _again(self, seconds: float) -> None:
        self._due = asyncio.get_running_loop().call_later(seconds, self._run_turn)

    def _run_turn(self) -> None:
        if not self._open:
            return
        wait_s = self._turn(self._end)
        self._again(POLL_ARMED_S if wait_s < 1e-3 else POLL_IDLE_S)

    def _check_running(self) -> None:
        super()._check_running()
        # Whatever is asked of a pump wakes it.
        if self._due is not None:
            self._due.cancel()
        self._again(1e-5)


class SimulatedReceivePump(_Driven, ReceivePump):
    """The reader's transfer thread in virtual time."""

    def armed(self, armed: bool) -> None:
        """See ReceivePump."""
        woken = armed and not self._armed
        super().armed(armed)
        if woken and self._open:
            self._check_running()


class SimulatedSendPump(_Driven, SendPump):
    """The writer's transfer thread in virtual time."""

    def withdraw(self, push_ids: Any) -> None:
        """See SendPump."""
        super().withdraw(push_ids)
        if self._open:
            self._check_running()
