"""What Ctrl-C, SIGTERM and SIGHUP do to a command that runs processes."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that asks to stop came; raised where the main thread is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopSignals:
    """While open, the first stop signal raises Interrupted. From `stopping` on, every signal calls what it was given."""

    def __init__(self) -> None:
        self._again: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._came) for number in NUMBERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stopping(self, again: Callable[[], None]) -> None:
        """The stop has begun: it is not interrupted any more; a signal from here on calls `again`."""
        self._again = again

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._again is not None:
            self._again()
            return
        self._again = _nothing  # one signal, one exception: what unwinds is left in peace
        raise Interrupted(number)


def _nothing() -> None:
    pass
