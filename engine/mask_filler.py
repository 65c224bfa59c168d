"""Fills the masks of a step's grammars in a thread of its own while the model computes the step."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from engine.grammar_state import GrammarState

_LOG = logging.getLogger("engine.masks")

#: Threads that may be left alone with a mask that took too long. While there are so many no mask is filled.
LEFT_MAX = 4


class _Batch:
    """The masks of one step, filled one after another until the engine takes them back."""

    def __init__(self, states: Sequence[GrammarState]) -> None:
        self.states = states
        self.done = threading.Event()
        self.seconds = 0.0
        self.broken: list[GrammarState] = []
        self._lock = threading.Lock()
        self._next = 0
        self._taken_back = False

    def next(self) -> GrammarState | None:
        """The next one to fill."""
        with self._lock:
            if self._taken_back or self._next == len(self.states):
                return None
            self._next += 1
            return self.states[self._next - 1]

    def take_back(self) -> tuple[Sequence[GrammarState], Sequence[GrammarState]]:
        """The one that is being filled, if the thread is at one, and those after it, which will not be."""
        with self._lock:
            self._taken_back = True
            at = [state for state in self.states[max(0, self._next - 1) : self._next] if not state.ready]
            return at, self.states[self._next :]


class MaskFiller:
    """`begin` and `finish` are called in turn by the engine thread. A state belongs to the filler in between.

    most_s: how long `finish` waits, in seconds. A mask is filled in tens of microseconds, for any grammar that makes sense; one
    that takes longer than this ends its own request, and no other, unless LEFT_MAX of them are not done: then every request that
    needs a mask ends, rather than that all wait.
    """

    def __init__(self, most_s: float, clock: Callable[[], float]) -> None:
        self._most_s = most_s
        self._clock = clock
        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: _Batch | None = None
        self._left: list[threading.Thread] = []
        self._refused: list[GrammarState] = []
        #: What the masks of the last step took, in seconds.
        self.last_s = 0.0

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Start to fill these masks. One that is filled already costs nothing."""
        assert self._running is None, "the masks of the step before were not waited for"
        waiting = [state for state in states if not state.ready]
        self.last_s = 0.0
        if not waiting:
            return
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= LEFT_MAX:
            self._refused = waiting
            return
        self._running = _Batch(waiting)
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs, self._clock), name="grammar-masks", daemon=True)
            self._thread.start()
        self._jobs.put(self._running)

    def finish(self) -> list[GrammarState]:
        """Wait for the masks of `begin`. Returns the states without one: it took too long, and they must not be touched again, or
        it could not be filled."""
        batch, self._running = self._running, None
        refused, self._refused = self._refused, []
        if batch is None:
            return refused
        if batch.done.wait(self._most_s):
            self.last_s = batch.seconds
            return batch.broken
        return self._leave(batch)

    def close(self) -> None:
        """The thread ends, once it has filled what it is at."""
        self._jobs.put(None)
        self._thread = None

    def _leave(self, batch: _Batch) -> list[GrammarState]:
        """The thread is left alone with the mask that it is at; another one fills those behind it."""
        assert self._thread is not None
        slow, behind = batch.take_back()
        self._left.append(self._thread)
        self._jobs.put(None)
        self._jobs, self._thread = queue.SimpleQueue(), None
        self.begin(behind)
        failed = [*slow, *batch.broken, *self.finish()]
        self.last_s += self._most_s
        return failed


def _work(jobs: "queue.SimpleQueue[_Batch | None]", clock: Callable[[], float]) -> None:
    while (batch := jobs.get()) is not None:
        began = clock()
        while (state := batch.next()) is not None:
            try:
                state.prepare()
            except Exception:  # noqa: BLE001  (top of a thread: the request whose mask it is ends, and no other)
                _LOG.exception("the mask of a grammar could not be filled")
                batch.broken.append(state)
        batch.seconds = clock() - began
        batch.done.set()
