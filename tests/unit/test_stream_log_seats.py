"""Streams of seats on the event loop: who is told what when calls and seats end in any order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from decode_svc.flow import SlowReader, WindowSizes
from decode_svc.messages import EndSeat, OutputMade, OutputTaken, PromptReady, SeatEnded, SeatGranted, SeatRefused, SeatReport
from decode_svc.streams import SeatOrigin, SeatStream, StreamLimits, Streams
from engine.sequence import Earlier
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage

CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


def origin(
    inter_token_s: float | None = None,
    sends_output: bool = True,
    slow_reader: SlowReader = SlowReader.PAUSE,
    hold_s: float = 0.0,
    attempt: int = 1,
) -> SeatOrigin:
    return SeatOrigin(
        key=AttemptKey("r", attempt),
        traceparent="",
        opened_at=0.0,
        limits=Limits(inter_token_s=inter_token_s),
        first_sequence_no=1,
        sends_output=sends_output,
        prompt_tokens=5,
        earlier=Earlier(),
        prefill_member="",
        slow_reader=slow_reader,
        hold_s=hold_s,
    )


class Desk:
    """Streams with a clock and an inbox that the test reads."""

    def __init__(self, high_water_bytes: int = 100, **limits: Any) -> None:
        self.now = 10.0
        self.told: list[EndSeat | OutputTaken] = []
        windows = WindowSizes(high_water_bytes, 10 * high_water_bytes)
        self.streams = Streams(StreamLimits(windows, **limits), self.told.append, lambda: self.now)

    @contextmanager
    def seat(self, origin: SeatOrigin) -> Iterator[SeatStream]:
        """A new seat and its first call."""
        stream = self.streams.add(origin)
        with self.streams.reading(stream):
            yield stream

    def text(self, stream: SeatStream, text: bytes) -> None:
        self.streams.deliver(OutputMade(stream.number, (1,), text, (1,)), self.now)

    def end(self, stream: SeatStream) -> None:
        report = SeatReport.unknown(0.0, self.now)
        self.streams.deliver(SeatEnded(stream.number, CANCEL, Usage(), report), self.now)


def test_a_seat_that_ends_first_is_gone_with_its_call() -> None:
    desk = Desk()
    with desk.seat(origin()) as stream:
        desk.streams.deliver(SeatGranted(stream.number, None, 0), 10.0)
        desk.streams.deliver(PromptReady(stream.number, 0.0, 0.0, 0.0), 10.0)
        desk.text(stream, b"x")
        desk.end(stream)
        assert len(desk.streams) == 1 and desk.streams.open() == []
        assert [type(stream.next_before_output()) for _ in range(3)] == [SeatGranted, PromptReady, type(None)]
        assert len(desk.streams) == 1
    assert len(desk.streams) == 0
    assert desk.told == []


def test_a_call_that_goes_first_ends_its_seat_once_and_is_forgotten_at_its_end() -> None:
    desk = Desk()
    with desk.seat(origin()) as stream:
        desk.text(stream, b"x")
    assert desk.told == [EndSeat(stream.number, Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE), 10.0)]
    assert len(desk.streams) == 1
    desk.text(stream, b"y" * 5000)  # for nobody: dropped
    assert stream.buffer_bytes <= 1
    desk.end(stream)
    assert len(desk.streams) == 0
    assert desk.streams.deliver(SeatRefused(stream.number, "draining", "", True), 10.0) is None


def test_a_cancel_and_then_a_closed_call_is_one_ending() -> None:
    desk = Desk()
    with desk.seat(origin()) as stream:
        desk.streams.end(stream, CANCEL, 9.0)
        desk.streams.end(stream, CANCEL, 9.5)
    assert desk.told == [EndSeat(stream.number, CANCEL, 9.0)]


def test_a_seat_that_never_reached_the_engine_is_not_ended_there() -> None:
    desk = Desk()
    with desk.seat(origin()) as stream:
        desk.streams.forget(stream)
    assert desk.told == [] and desk.streams.find(AttemptKey("r", 1)) is None
    assert len(desk.streams) == 0


def test_output_that_is_not_taken_runs_the_inter_token_clock_as_network() -> None:
    desk = Desk()
    with desk.seat(origin(inter_token_s=2.0)) as stream:
        desk.text(stream, b"x")
        assert stream.begin_write(10.0) is not None
        desk.streams.look_after(11.9, linger_s=5.0)
        assert desk.told == []
        desk.streams.look_after(12.0, linger_s=5.0)
        desk.streams.look_after(13.0, linger_s=5.0)
    assert desk.told == [EndSeat(stream.number, Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_NETWORK), None)]


def test_a_full_window_is_the_engines_to_judge() -> None:
    desk = Desk(high_water_bytes=20)
    with desk.seat(origin(inter_token_s=2.0)) as stream:
        desk.text(stream, b"xxxx")
        assert stream.behind and desk.streams.slow_readers == 1
        desk.streams.look_after(100.0, linger_s=5.0)
        assert desk.told == []


def test_taken_output_is_told_in_lumps_of_half_a_window() -> None:
    desk = Desk(high_water_bytes=100)
    with desk.seat(origin()) as stream:
        told = []
        for _ in range(6):
            desk.text(stream, b"x")  # costs 17
            stream.begin_write(10.0)
            told.append(stream.end_write())
        assert told == [None, None, OutputTaken(stream.number, 51), None, None, OutputTaken(stream.number, 51)]
        assert desk.streams.buffer_bytes == 0
