"""Streams of seats on the event loop: who is told what when calls and seats end in any order."""

from decode_svc.messages import EndSeat, OutputMade, OutputTaken, PromptReady, SeatEnded, SeatGranted, SeatRefused, SeatReport
from decode_svc.streams import SeatOrigin, SeatStream, Streams
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from lifecycle.usage import Usage

CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


def origin(inter_token_s: float | None = None, sends_output: bool = True) -> SeatOrigin:
    return SeatOrigin(AttemptKey("r", 1), "", 0.0, inter_token_s, 1, sends_output, 5, "")


class Desk:
    """Streams with a clock and an inbox that the test reads."""

    def __init__(self, high_water_bytes: int = 100) -> None:
        self.now = 10.0
        self.told: list[EndSeat | OutputTaken] = []
        self.streams = Streams(high_water_bytes, self.told.append, lambda: self.now)

    def text(self, stream: SeatStream, text: bytes) -> None:
        self.streams.deliver(OutputMade(stream.number, (1,), text, (1,)), self.now)

    def end(self, stream: SeatStream) -> None:
        report = SeatReport.unknown(0.0, self.now)
        self.streams.deliver(SeatEnded(stream.number, CANCEL, Usage(), report), self.now)


def test_a_seat_that_ends_first_is_gone_with_its_call() -> None:
    desk = Desk()
    with desk.streams.seat(origin()) as stream:
        desk.streams.deliver(SeatGranted(stream.number, None, 0), 10.0)
        desk.streams.deliver(PromptReady(stream.number, 0.0, 0.0, 0.0), 10.0)
        desk.text(stream, b"x")
        desk.end(stream)
        assert [type(stream.next_before_output()) for _ in range(3)] == [SeatGranted, PromptReady, type(None)]
        assert len(desk.streams) == 1
    assert len(desk.streams) == 0
    assert desk.told == []


def test_a_call_that_goes_first_ends_its_seat_once_and_is_forgotten_at_its_end() -> None:
    desk = Desk()
    with desk.streams.seat(origin()) as stream:
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
    with desk.streams.seat(origin()) as stream:
        desk.streams.end(stream, CANCEL, 9.0)
        desk.streams.end(stream, CANCEL, 9.5)
    assert desk.told == [EndSeat(stream.number, CANCEL, 9.0)]


def test_a_seat_that_never_reached_the_engine_is_not_ended_there() -> None:
    desk = Desk()
    with desk.streams.seat(origin()) as stream:
        desk.streams.forget(stream)
    assert desk.told == []
    assert len(desk.streams) == 0


def test_output_that_is_not_taken_runs_the_inter_token_clock_as_network() -> None:
    desk = Desk()
    with desk.streams.seat(origin(inter_token_s=2.0)) as stream:
        desk.text(stream, b"x")
        assert stream.begin_write(10.0) is not None
        desk.streams.look_after(11.9, linger_s=5.0)
        assert desk.told == []
        desk.streams.look_after(12.0, linger_s=5.0)
        desk.streams.look_after(13.0, linger_s=5.0)
    assert desk.told == [EndSeat(stream.number, Ending(FinishReason.DEADLINE_EXCEEDED, Cause.INTER_TOKEN_NETWORK), None)]


def test_a_full_window_is_the_engines_to_judge() -> None:
    desk = Desk(high_water_bytes=20)
    with desk.streams.seat(origin(inter_token_s=2.0)) as stream:
        desk.text(stream, b"xxxx")
        assert stream.behind and desk.streams.slow_readers == 1
        desk.streams.look_after(100.0, linger_s=5.0)
        assert desk.told == []


def test_taken_output_is_told_in_lumps_of_half_a_window() -> None:
    desk = Desk(high_water_bytes=100)
    with desk.streams.seat(origin()) as stream:
        told = []
        for _ in range(6):
            desk.text(stream, b"x")  # costs 17
            stream.begin_write(10.0)
            told.append(stream.end_write())
        assert told == [None, None, OutputTaken(stream.number, 51), None, None, OutputTaken(stream.number, 51)]
        assert desk.streams.buffer_bytes == 0
