"""The log of a request's events: numbers, replay, bounds; and against a model that keeps everything, under random calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.stream_log import BeyondEnd, Cursor, EventsGone, LogBounds, LogEnded, StreamLog

BOUNDS = LogBounds(buffer_bytes=20, replay_bytes=60)


def filled(count: int, size: int = 10, bounds: LogBounds = BOUNDS) -> StreamLog:
    log = StreamLog(bounds)
    for _ in range(count):
        log.put(b"x" * size, size - 2)
    return log


def read(log: StreamLog, cursor: Cursor, most: int = 1_000) -> list[bytes]:
    found = []
    while len(found) < most and (event := log.peek(cursor)) is not None:
        found.append(event)
        log.sent(cursor)
    return found


def test_two_readers_get_the_same_events_from_where_they_came_in() -> None:
    log = StreamLog(BOUNDS)
    first = log.open(0)
    assert [log.put(event, 1) for event in (b"a", b"b")] == [0, 1]
    second = log.open(1)
    log.end(b"end")
    assert read(log, first) == [b"a", b"b", b"end"] and read(log, second) == [b"b", b"end"]
    assert log.delivered and log.sent_text_bytes == 2 and log.next_no == 3


def test_nothing_follows_the_end() -> None:
    log = filled(1)
    log.end(b"end")
    for call in (lambda: log.put(b"more"), lambda: log.end(b"again"), lambda: log.end(None)):
        with pytest.raises(LogEnded):
            call()
    assert log.next_no == 2


def test_a_refusal_ends_without_an_event() -> None:
    log = StreamLog(BOUNDS)
    log.end(None)
    assert log.ended and log.next_no == 0 and log.delivered


def test_b47_a_stalled_reader_does_not_hold_one_that_came_back_another_way() -> None:
    log = filled(2)
    stalled = log.open(0)
    assert not log.full, "it only catches up"
    log.put(b"x" * 10)
    log.put(b"x" * 10)
    assert log.full and log.unsent_bytes == 40
    quick = log.open(4)
    assert not log.full and log.unsent_bytes == 0
    for _ in range(3):
        log.put(b"x" * 10)
        read(log, quick)
    assert log.kept_bytes == 60 and log.first_no == 1
    with pytest.raises(EventsGone) as gone:
        log.peek(stalled)
    assert gone.value.first_no == 1 and log.fallen_behind(stalled) and not log.fallen_behind(quick)


def test_unsent_events_are_never_dropped() -> None:
    log = filled(9)
    assert log.first_no == 0 and log.kept_bytes == 90 and log.full
    reader = log.open(0)
    read(log, reader, 4)
    assert log.first_no == 3 and log.kept_bytes == 60


def test_without_a_reader_half_of_the_replay_may_wait() -> None:
    log = filled(3)
    assert log.full and log.unsent_bytes == 30
    seen = log.open(2)
    log.close(seen)
    assert not log.full and log.unsent_bytes == 10, "a client that asks for event 2 has what comes before"


def test_what_cannot_be_had_is_named() -> None:
    log = StreamLog(BOUNDS, first_no=7, text_bytes=100)
    log.put(b"x", 1)
    with pytest.raises(EventsGone) as gone:
        log.open(6)
    with pytest.raises(BeyondEnd) as beyond:
        log.open(9)
    assert (gone.value.first_no, beyond.value.next_no) == (7, 8)
    assert read(log, log.open(7)) == [b"x"] and log.sent_text_bytes == 101


class AgainstEverything(RuleBasedStateMachine):
    """The model keeps every event and the place of each reader."""

    def __init__(self) -> None:
        super().__init__()
        self.log = StreamLog(BOUNDS)
        self.events: list[bytes] = []
        self.texts: list[int] = []
        self.places: dict[Cursor, int] = {}
        self.most_sent = 0
        self.first = 0

    @precondition(lambda self: not self.log.ended)
    @rule(size=st.integers(1, 30), text=st.integers(0, 30), polite=st.booleans())
    def put(self, size: int, text: int, polite: bool) -> None:
        if polite and self.log.full:
            return
        event = bytes([len(self.events) % 256]) * size
        assert self.log.put(event, text) == len(self.events)
        self.events.append(event)
        self.texts.append(text)

    @precondition(lambda self: not self.log.ended)
    @rule(refused=st.booleans())
    def end(self, refused: bool) -> None:
        if refused and not self.events:
            self.log.end(None)
            return
        self.log.end(b"end")
        self.events.append(b"end")
        self.texts.append(0)

    @rule(number=st.integers(0, 40))
    def open(self, number: int) -> None:
        if number > len(self.events):
            with pytest.raises(BeyondEnd):
                self.log.open(number)
        elif number < self.first:
            with pytest.raises(EventsGone):
                self.log.open(number)
        else:
            self.places[self.log.open(number)] = number
            self.most_sent = max(self.most_sent, number)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), most=st.integers(1, 5))
    def read(self, data: st.DataObject, most: int) -> None:
        cursor = data.draw(st.sampled_from(list(self.places)))
        for _ in range(most):
            place = self.places[cursor]
            if place < self.log.first_no:
                with pytest.raises(EventsGone):
                    self.log.peek(cursor)
                self.log.close(cursor)
                del self.places[cursor]
                return
            event = self.log.peek(cursor)
            assert event == (self.events[place] if place < len(self.events) else None)
            if event is None:
                return
            assert self.log.sent(cursor) == (place + 1 > self.most_sent)
            self.places[cursor] = place + 1
            self.most_sent = max(self.most_sent, place + 1)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        cursor = data.draw(st.sampled_from(list(self.places)))
        self.log.close(cursor)
        del self.places[cursor]

    @invariant()
    def agrees(self) -> None:
        log = self.log
        furthest = max((place for place in self.places.values() if place >= log.first_no), default=self.most_sent)
        sizes = [len(event) for event in self.events]
        assert log.next_no == len(self.events) and log.sent_no == self.most_sent
        assert log.sent_text_bytes == sum(self.texts[: self.most_sent])
        assert self.first <= log.first_no <= log.sent_no, "nothing unsent is dropped"
        self.first = log.first_no
        assert log.kept_bytes == sum(sizes[log.first_no :]) and log.unsent_bytes == sum(sizes[furthest:])
        assert log.kept_bytes <= BOUNDS.replay_bytes or log.first_no >= furthest, "more than the bound is kept"
        assert log.delivered == (furthest == len(self.events)) and log.readers == len(self.places)


TestAgainstEverything = pytest.mark.slow(AgainstEverything.TestCase)
TestAgainstEverything.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
