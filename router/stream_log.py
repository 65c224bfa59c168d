"""The events of one request as its clients get them: numbered without a gap, kept for replay, ended once. Pure.

Any number of readers follow the log, each with a place of its own. What the furthest of them was sent may be dropped, oldest
first, when the log grows beyond its bound; what it was not sent never is: the log says that it is full, and the request
waits. A reader that is overtaken by the dropping has fallen behind: it is told so, and never gets a gap.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class LogEnded(Exception):
    """An event after the end, or a second end: an error of programming. Nothing was added."""


class EventsGone(Exception):
    """The wanted event is not kept any more; `first_no` is the oldest that is."""

    def __init__(self, first_no: int) -> None:
        super().__init__(f"events before {first_no} are not kept any more")
        self.first_no = first_no


class BeyondEnd(Exception):
    """The wanted event is further ahead than the next one, which is `next_no`."""

    def __init__(self, next_no: int) -> None:
        super().__init__(f"the next event is {next_no}")
        self.next_no = next_no


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Sizes in bytes of serialised events.

    `buffer_bytes`: unsent ones at which the request waits for a reader. `replay_bytes`: all that is kept; half of it is what
    may wait while nobody reads, or while a reader that came back has not caught up.
    """

    buffer_bytes: int = 65_536
    replay_bytes: int = 1_048_576


@dataclass(frozen=True, slots=True)
class Entry:
    """One event, with the bytes and the bytes of text of all events before it."""

    event: bytes
    text_bytes: int
    before_bytes: int
    before_text_bytes: int


@dataclass(eq=False, slots=True)
class Cursor:
    """A reader's place: number of the event that it is to be sent next. `caught_up_at` is where the log ended when it came."""

    position: int
    caught_up_at: int


class StreamLog:
    """See the module. The first event put in has the number `first_no`; `text_bytes` of text went before it.

    dropped: called with each event that is not kept any more.
    """

    def __init__(self, bounds: LogBounds, first_no: int = 0, text_bytes: int = 0) -> None:
        self._bounds = bounds
        self._entries: deque[Entry] = deque()
        self._cursors: set[Cursor] = set()
        self._bytes = 0
        self._text_bytes = text_bytes
        self._kept_from_bytes = 0
        self.first_no = first_no
        self.next_no = first_no
        #: Number after the last event that any reader was sent, or said that it has, and the text up to there.
        self.sent_no = first_no
        self.sent_text_bytes = text_bytes
        self.ended = False
        self.dropped: Callable[[bytes], None] | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the events that are kept."""
        return self._bytes - self._kept_from_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the events that the furthest reader was not sent; without a reader, that nobody was sent."""
        return self._bytes - self._before(self._furthest)

    @property
    def full(self) -> bool:
        """Whether the request has to wait before it puts in more."""
        if any(one.position == self.next_no for one in self._cursors):
            return False  # the furthest reader has everything, as nearly always
        fresh = max((max(one.position, one.caught_up_at) for one in self._following()), default=self.next_no)
        waiting_bytes = self._bytes - self._before(fresh)
        return waiting_bytes >= self._bounds.buffer_bytes or self.unsent_bytes >= self._bounds.replay_bytes // 2

    @property
    def delivered(self) -> bool:
        """Whether the furthest reader was sent everything."""
        return self._furthest == self.next_no

    @property
    def readers(self) -> int:
        """Readers that follow."""
        return len(self._cursors)

    def put(self, event: bytes, text_bytes: int = 0) -> int:
        """Adds the next event and returns its number. Raises LogEnded."""
        if self.ended:
            raise LogEnded("an event after the terminal event")
        self._entries.append(Entry(event, text_bytes, self._bytes, self._text_bytes))
        self._bytes += len(event)
        self._text_bytes += text_bytes
        self.next_no += 1
        self._trim()
        return self.next_no - 1

    def end(self, terminal: bytes | None) -> None:
        """Adds the terminal event, if the request ever was one, and closes the log to everything else. Raises LogEnded."""
        if self.ended:
            raise LogEnded("a second terminal event")
        if terminal is not None:
            self.put(terminal)
        self.ended = True

    def open(self, next_no: int) -> Cursor:
        """A reader that wants the events from `next_no` on. Raises EventsGone, BeyondEnd."""
        if next_no > self.next_no:
            raise BeyondEnd(self.next_no)
        if next_no < self.first_no:
            raise EventsGone(self.first_no)
        cursor = Cursor(next_no, self.next_no)
        self._cursors.add(cursor)
        self._note_sent(next_no)
        self._trim()
        return cursor

    def close(self, cursor: Cursor) -> None:
        """The reader has gone; twice is nothing."""
        self._cursors.discard(cursor)
        self._trim()

    def peek(self, cursor: Cursor) -> bytes | None:
        """The event that this reader is to be sent next; None when it has all. Raises EventsGone when it has fallen behind."""
        if cursor.position < self.first_no:
            raise EventsGone(self.first_no)
        if cursor.position == self.next_no:
            return None
        return self._entry(cursor.position).event

    def sent(self, cursor: Cursor) -> bool:
        """The reader was sent the event at its place. Whether it is the first one to be."""
        cursor.position += 1
        first = self._note_sent(cursor.position)
        self._trim()
        return first

    def events_before(self, number: int) -> Iterator[bytes]:
        """The events that are kept, up to this one, which is kept or the next one."""
        return (self._entries[place].event for place in range(number - self.first_no))

    def fallen_behind(self, cursor: Cursor) -> bool:
        """Whether the event at this reader's place is not kept any more."""
        return cursor.position < self.first_no

    def _note_sent(self, number: int) -> bool:
        if number <= self.sent_no:
            return False
        self.sent_no = number
        self.sent_text_bytes = self._text_bytes if number == self.next_no else self._entry(number).before_text_bytes
        return True

    @property
    def _furthest(self) -> int:
        return max((one.position for one in self._following()), default=self.sent_no)

    def _following(self) -> Iterator[Cursor]:
        """Readers but those that have fallen behind and were not closed yet."""
        return (one for one in self._cursors if one.position >= self.first_no)

    def _before(self, number: int) -> int:
        """Bytes of all events before this one, which is kept or the next one."""
        return self._bytes if number == self.next_no else self._entry(number).before_bytes

    def _entry(self, number: int) -> Entry:
        return self._entries[number - self.first_no]

    def _trim(self) -> None:
        if self.kept_bytes <= self._bounds.replay_bytes:
            return
        furthest = self._furthest
        while self.kept_bytes > self._bounds.replay_bytes and self.first_no < furthest:
            event = self._entries.popleft().event
            self._kept_from_bytes += len(event)
            self.first_no += 1
            if self.dropped is not None:
                self.dropped(event)
