"""Streams of requests that have ended, kept a while for clients that come back."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from router.relay import RequestStream
from rpc import clocks


@dataclass(frozen=True, slots=True)
class Held:
    """A request's stream at this router, whose it is, the fingerprint of its body, and the span of its Generate.

    `filling`: it came from another router, or may run at one, and the events of before are not all here yet.
    """

    tenant: str
    fingerprint: str
    stream: RequestStream
    traceparent: str
    filling: bool = False


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """How long (seconds), how many, and how many bytes of events at most."""

    keep_s: float = 60.0
    most_streams: int = 1024
    most_bytes: int = 64 * 1024 * 1024


class KeptStreams:
    """See the module. Beyond the limits the oldest go."""

    def __init__(self, limits: KeepLimits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, tuple[Held, float]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, held: Held) -> None:
        """Keep a stream that has ended."""
        self._drop(request_id)
        self._kept[request_id] = (held, clocks.monotonic() + self._limits.keep_s)
        self.bytes += held.stream.kept_bytes
        while self._kept and (len(self._kept) > self._limits.most_streams or self.bytes > self._limits.most_bytes):
            self._drop(next(iter(self._kept)))
        self._arm()

    def get(self, request_id: str) -> Held | None:
        """The stream of an id, if it is kept."""
        found = self._kept.get(request_id)
        return found[0] if found is not None else None

    def close(self) -> None:
        """Keeps nothing any more."""
        self._kept.clear()
        self.bytes = 0
        self._arm()

    def _drop(self, request_id: str) -> None:
        found = self._kept.pop(request_id, None)
        if found is not None:
            self.bytes -= found[0].stream.kept_bytes

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._kept:
            _, until = next(iter(self._kept.values()))
            self._timer = asyncio.get_running_loop().call_later(max(0.0, until - clocks.monotonic()), self._expire)

    def _expire(self) -> None:
        now = clocks.monotonic()
        while self._kept:
            request_id, (_, until) = next(iter(self._kept.items()))
            if until > now:
                break
            self._drop(request_id)
        self._timer = None
        self._arm()
