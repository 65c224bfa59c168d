"""Whether anybody reads a request, and what happens when nobody does: it ends, at once or after a while."""

import asyncio

from lifecycle.finish import Cause, Ending, FinishReason
from router.stop import Stop
from rpc.clocks import STOOD_STILL_S

_GONE = Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)
_DETACHED_TOO_LONG = Ending(FinishReason.CANCELLED, Cause.DETACH_TIMEOUT)
_RPC_DEADLINE = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.RPC_DEADLINE)


class Presence:
    """`detach_s` is how long the request may run without a reader, in seconds; None ends it when the last one leaves.

    given_up: nobody reads, and the request was told to end because of it.
    """

    def __init__(self, stop: Stop, detach_s: float | None) -> None:
        self._stop = stop
        self._detach_s = detach_s
        self._timer: asyncio.TimerHandle | None = None
        self.given_up = False

    def joined(self) -> None:
        """A reader has come."""
        self.close()

    def alone(self, *, deadline: bool) -> None:
        """The last reader has left, because of its RPC's `deadline` or of itself."""
        if self._detach_s is None:
            self.given_up = True
            self._stop.request(_RPC_DEADLINE if deadline else _GONE)
            return
        self._in(self._detach_s, _DETACHED_TOO_LONG)

    def expect(self, grace_s: float) -> None:
        """Nobody reads yet, because the request came from another router: `grace_s` is for its client to come back."""
        if self._detach_s is None:
            self._in(grace_s, _GONE)
        else:
            self._in(self._detach_s, _DETACHED_TOO_LONG)

    def close(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _in(self, seconds: float, ending: Ending) -> None:
        self.close()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._expire, seconds, loop.time() + seconds, ending)

    def _expire(self, seconds: float, due_at: float, ending: Ending) -> None:
        if asyncio.get_running_loop().time() - due_at > STOOD_STILL_S:
            self._in(seconds, ending)  # nobody was heard meanwhile, whoever came
            return
        self._timer = None
        self.given_up = True
        self._stop.request(ending)
