"""The open seats as the event loop sees them: a log for each, filled by the engine's outbox, emptied by its call's writer."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from decode_svc.flow import Credit
from decode_svc.messages import (
    EndSeat,
    OutputMade,
    OutputTaken,
    PromptReady,
    SeatEnded,
    SeatEvent,
    SeatGranted,
    SeatRefused,
)
from decode_svc.stream_log import Published, StreamLog
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey

_NOT_TAKEN = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_NETWORK)
_GONE = Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)

Terminal = SeatEnded | SeatRefused


@dataclass(frozen=True, slots=True)
class SeatOrigin:
    """What the event loop knows of a seat from its Open. `opened_at`: monotonic seconds."""

    key: AttemptKey
    traceparent: str
    opened_at: float
    inter_token_s: float | None
    first_sequence_no: int
    sends_output: bool
    prompt_tokens: int
    prefill_member: str


class StreamState(Enum):
    """Who is still there."""

    OPEN = "open"
    CALL_GONE = "call_gone"  # the engine has not told the end yet
    ENDED = "ended"  # the terminal is in the log


class SeatStream:
    """One seat's stream. The writer waits for `news`, then takes what there is."""

    def __init__(self, number: int, origin: SeatOrigin, high_water_bytes: int) -> None:
        self.number = number
        self.origin = origin
        self.state = StreamState.OPEN
        self.news = asyncio.Event()
        self.log: StreamLog[Terminal] = StreamLog(origin.first_sequence_no, high_water_bytes, not origin.sends_output)
        self.asked_to_end = False
        #: Why the call is broken off, for its router; empty while it is not.
        self.broken = ""
        #: The time-out around the writer; it has no end until `give_up`.
        self.patience: asyncio.Timeout | None = None
        self.ended_at: float | None = None
        self._high_water_bytes = high_water_bytes
        self._credit = Credit(high_water_bytes)
        self._before_output: deque[SeatGranted | PromptReady] = deque()
        self._writing: Published | None = None
        self._writing_since: float | None = None

    def deliver(self, event: SeatEvent, now: float) -> None:
        """Take one event of the engine in. Output for a call that is gone is dropped."""
        if isinstance(event, SeatEnded | SeatRefused):
            self.log.end(event)
            self.ended_at = now
            if self.state is StreamState.OPEN:
                self.state = StreamState.ENDED
        elif isinstance(event, OutputMade):
            if self.state is StreamState.OPEN:
                self.log.add(event.text, event.shown, event.selected, now)
        else:
            self._before_output.append(event)
        if self.log.ready or self._before_output:
            self.news.set()

    def break_off(self, why: str) -> None:
        """End the call with an error of its router."""
        self.broken = why
        self.news.set()

    def give_up(self) -> None:
        """Stop waiting for a reader that does not take the end."""
        if self.patience is not None:
            self.patience.reschedule(0.0)

    def next_before_output(self) -> SeatGranted | PromptReady | None:
        """The next of what comes before any output."""
        return self._before_output.popleft() if self._before_output else None

    def begin_write(self, now: float) -> Published | None:
        """The next delta, numbered; None when there is none."""
        self._writing = self.log.publish()
        self._writing_since = now if self._writing is not None else None
        return self._writing

    def end_write(self) -> OutputTaken | None:
        """The delta was written; what to tell the engine, when it is worth a message."""
        assert self._writing is not None, f"no delta of seat {self.number} is being written"
        due_bytes = self._credit.add(self._writing.cost_bytes)
        self._writing = self._writing_since = None
        return OutputTaken(self.number, due_bytes) if due_bytes else None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text that wait or are being written."""
        return self.log.buffer_bytes + (self._writing.text_bytes if self._writing is not None else 0)

    @property
    def behind(self) -> bool:
        """Whether the flow window is full as the engine counts it: it has paused the sequence, or is about to."""
        writing = self._writing.cost_bytes if self._writing is not None else 0
        return self.log.held_bytes + writing + self._credit.untold_bytes >= self._high_water_bytes

    def not_taken_since(self) -> float | None:
        """When the oldest output came that its reader has not taken; None when there is none."""
        return self._writing_since if self._writing_since is not None else self.log.waiting_since


class Streams:
    """All seats of the member. `tell` puts a command into the engine's inbox and never blocks."""

    def __init__(self, high_water_bytes: int, tell: Callable[[EndSeat | OutputTaken], None], clock: Callable[[], float]) -> None:
        self._high_water_bytes = high_water_bytes
        self._clock = clock
        self._tell = tell
        self._numbers = itertools.count(1)
        self._streams: dict[int, SeatStream] = {}
        self._none_left = asyncio.Event()

    @contextmanager
    def seat(self, origin: SeatOrigin) -> Iterator[SeatStream]:
        """A stream for as long as its call lives. When the call goes first, the seat is ended and forgotten at its end."""
        stream = SeatStream(next(self._numbers), origin, self._high_water_bytes)
        self._streams[stream.number] = stream
        try:
            yield stream
        finally:
            if stream.state is StreamState.OPEN:
                stream.state = StreamState.CALL_GONE
                self.end(stream, _GONE, self._clock())
            else:
                self._remove(stream)

    def forget(self, stream: SeatStream) -> None:
        """The seat never reached the engine: nothing will come for it."""
        stream.state = StreamState.ENDED

    def end(self, stream: SeatStream, ending: Ending, requested_at: float | None) -> None:
        """Ask the engine to end a seat, once. `requested_at` as in EndSeat."""
        if not stream.asked_to_end:
            stream.asked_to_end = True
            self._tell(EndSeat(stream.number, ending, requested_at))

    def deliver(self, event: SeatEvent, now: float) -> SeatStream | None:
        """Hand one event to its stream; returns the stream, for the books. None when nobody knows it."""
        stream = self._streams.get(event.seat)
        if stream is None:
            return None
        stream.deliver(event, now)
        if stream.state is StreamState.CALL_GONE and stream.log.ended:
            self._remove(stream)
        return stream

    def look_after(self, now: float, linger_s: float) -> None:
        """End seats whose output is made and not taken, and calls that do not take the end within `linger_s` seconds."""
        for stream in self._streams.values():
            if stream.ended_at is not None:
                if now - stream.ended_at >= linger_s:
                    stream.give_up()
                continue
            since, limit_s = stream.not_taken_since(), stream.origin.inter_token_s
            if since is not None and limit_s is not None and now - since >= limit_s and not stream.behind:
                self.end(stream, _NOT_TAKEN, None)

    async def wait_until_none(self) -> None:
        """Return when there is no stream."""
        while self._streams:
            self._none_left.clear()
            await self._none_left.wait()

    def _remove(self, stream: SeatStream) -> None:
        del self._streams[stream.number]
        if not self._streams:
            self._none_left.set()

    def open(self) -> list[SeatStream]:
        """Streams whose seat has not ended."""
        return [stream for stream in self._streams.values() if stream.ended_at is None]

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text held for all readers."""
        return sum(stream.buffer_bytes for stream in list(self._streams.values()))

    @property
    def slow_readers(self) -> int:
        """Streams whose reader is behind by a whole window."""
        return sum(stream.behind for stream in list(self._streams.values()))
