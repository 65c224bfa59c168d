"""What one more seat costs a decode member in bytes of Python objects: its scheduler's part and its stream's."""

import gc
import tracemalloc

from bench.growth.member_cases import MANY, decode, opening
from decode_svc.messages import OutputMade
from decode_svc.replay_log import ReplayLog
from decode_svc.scheduler import Scheduler
from decode_svc.seat_stream import SeatOrigin, SeatStream
from decode_svc.tenure import Tenure
from engine.sequence import Sequence
from engine.sequence_spec import Earlier
from lifecycle.deadlines import Limits
from lifecycle.record import AttemptKey
from text.detokeniser import Detokeniser, plain_table

#: Where a seat can be, as tokens that came out of it.
SEAT_KINDS = {"waiting for its prompt": 0, "running, 1,000 tokens out": 1000, "running, 8,000 tokens out": 8000}
TABLE = plain_table([bytes([value % 26 + 97]) for value in range(256)])
#: Default of replay_bytes: what a seat keeps to be sent again.
REPLAY_BYTES = 256 * 1024
OUTPUT_BYTES = 80


def seat_bytes(tokens: int, seats: int = 16) -> float:
    """Bytes of one more seat out of which so many tokens came; the mean of some `seats`."""
    scheduler = decode(MANY, lambda spec: Sequence(spec, lambda policy: Detokeniser(TABLE, policy)))
    kept: list[SeatStream] = []
    _seats(scheduler, kept, range(seats), tokens)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        _seats(scheduler, kept, range(seats, 2 * seats), tokens)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / seats
    finally:
        tracemalloc.stop()


def _seats(scheduler: Scheduler, kept: list[SeatStream], numbers: range, tokens: int) -> None:
    scheduler.accept([opening(number, 100_000) for number in numbers], 0.0)
    scheduler.take_events()
    for number in numbers:
        stream = _stream(number)
        kept.append(stream)
        seat = scheduler.seats.get(number)
        assert seat is not None
        if tokens:
            seat.sequence.completed(len(seat.sequence.given_token_ids))
        for token in range(tokens):
            step = seat.sequence.choose(97 + token % 26, 0.0)
            seat.sequence.completed(1)
            _send(stream, OutputMade(number, (97,), step.text, step.token_ids))


def _send(stream: SeatStream, made: OutputMade) -> None:
    """As the writer of a seat's call does."""
    stream.deliver(made, 0.0)
    published = stream.begin_write(0.0)
    if published is not None:
        stream.keep(published, b"x" * OUTPUT_BYTES)
        stream.end_write()


def _stream(number: int) -> SeatStream:
    origin = SeatOrigin(
        key=AttemptKey(f"r{number}", 1),
        traceparent="",
        opened_at=0.0,
        limits=Limits(),
        first_sequence_no=1,
        sends_output=True,
        prompt_tokens=8,
        earlier=Earlier(),
        prefill_member="",
        hold_s=10.0,
    )
    tenure = Tenure(origin.hold_s)
    tenure.begin()
    return SeatStream(number, origin, 64 * 1024, tenure, ReplayLog(REPLAY_BYTES, Earlier()))
