"""A thread that owns one end of a transport wholly: made, used and closed on that thread and nowhere else."""

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kv_transfer.offer import HandoverError
from rpc import clocks

ARMED_POLL_S = 200e-6
# What moves rarely moves alone: for a while after it a pump looks again soon. It sleeps in between: looking all the time takes
# the core and the agent's lock from the thread that moves the bytes.
BRISK_POLL_S = 50e-6
BRISK_FOR_S = 1e-3
# Between the parts of a prompt who waits for them sees nothing for the time that their layers take: to look five thousand times a
# second would take a tenth of the core from the model. Who writes looks on: without its looks a write may stand still.
CALM_POLL_S = 2e-3
CALM_AFTER_S = 10e-3
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0


class PumpStopped(HandoverError):
    """The pump's thread does not run (not started, crashed, or closed)."""


def writing_poll_s(still_s: float) -> float:
    """Seconds to the next look while a write is under way. still_s: since something went last."""
    return BRISK_POLL_S if still_s < BRISK_FOR_S else ARMED_POLL_S


def waiting_poll_s(still_s: float) -> float:
    """Seconds to the next look while notices are expected. still_s: since one came last."""
    return writing_poll_s(still_s) if still_s < CALM_AFTER_S else CALM_POLL_S


class End(Protocol):
    """What a pump owns."""

    def close(self) -> None:
        """Give everything back."""


T = TypeVar("T", bound=End)


class PumpThread(Generic[T]):
    """A thread that makes one end of a transport, turns until it is told to stop, and closes it."""

    def __init__(self, name: str, make: Callable[[], T], on_crash: Callable[[BaseException], None]) -> None:
        self._make = make
        self._on_crash = on_crash
        self._wake = threading.Event()
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._stop_by = 0.0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the thread and wait until its end of the transport is made. Raises what making it raised, or PumpStopped."""
        self._thread.start()
        if not self._ready.wait(timeout_s):
            raise PumpStopped(f"{self._thread.name} made no agent within {timeout_s} s")
        if self._failure is not None:
            raise self._failure

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Take nothing more, let what is in flight end within `timeout_s`, give the agent back. True: all of it ended."""
        if not self._thread.is_alive():
            return self._failure is None
        self._stop_by = clocks.monotonic() + timeout_s
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_s + CLOSE_TIMEOUT_S)
        return not self._thread.is_alive() and self._failure is None and self._settled()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _check_running(self) -> None:
        if self._stopping.is_set() or self._failure is not None or not self.alive:
            raise PumpStopped(f"{self._thread.name} does not run")

    def _run(self) -> None:
        try:
            end = self._make()
        except BaseException as error:  # noqa: BLE001 - handed to start(), which raises it
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        try:
            self._loop(end)
        except BaseException as error:  # noqa: BLE001 - top of the thread
            self._failure = error
            end.close()
            self._on_crash(error)
            return
        end.close()
        self._closed()

    def _loop(self, end: T) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._turn(end))
            self._wake.clear()
        self._finish(end)

    def _turn(self, end: T) -> float:
        """One round of work; returns the seconds until the next at the latest."""
        raise NotImplementedError

    def _finish(self, end: T) -> None:
        """Called once before the end is closed."""
        raise NotImplementedError

    def _closed(self) -> None:
        """Called once after the end was closed."""
        raise NotImplementedError

    def _settled(self) -> bool:
        """Whether nothing was cut off by closing."""
        raise NotImplementedError
