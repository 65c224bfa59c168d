"""Seats without a reader: what is kept for whom, for how long, and what another call gets."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_svc.flow import SlowReader
from decode_svc.messages import EndSeat, OutputMade, OutputTaken, PromptReady, SeatGranted
from decode_svc.replay_log import ENTRY_BYTES, ReplayLog, Sent
from decode_svc.streams import Reader, SeatStream
from decode_svc.tenure import Tenure, TenureState
from engine.sequence import Earlier
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from tests.unit.test_stream_log_seats import CANCEL, Desk, origin

GONE = Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)


# the replay log


def filled(limit_bytes: int = 1 << 20, count: int = 5) -> ReplayLog:
    log = ReplayLog(limit_bytes, Earlier((90, 91), 10, 1))
    for number in range(1, count + 1):
        log.add(Sent(number, bytes([number]) * 10, 2, 1, 3), (number, number))
    return log


def test_a_replay_begins_at_the_wanted_event_and_tells_what_was_before() -> None:
    replay = filled().replay(3, 6)
    assert (replay.next_sequence_no, replay.outputs) == (3, tuple(bytes([number]) * 10 for number in (3, 4, 5)))
    assert replay.told[0].token_ids == (90, 91, 1, 1, 2, 2) and (replay.told[0].returned_tokens, replay.told[0].text_bytes) == (
        3,
        16,
    )
    everything = filled().replay(6, 6)
    assert (everything.next_sequence_no, everything.outputs) == (6, ())
    assert (len(everything.told[0].token_ids), everything.told[0].returned_tokens, everything.told[0].text_bytes) == (12, 6, 25)


def test_the_oldest_go_first_and_are_told_as_sums() -> None:
    log = filled(limit_bytes=2 * (10 + ENTRY_BYTES))
    assert log.kept_bytes == 2 * (10 + ENTRY_BYTES)
    replay = log.replay(1, 6)
    assert (replay.next_sequence_no, len(replay.outputs), len(replay.told[0].token_ids)) == (4, 2, 8)
    log.shrink(0)
    assert log.replay(1, 6).next_sequence_no == 6 and log.kept_bytes == 0


def test_outputs_that_took_no_number_are_told_as_sums_unless_they_follow_one() -> None:
    log = ReplayLog(1000, Earlier())
    log.add(Sent(None, b"quiet", 2, 0, 0), (1, 2))
    assert log.replay(1, 1).told[0].token_ids == (1, 2) and log.replay(1, 1).outputs == ()
    log.add(Sent(1, b"loud", 1, 1, 1), (3,))
    log.add(Sent(None, b"quiet", 2, 0, 0), (4, 5))
    assert log.replay(1, 2).outputs == (b"loud", b"quiet") and log.replay(2, 2).told[0].token_ids == (1, 2, 3, 4, 5)


# tenure


def test_a_seat_without_a_hold_ends_with_its_call() -> None:
    tenure = Tenure(0.0)
    tenure.leave(tenure.begin(), 1.0)
    assert tenure.state is TenureState.LEFT and not tenure.adoptable


def test_a_call_that_has_lost_the_seat_changes_nothing_when_it_goes() -> None:
    tenure = Tenure(5.0)
    first = tenure.begin()
    second = tenure.adopt()
    tenure.leave(first, 1.0)
    assert tenure.state is TenureState.READ
    tenure.leave(second, 2.0)
    assert tenure.state is TenureState.HELD and not tenure.over(6.9) and tenure.over(7.0)
    assert tenure.adopt() == 3 and tenure.state is TenureState.READ


# streams


def test_a_seat_is_held_for_its_time_and_then_ended() -> None:
    desk = Desk()
    with desk.seat(origin(hold_s=5.0)) as stream:
        desk.text(stream, b"x")
    assert desk.told == [] and (len(desk.streams), desk.streams.held) == (1, 1)
    desk.text(stream, b"y")
    desk.streams.look_after(14.9, linger_s=1.0)
    assert desk.told == [] and desk.streams.find(AttemptKey("r", 1)) is stream
    desk.now = 15.0
    desk.streams.look_after(15.0, linger_s=1.0)
    desk.streams.look_after(16.0, linger_s=1.0)
    assert desk.told == [EndSeat(stream.number, GONE, 15.0)]
    assert desk.streams.find(AttemptKey("r", 1)) is None
    desk.end(stream)
    assert len(desk.streams) == 0


def test_the_hold_is_bounded_and_a_cancel_forgoes_it() -> None:
    desk = Desk(hold_most_s=2.0)
    with desk.seat(origin(hold_s=1000.0)) as stream:
        pass
    assert stream.tenure.held_until == 12.0
    with desk.seat(origin(hold_s=1.0, attempt=2)) as cancelled:
        desk.streams.cancel(cancelled, CANCEL, 10.0)
    assert not cancelled.held
    desk.end(cancelled)
    assert len(desk.streams) == 1


def test_an_end_that_nobody_took_is_kept_and_one_that_was_taken_is_not() -> None:
    desk = Desk()
    with desk.seat(origin(hold_s=5.0)) as stream:
        desk.end(stream)
        assert stream.terminal() is not None
    assert stream.held
    with desk.streams.reading(stream) as reader:
        assert desk.streams.rewind(stream, 1).outputs == ()
        assert stream.terminal() is not None, "each call gets it"
        reader.delivered = True
    assert len(desk.streams) == 0 and desk.told == []


def test_ends_that_nobody_takes_are_bounded_in_number() -> None:
    desk = Desk(held_most=2)
    for attempt in range(1, 5):
        desk.now += 0.1
        with desk.seat(origin(hold_s=5.0, attempt=attempt)) as stream:
            desk.end(stream)
    assert desk.streams.held == 2
    assert [desk.streams.find(AttemptKey("r", attempt)) is not None for attempt in range(1, 5)] == [False, False, True, True]


def kept(desk: Desk, stack: ExitStack, attempt: int) -> Reader:
    """The call of an ended seat whose router has the end and a client that still reads."""
    stream = stack.enter_context(desk.seat(origin(hold_s=5.0, attempt=attempt)))
    desk.end(stream)
    assert stream.reader is not None
    desk.streams.keep_end(stream, stream.reader)
    return stream.reader


async def test_an_end_is_kept_while_a_client_reads_and_held_when_its_router_goes() -> None:
    desk = Desk()
    with ExitStack() as stack:
        reader = kept(desk, stack, 1)
        reader.patience = asyncio.timeout(None)
        desk.streams.look_after(1000.0, linger_s=1.0)
        assert reader.patience.when() is None, "its call is left alone"
    stream = desk.streams.find(AttemptKey("r", 1))
    assert stream is not None and stream.held and not stream.kept
    desk.streams.look_after(15.0, linger_s=1.0)
    assert len(desk.streams) == 0


def test_nothing_is_kept_before_the_end() -> None:
    desk = Desk()
    with desk.seat(origin(hold_s=5.0)) as stream:
        assert stream.reader is not None
        desk.streams.keep_end(stream, stream.reader)
        desk.end(stream)
        assert not stream.kept


def test_kept_ends_are_bounded_in_number_with_those_that_nobody_takes() -> None:
    desk = Desk(held_most=2)
    with ExitStack() as stack:
        desk.now += 0.1
        with desk.seat(origin(hold_s=5.0, attempt=1)) as stream:
            desk.end(stream)
        readers = []
        for attempt in (2, 3):
            desk.now += 0.1
            readers.append(kept(desk, stack, attempt))
        assert desk.streams.find(AttemptKey("r", 1)) is None, "it had waited longest"
        desk.now += 0.1
        readers.append(kept(desk, stack, 4))
        assert [reader.taken.is_set() for reader in readers] == [True, False, False]


async def test_a_member_that_stops_does_not_wait_for_clients() -> None:
    desk = Desk()
    with ExitStack() as stack:
        reader = kept(desk, stack, 1)
        await asyncio.wait_for(desk.streams.wait_until_idle(), 1.0)
        desk.streams.stop_holding()
        assert reader.taken.is_set()


def test_a_member_that_stops_waits_for_nobody() -> None:
    desk = Desk()
    with desk.seat(origin(hold_s=5.0)) as ended:
        desk.end(ended)
    with desk.seat(origin(hold_s=5.0, attempt=2)) as running:
        pass
    desk.streams.stop_holding()
    assert len(desk.streams) == 1 and desk.told == [EndSeat(running.number, GONE, 10.0)]
    with desk.seat(origin(hold_s=5.0, attempt=3)) as late:
        desk.end(late)
    assert len(desk.streams) == 1


def test_what_was_being_written_when_its_call_broke_does_not_hold_up_the_sequence() -> None:
    desk = Desk(high_water_bytes=40)
    with desk.seat(origin(hold_s=5.0)) as stream:
        desk.text(stream, b"x" * 24)
        published = stream.begin_write(10.0)
        assert published is not None and stream.behind
        desk.streams.keep(stream, published, b"as sent")
    assert desk.told == [OutputTaken(stream.number, 40)] and not stream.behind
    with desk.streams.reading(stream):
        assert desk.streams.rewind(stream, 1).outputs == (b"as sent",)


def test_the_inter_token_clock_of_the_network_does_not_run_while_nobody_reads() -> None:
    desk = Desk()
    with desk.seat(origin(inter_token_s=1.0, hold_s=20.0)) as stream:
        desk.text(stream, b"x")
    desk.streams.look_after(25.0, linger_s=5.0)
    assert desk.told == []
    desk.now = 25.0
    with desk.streams.reading(stream):
        desk.streams.rewind(stream, 1)
        desk.streams.look_after(25.9, linger_s=5.0)
        assert desk.told == []
        desk.streams.look_after(26.0, linger_s=5.0)
        assert len(desk.told) == 1


def test_the_seat_that_keeps_most_gives_up_half_when_all_keep_too_much() -> None:
    desk = Desk(high_water_bytes=10_000, replay_total_bytes=10 * (ENTRY_BYTES + 10))
    with ExitStack() as stack:
        streams = [stack.enter_context(desk.seat(origin(hold_s=5.0, attempt=attempt))) for attempt in (1, 2)]
        for stream, count in zip(streams, (8, 5), strict=True):
            for _ in range(count):
                desk.text(stream, b"x")
                published = stream.begin_write(10.0)
                assert published is not None
                desk.streams.keep(stream, published, b"0123456789")
                stream.end_write()
        kept = [stream.replay_bytes // (ENTRY_BYTES + 10) for stream in streams]
        assert kept == [4, 5] and desk.streams.replay_bytes == sum(stream.replay_bytes for stream in streams)


# slow readers


def test_b47_a_slow_reader_that_wants_it_so_fails_when_its_window_is_full() -> None:
    desk = Desk(high_water_bytes=40)
    with desk.seat(origin(slow_reader=SlowReader.FAIL)) as stream:
        desk.text(stream, b"x")
        assert desk.told == []
        desk.text(stream, b"x" * 20)
        desk.text(stream, b"x")
        slow = Ending(FinishReason.SLOW_CONSUMER, Cause.SLOW_CONSUMER)
        assert desk.told == [EndSeat(stream.number, slow, None)]


def test_b47_a_seat_without_a_reader_is_not_slow() -> None:
    desk = Desk(high_water_bytes=40)
    with desk.seat(origin(slow_reader=SlowReader.FAIL, hold_s=5.0)) as stream:
        pass
    desk.text(stream, b"x" * 30)
    assert stream.behind and desk.told == []


def test_b47_what_waits_for_a_reader_that_coalesces_is_one_delta_of_a_larger_window() -> None:
    desk = Desk(high_water_bytes=40)
    with desk.seat(origin(slow_reader=SlowReader.COALESCE)) as stream:
        for _ in range(20):
            desk.text(stream, b"x")
        assert not stream.behind and desk.told == []
        published = stream.begin_write(10.0)
        assert published is not None and published.text == "x" * 20


# any order


class Holding(RuleBasedStateMachine):
    """One seat, its engine, calls that come and go: what the router puts together is the output, without gap or repetition."""

    @initialize(replay_bytes=st.sampled_from([1 << 20, 3 * (ENTRY_BYTES + 8)]))
    def begin(self, replay_bytes: int) -> None:
        self.desk = Desk(high_water_bytes=60, replay_bytes=replay_bytes)
        self.small = replay_bytes < 1 << 20
        self.stream = self.desk.streams.add(origin(hold_s=5.0))
        self.stack = ExitStack()
        self.reader: Reader | None = self.stack.enter_context(self.desk.streams.reading(self.stream))
        self.chosen: list[int] = []
        self.text = ""
        self.untaken = 0
        self.events: dict[int, str] = {}
        self.told: list[int] = []
        self.next_no = 1
        self.gap = self.ended = self.over = False

    @property
    def alive(self) -> bool:
        return any(stream is self.stream for stream in self.desk.streams._streams.values())

    @rule()
    def grant_and_commit(self) -> None:
        if self.alive and self.stream.ready is None and not self.ended:
            if self.stream._granted is None:
                self.desk.streams.deliver(SeatGranted(self.stream.number, None, 0), self.desk.now)
            else:
                self.desk.streams.deliver(PromptReady(self.stream.number, 0.0, 0.0, 0.0), self.desk.now)

    @precondition(lambda self: self.stream.ready is not None and not self.ended)
    @rule(size=st.integers(0, 3))
    def engine_steps(self, size: int) -> None:
        taken = sum(one.amount_bytes for one in self.desk.told if isinstance(one, OutputTaken))
        if not self.alive or self.untaken - taken >= 60:
            return
        token = len(self.chosen)
        self.chosen.append(token)
        text = bytes(97 + (token + place) % 26 for place in range(size))
        self.text += text.decode()
        self.untaken += len(text) + 16 if text else 0
        self.desk.streams.deliver(OutputMade(self.stream.number, (token,), text, (token,)), self.desk.now)

    @rule()
    def engine_ends(self) -> None:
        asked = any(isinstance(one, EndSeat) for one in self.desk.told)
        if self.alive and not self.ended and (asked or len(self.chosen) > 5):
            self.ended = True
            self.desk.end(self.stream)

    @precondition(lambda self: self.reader is not None)
    @rule(breaks=st.sampled_from([False, False, False, True]))
    def write(self, breaks: bool) -> None:
        """The next thing is written; a call that breaks may or may not have brought it across."""
        stream, streams = self.stream, self.desk.streams
        assert self.reader is not None and stream.reader is self.reader
        again = stream.next_again()
        if again is not None:
            self.take(again, breaks)
        elif stream.next_before_output() is None:
            published = stream.begin_write(self.desk.now)
            if published is not None:
                ids = ",".join(map(str, published.selected_ids))
                data = f"{published.sequence_no}:{published.text}:{ids}".encode()
                streams.keep(stream, published, data)
                self.take(data, breaks)
                if not breaks:
                    streams.written(stream, self.reader)
            elif stream.terminal() is not None and not breaks:
                self.reader.delivered = self.over = True
                breaks = True
        if breaks:
            self.call_breaks()

    def take(self, data: bytes, lost: bool) -> None:
        if lost:
            return
        number, text, ids = data.decode().split(":")
        assert int(number) == self.next_no
        assert self.events.setdefault(int(number), text) == text
        self.next_no += 1
        self.told += [int(token) for token in ids.split(",") if token]

    @precondition(lambda self: self.reader is not None)
    @rule()
    def call_breaks(self) -> None:
        self.stack.close()
        self.reader = None

    @rule(back=st.integers(0, 2))
    def adopt(self, back: int) -> None:
        """By another call, also while one is there; from an event that may have been read before."""
        stream = self.desk.streams.find(AttemptKey("r", 1))
        if stream is None or self.gap:
            return
        before = self.stack
        self.stack = ExitStack()
        self.reader = self.stack.enter_context(self.desk.streams.reading(stream))
        wanted = max(1, self.next_no - back)
        replay = self.desk.streams.rewind(stream, wanted)
        before.close()
        assert stream.reader is self.reader and not stream.held
        assert replay.next_sequence_no == wanted or (self.small and replay.next_sequence_no > wanted)
        assert list(replay.told[0].token_ids) == list(range(len(replay.told[0].token_ids)))
        if replay.next_sequence_no > self.next_no:
            self.gap = True
            return
        assert replay.told[0].text_bytes == sum(len(self.events[number]) for number in range(1, replay.next_sequence_no))
        self.told = list(replay.told[0].token_ids)
        self.next_no = replay.next_sequence_no

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.desk.now += seconds
        self.desk.streams.look_after(self.desk.now, linger_s=100.0)

    @invariant()
    def books_balance(self) -> None:
        assert sum(isinstance(one, EndSeat) for one in self.desk.told) <= 1
        assert self.desk.streams.replay_bytes == sum(one.replay_bytes for one in self.desk.streams._streams.values())
        assert self.stream.log.held_bytes <= 60 + 19
        if not self.gap:
            assert self.told == list(range(len(self.told)))
            said = "".join(self.events[number] for number in range(1, self.next_no))
            assert self.text.startswith(said)

    def teardown(self) -> None:
        """Whatever happened: with nobody coming back everything is given up, and an end that was taken had everything."""
        if self.over and not self.gap:
            assert "".join(self.events[number] for number in sorted(self.events)) == self.text
        self.stack.close()
        self.desk.now += 10.0
        self.desk.streams.look_after(self.desk.now, linger_s=100.0)
        if not self.ended and self.alive:
            assert any(isinstance(one, EndSeat) for one in self.desk.told)
            self.desk.end(self.stream)
        assert len(self.desk.streams) == 0 and self.desk.streams.replay_bytes == 0


TestHolding = pytest.mark.slow(Holding.TestCase)
TestHolding.settings = settings(max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_a_call_that_has_lost_the_seat_takes_no_news_from_the_one_that_has_it() -> None:
    desk = Desk()
    with desk.seat(origin(hold_s=5.0)) as stream:
        first = stream.reader
        with desk.streams.reading(stream) as second:
            desk.streams.rewind(stream, 1)
            assert first is not None and second.news.is_set() and not first.news.is_set()
            second.news.clear()
            desk.text(stream, b"x")
            assert second.news.is_set() and not first.news.is_set()


def test_a_call_that_is_displaced_is_interrupted() -> None:
    async def scene() -> tuple[bool, SeatStream]:
        desk = Desk()
        with desk.seat(origin(hold_s=5.0)) as stream:
            first = stream.reader
            assert first is not None
            try:
                async with asyncio.timeout(None) as first.patience:
                    with desk.streams.reading(stream):
                        await asyncio.Event().wait()
            except TimeoutError:
                return stream.reader is not first, stream
        return False, stream

    displaced, stream = asyncio.run(scene())
    assert displaced and stream.held
