"""An event loop without a clock, sockets or threads: time jumps to the next timer when nothing is ready.

Everything that runs belongs to a simulated process, told by the context of its callback. A process that is stopped or dead
does not run its callbacks: they wait with it.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

from rpc.clocks import Clocks

#: Monotonic time at which every world begins, in seconds.
BEGIN_S = 1000.0
#: Wall time at that moment.
BEGIN_WALL_S = 1_800_000_000.0
#: Callbacks that may run without time passing, before it counts as a loop that never ends.
STUCK_AFTER = 200_000
#: Callbacks of a whole world; few need a tenth of it.
STEPS_MAX = 400_000
#: Time passes by at least so much from one timer to the next, in seconds.
LEAST_S = 1e-9
#: How often, and for how many seconds, all that is left is asked to end.
DISPOSE_ROUNDS = 10
DISPOSE_S = 2.0


class Process:
    """One simulated process: a name, its context, and whether it runs now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.halted = False
        self.dead = False
        #: What its clock on the wall differs by, in seconds.
        self.wall_offset_s = 0.0
        self.parked: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}{' dead' if self.dead else ''}>"


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class WorldStuck(Exception):
    """Nothing is ready and nothing will ever be, or callbacks follow one another without time passing."""


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._now = BEGIN_S
        self._clock_resolution = 0.0
        self._since_time_passed = 0
        self.steps = 0
        self.outside = copy_context()
        self.outside.run(PROCESS.set, None)
        self.set_task_factory(_remembering)

    def time(self) -> float:
        """Virtual monotonic seconds."""
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            self._pass_time()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.halted:
                process.parked.append(handle)
                continue
            self.steps += 1
            self._since_time_passed += 1
            handle._run()
        if self.steps > STEPS_MAX:
            self.steps = 0
            raise WorldStuck(f"{STEPS_MAX} callbacks ran until {self._now - BEGIN_S:.1f} s: something turns without getting on")
        if self._since_time_passed > STUCK_AFTER:
            self._since_time_passed = 0
            waiting = "; ".join(repr(handle) for handle in list(self._ready)[:3])
            raise WorldStuck(f"{STUCK_AFTER} callbacks ran at {self._now:.3f} s and time did not pass: {waiting}")

    def _pass_time(self) -> None:
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not timers:
            raise WorldStuck("nothing is ready and no timer runs")
        if timers[0]._when > self._now + LEAST_S:
            self._since_time_passed = 0
        # Rounding may let a timer run a little before its time; whoever then waits for the rest must see time pass.
        self._now = max(timers[0]._when, self._now + LEAST_S)
        while timers and timers[0]._when <= self._now:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if handle._cancelled:
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(handle)

    def resume(self, process: Process) -> None:
        """Lets a stopped process go on: what came meanwhile runs now, in order."""
        process.halted = False
        self._ready.extend(process.parked)
        process.parked.clear()

    def dispose(self, processes: list[Process]) -> None:
        """The world is over: every task ends, whatever it was doing and whether its process lived. The loop is closed."""
        for process in processes:
            self.resume(process)
        self.set_exception_handler(lambda loop, context: None)
        for _ in range(DISPOSE_ROUNDS):
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            with contextlib.suppress(WorldStuck, RuntimeError):
                self.run_until_complete(asyncio.wait(left, timeout=DISPOSE_S))
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False
        with contextlib.suppress(WorldStuck, RuntimeError):
            self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """At once: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  (whoever awaits gets it)
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""

    def _process_events(self, event_list: Any) -> None:
        """There are none."""


def _remembering(loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None) -> asyncio.Task[Any]:
    """A task that its process knows of."""
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.append(task)
        if len(process.tasks) & 255 == 0:
            process.tasks = [one for one in process.tasks if not one.done()]
    return task


class VirtualClocks(Clocks):
    """Monotonic time is the world's; each process has a clock on the wall of its own."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """See Clocks."""
        return self._loop._now

    def wall(self) -> float:
        """See Clocks."""
        process = PROCESS.get()
        return BEGIN_WALL_S + self._loop._now - BEGIN_S + (process.wall_offset_s if process is not None else 0.0)
