"""The seats as the event loop sees them: a stream for each, filled by the engine's outbox, emptied by the call that has it.

A seat outlives its call by the time that its Open asked for, so that a router can adopt it; so does an end that nobody took.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from decode_svc.family_stream import FamilyStream
from decode_svc.flow import SlowReader, WindowSizes
from decode_svc.messages import EndChoice, EndSeat, OutputTaken, SeatEvent
from decode_svc.replay_log import Replay, ReplayLog
from decode_svc.seat_stream import Reader, SeatOrigin, SeatStream, Terminal
from decode_svc.stream_log import Published
from decode_svc.tenure import Tenure, TenureState
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey

__all__ = ["Reader", "SeatOrigin", "SeatStream", "StreamLimits", "Streams", "Terminal"]

_NOT_TAKEN = Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_NETWORK)
_GONE = Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)
_SLOW = Ending(FinishReason.SLOW_CONSUMER, Cause.SLOW_CONSUMER)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds. hold_most_s: longest hold, in seconds; held_most: ends that nobody took, or that are kept while a client reads,
    beside seats that still run.

    replay_bytes: what is kept of a seat's output to be sent again; replay_total_bytes: of all seats.
    """

    windows: WindowSizes = field(default_factory=WindowSizes)
    hold_most_s: float = 30.0
    held_most: int = 64
    replay_bytes: int = 256 * 1024
    replay_total_bytes: int = 64 * 1024 * 1024


class Streams:
    """All seats of the member. `tell` puts a command into the engine's inbox and never blocks."""

    def __init__(
        self, limits: StreamLimits, tell: Callable[[EndSeat | EndChoice | OutputTaken], None], clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._tell = tell
        self._numbers = itertools.count(1)
        self._streams: dict[int, SeatStream] = {}
        #: By the number of each seat; several outputs of a prompt have one stream.
        self._seats: dict[int, SeatStream] = {}
        self._keys: dict[AttemptKey, SeatStream] = {}
        self._idle_again = asyncio.Event()
        self._holds = True
        self._replay_bytes = 0

    # calls

    def add(self, origin: SeatOrigin) -> SeatStream:
        """A stream for a new seat; `reading` gives it its first call. A second one for an attempt can not be found by its key."""
        hold_s = min(origin.hold_s, self._limits.hold_most_s) if self._holds else 0.0
        replay = None
        if hold_s > 0:
            replay = ReplayLog(self._limits.replay_bytes, origin.earlier, origin.choices, whole=origin.whole)
        window_bytes, tenure = self._limits.windows.of(origin.slow_reader), Tenure(hold_s)
        if origin.choices:
            numbers = [next(self._numbers) for _ in origin.choices]
            stream: SeatStream = FamilyStream(numbers, origin, window_bytes, tenure, replay)
        else:
            stream = SeatStream(next(self._numbers), origin, window_bytes, tenure, replay)
        self._streams[stream.number] = stream
        self._seats.update(dict.fromkeys(stream.numbers, stream))
        self._keys.setdefault(origin.key, stream)
        return stream

    def find(self, key: AttemptKey) -> SeatStream | None:
        """The stream of an attempt that can be adopted; None when there is none."""
        stream = self._keys.get(key)
        return stream if stream is not None and stream.tenure.adoptable else None

    @contextmanager
    def reading(self, stream: SeatStream) -> Iterator[Reader]:
        """A call has the stream, the first one or one that takes it over; a call that had it before is interrupted.

        When the call goes without having brought the end across, the seat is held, or ended and forgotten at its end.
        """
        before = stream.reader
        now = self._clock()
        number = stream.tenure.begin() if before is None else stream.tenure.adopt()
        stream.reader = reader = Reader(number, now)
        if before is not None:
            before.interrupt()
            self._written(stream)
        try:
            yield reader
        finally:
            if stream.reader is reader:
                self._leave(stream, reader)

    def rewind(self, stream: SeatStream, wanted: int) -> Replay:
        """What the call that has taken the stream over gets first."""
        return stream.rewind(wanted, self._clock())

    def forget(self, stream: SeatStream) -> None:
        """The seat never reached the engine: nothing will come for it."""
        self._remove(stream)

    def keep_end(self, stream: SeatStream, reader: Reader) -> None:
        """The end has arrived, and a client still reads: it stays, for a router that takes the seat over, until its call ends."""
        if stream.ended_at is not None:
            reader.keeps_end = True
            self._bound_ends()
            self._tell_idle()

    def cancel(self, stream: SeatStream, ending: Ending, requested_at: float) -> None:
        """Its router wants the end: nobody will come back for it."""
        stream.tenure.cancelled = True
        self.end(stream, ending, requested_at)

    def cancel_choice(self, stream: SeatStream, choice: int, ending: Ending, requested_at: float) -> None:
        """Its router wants the end of one of several outputs. One that has ended, or is not made here, is past it: nothing."""
        seat = stream.seat_of(choice) if isinstance(stream, FamilyStream) else None
        if seat is not None:
            self._tell(EndChoice(seat, ending, requested_at))

    def end(self, stream: SeatStream, ending: Ending, requested_at: float | None) -> None:
        """Ask the engine to end a seat, once. `requested_at` as in EndSeat."""
        if not stream.asked_to_end and stream.ended_at is None:
            stream.asked_to_end = True
            self._tell(EndSeat(stream.number, ending, requested_at))

    # writing

    def keep(self, stream: SeatStream, published: Published, data: bytes) -> None:
        """An output is being written. Over the bound of all seats the one that keeps most gives up half of it."""
        before = stream.replay_bytes
        stream.keep(published, data)
        self._replay_bytes += stream.replay_bytes - before
        while self._replay_bytes > self._limits.replay_total_bytes:
            most = max(self._streams.values(), key=lambda one: one.replay_bytes)
            assert most.replay is not None, "bytes are kept and no stream keeps any"
            before = most.replay_bytes
            most.replay.shrink(before // 2)
            self._replay_bytes += most.replay_bytes - before

    def written(self, stream: SeatStream, reader: Reader) -> None:
        """The output that was being written is written. A call that does not have the stream any more changes nothing."""
        if stream.reader is reader:
            self._written(stream)

    # the engine's events

    def deliver(self, event: SeatEvent, now: float) -> SeatStream | None:
        """Hand one event to its stream; returns the stream, for the books. None when nobody knows it."""
        stream = self._seats.get(event.seat)
        if stream is None:
            return None
        stream.deliver(event, now)
        state = stream.tenure.state
        if stream.ended_at is not None:
            if state is TenureState.LEFT:
                self._remove(stream)
        elif stream.origin.slow_reader is SlowReader.FAIL and state is TenureState.READ and stream.behind:
            self.end(stream, _SLOW, None)
        return stream

    # time

    def look_after(self, now: float, linger_s: float) -> None:
        """End what is not taken: outputs, ends within `linger_s` seconds, and seats that nobody adopted."""
        for stream in list(self._streams.values()):
            if stream.tenure.state is TenureState.READ:
                self._look_at_reader(stream, now, linger_s)
            elif stream.tenure.over(now):
                self._give_up(stream)

    def _look_at_reader(self, stream: SeatStream, now: float, linger_s: float) -> None:
        reader = stream.reader
        if stream.ended_at is not None:
            if reader is not None and not stream.kept and now - max(stream.ended_at, reader.since) >= linger_s:
                reader.interrupt()
            return
        since, limit_s = stream.not_taken_since(), stream.origin.limits.inter_token_s
        if since is not None and limit_s is not None and now - since >= limit_s and not stream.behind:
            self.end(stream, _NOT_TAKEN, None)

    def stop_holding(self) -> None:
        """The member stops: nobody is waited for any more."""
        self._holds = False
        for stream in list(self._streams.values()):
            stream.tenure.hold_s = 0.0
            if stream.held or stream.kept:
                self._let_go(stream)

    async def wait_until_idle(self) -> None:
        """Return when there is no stream but ends that routers have and still deliver."""
        while not self._idle:
            self._idle_again.clear()
            await self._idle_again.wait()

    # inside

    def _written(self, stream: SeatStream) -> None:
        taken = stream.end_write()
        if taken is not None:
            self._tell(taken)

    def _leave(self, stream: SeatStream, reader: Reader) -> None:
        if stream.number not in self._streams:
            return
        # What was being written is kept, or lost with its call: it does not hold up the sequence.
        self._written(stream)
        if reader.delivered:
            self._remove(stream)
            return
        stream.tenure.leave(reader.number, self._clock())
        if not stream.held:
            self._end_of_wait(stream)
            return
        self._bound_ends()

    def _bound_ends(self) -> None:
        """Of too many ends that are only kept for a router to come, the oldest goes."""
        ended = {one: one.ended_at for one in self._streams.values() if one.ended_at is not None and (one.held or one.kept)}
        if len(ended) > self._limits.held_most:
            self._let_go(min(ended, key=ended.__getitem__))

    def _let_go(self, stream: SeatStream) -> None:
        if stream.held:
            self._give_up(stream)
        elif stream.reader is not None:
            stream.reader.keeps_end = False
            stream.reader.taken.set()

    def _give_up(self, stream: SeatStream) -> None:
        stream.tenure.give_up()
        self._end_of_wait(stream)

    def _end_of_wait(self, stream: SeatStream) -> None:
        if stream.ended_at is not None:
            self._remove(stream)
        else:
            self.end(stream, _GONE, self._clock())

    def _remove(self, stream: SeatStream) -> None:
        del self._streams[stream.number]
        for seat in stream.numbers:
            del self._seats[seat]
        self._replay_bytes -= stream.replay_bytes
        if self._keys.get(stream.origin.key) is stream:
            del self._keys[stream.origin.key]
        self._tell_idle()

    @property
    def _idle(self) -> bool:
        return all(stream.kept for stream in self._streams.values())

    def _tell_idle(self) -> None:
        if self._idle:
            self._idle_again.set()

    # books

    def books(self) -> dict[str, int]:
        """What is held, by name."""
        return {"streams": len(self), "seats_held": self.held, "stream_buffer_bytes": self.buffer_bytes}

    def open(self) -> list[SeatStream]:
        """Streams whose seat has not ended."""
        return [stream for stream in self._streams.values() if stream.ended_at is None]

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held(self) -> int:
        """Streams that nobody reads and that may be adopted."""
        return sum(stream.held for stream in list(self._streams.values()))

    @property
    def replay_bytes(self) -> int:
        """What is kept to be sent again."""
        return self._replay_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of text held for all readers."""
        return sum(stream.buffer_bytes for stream in list(self._streams.values()))

    @property
    def slow_readers(self) -> int:
        """Streams whose reader is behind by a whole window."""
        return sum(stream.behind for stream in list(self._streams.values()))
