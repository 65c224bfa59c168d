"""Why a request has to end before it is done: the first reason wins, and whatever the request is doing then is told."""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from lifecycle.deadlines import Clock, Deadlines
from lifecycle.finish import Cause, Ending, FinishReason
from rpc import clocks

T = TypeVar("T")

#: Labels of the clocks that a router watches. The inter-token clock runs where the tokens are made; here only while a request
#: waits for another decode member: nobody makes tokens then.
CLOCK_CAUSES = {
    Clock.QUEUE: Cause.QUEUE_DEADLINE,
    Clock.FIRST_TOKEN: Cause.FIRST_TOKEN_DEADLINE,
    Clock.INTER_TOKEN: Cause.INTER_TOKEN_ENGINE,
    Clock.OVERALL: Cause.OVERALL_DEADLINE,
}


class Stopped(Exception):
    """The wait was given up because the request has to end."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(f"{ending.reason.value} {ending.cause.value}")
        self.ending = ending


class Stop:
    """The early end of one request. `ending` is None until it is asked for and never changes after that."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.requested_at = 0.0
        self._actions: list[Callable[[Ending], None]] = []

    def request(self, ending: Ending) -> bool:
        """Ask for the end; False when an earlier reason stands."""
        if self.ending is not None:
            return False
        self.ending, self.requested_at = ending, clocks.monotonic()
        for action in list(self._actions):
            action(ending)
        return True

    @contextmanager
    def tells(self, action: Callable[[Ending], None]) -> Iterator[None]:
        """Inside, `action` is called once when the end is asked for, or at once when it already was."""
        if self.ending is not None:
            action(self.ending)
        self._actions.append(action)
        try:
            yield
        finally:
            self._actions.remove(action)

    async def until(self, future: "asyncio.Future[T]") -> T:
        """The future's result. Raises Stopped, with the future cancelled, when the end is asked for first."""

        def give_up(_: Ending) -> None:
            future.cancel()

        with self.tells(give_up):
            try:
                return await future
            except asyncio.CancelledError:
                # Our own cancel of the future, not somebody's cancel of this task.
                if self.ending is not None and future.cancelled():
                    raise Stopped(self.ending) from None
                raise

    def check(self) -> None:
        """Raises Stopped when the end was asked for."""
        if self.ending is not None:
            raise Stopped(self.ending)

    async def sleep(self, seconds: float) -> None:
        """Waits that long. Raises Stopped when the end is asked for first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def over() -> None:
            if not future.done():
                future.set_result(None)

        timer = loop.call_later(seconds, over)
        try:
            await self.until(future)
        finally:
            timer.cancel()


class Clocks:
    """Asks `stop` for the end when one of the request's clocks runs out, or when it was without a decode member for too long.

    `rpc_bound` tells that the overall limit is the RPC's own deadline.
    """

    def __init__(self, deadlines: Deadlines, stop: Stop, *, rpc_bound: bool) -> None:
        self._deadlines = deadlines
        self._seated = replace(deadlines, limits=replace(deadlines.limits, inter_token_s=None))
        self._stop = stop
        self._rpc_bound = rpc_bound
        self._admitted = False
        self._last_token_at: float | None = None
        self._without_decode = False
        self._recover_by = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def admitted(self) -> None:
        """A seat was given: the queue clock stops for good, and the member watches the time between tokens."""
        self._admitted = True
        self._without_decode, self._recover_by = False, math.inf
        self._arm()

    def first_token(self, now: float) -> None:
        """The first token was selected: its clock stops."""
        self._last_token_at = now
        self._arm()

    def decode_lost(self, last_token_at: float, recover_by: float) -> None:
        """There is no decode member since the last token; another has to give a seat until `recover_by`."""
        if self._last_token_at is not None:
            self._last_token_at = max(self._last_token_at, last_token_at)
        self._without_decode, self._recover_by = True, recover_by
        self._arm()

    def close(self) -> None:
        """No clock runs out any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cause(self, clock: Clock) -> Cause:
        """The label of a clock that ran out."""
        return Cause.RPC_DEADLINE if clock is Clock.OVERALL and self._rpc_bound else CLOCK_CAUSES[clock]

    @property
    def _running(self) -> Deadlines:
        return self._deadlines if self._without_decode else self._seated

    def _arm(self) -> None:
        self.close()
        if self._stop.ending is not None:
            return
        due = self._running.next_expiry(self._admitted, self._last_token_at)
        due = self._recover_by if due is None else min(due, self._recover_by)
        if due < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - clocks.monotonic()), self._expire)

    def _expire(self) -> None:
        now = clocks.monotonic()
        clock = self._running.expired(now, self._admitted, self._last_token_at)
        if clock is not None:
            self._stop.request(Ending(FinishReason.DEADLINE_EXCEEDED, self.cause(clock)))
        elif now >= self._recover_by:
            self._stop.request(Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST))
        else:
            self._arm()
