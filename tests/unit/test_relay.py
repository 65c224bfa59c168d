"""The readers of one request's stream, and what happens when the last one leaves."""

import asyncio
import time

import pytest

from lifecycle.finish import Cause, Ending, FinishReason
from router.presence import Presence
from router.relay import Elsewhere, Reader, RequestStream, TooManyReaders
from router.stop import Stop, Stopped
from router.stream_log import LogBounds, LogEnded, StreamLog
from rpc.clocks import STOOD_STILL_S
from rpc.status import StatusError, cancelled

GONE = Ending(FinishReason.CANCELLED, Cause.CLIENT_GONE)


class Wire:
    """A connection: what was written, and a gate that holds writing."""

    def __init__(self, *, stalled: bool = False) -> None:
        self.written: list[bytes] = []
        self.open = asyncio.Event()
        if not stalled:
            self.open.set()

    async def write(self, event: bytes) -> None:
        await self.open.wait()
        self.written.append(event)


class Request:
    """A stream with its stop."""

    def __init__(self, detach_s: float | None = None, *, fails: bool = False, send_timeout_s: float = 1.0) -> None:
        self.stop = Stop()
        self.presence = Presence(self.stop, detach_s)
        self.overruns = 0
        self.stream = RequestStream(
            StreamLog(LogBounds(10, 40)),
            self.presence,
            send_timeout_s=send_timeout_s,
            most_readers=2,
            overrun=self._overrun if fails else None,
        )

    def _overrun(self) -> None:
        self.overruns += 1

    def follow(self, wire: Wire, next_no: int = 0) -> tuple[Reader, "asyncio.Task[None]"]:
        reader = self.stream.reader(next_no)
        return reader, asyncio.create_task(reader.pump(wire.write))


async def test_a_stream_is_written_in_order_and_ends_once() -> None:
    one, wire, late = Request(), Wire(), Wire()
    reader, pumping = one.follow(wire)
    one.stream.put(b"a", 1)
    await asyncio.sleep(0)
    one.stream.put(b"b", 2)
    _, second = one.follow(late, 1)
    one.stream.end(b"end", None)
    await pumping
    await second
    assert wire.written == [b"a", b"b", b"end"] and late.written == [b"b", b"end"]
    assert one.stream.empty and one.stream.sent_text_bytes == 3 and reader.next_no == 3
    for call in (lambda: one.stream.put(b"c"), lambda: one.stream.end(b"c", None)):
        with pytest.raises(LogEnded):
            call()
    reader.close()
    assert one.stop.ending is None, "leaving after the end is no reason to end"


async def test_every_reader_gets_the_status() -> None:
    one, wires = Request(), [Wire(), Wire()]
    tasks = [one.follow(wire)[1] for wire in wires]
    one.stream.end(b"end", cancelled("over"))
    for task in tasks:
        with pytest.raises(StatusError, match="over"):
            await task
    assert [wire.written for wire in wires] == [[b"end"], [b"end"]]


async def test_b47_a_full_stream_says_so_and_room_is_told() -> None:
    one, wire = Request(), Wire(stalled=True)
    _, pumping = one.follow(wire)
    one.stream.put(b"x" * 10)
    assert one.stream.full and one.stream.unsent_bytes == 10
    changed = one.stream.changed()
    wire.open.set()
    await asyncio.wait_for(changed, 1)
    assert not one.stream.full
    one.stream.end(None, None)
    await pumping


async def test_b47_a_reader_that_may_not_be_slow_ends_the_request() -> None:
    one = Request(fails=True)
    one.stream.reader(0)
    one.stream.put(b"x" * 9)
    assert one.overruns == 0
    one.stream.put(b"x")
    assert one.overruns == 1


async def test_b47_a_reader_that_is_left_behind_is_told_even_in_the_middle_of_a_write() -> None:
    one, stalled, quick = Request(), Wire(stalled=True), Wire()
    behind, stuck = one.follow(stalled)
    _, pumping = one.follow(quick)
    for _ in range(6):
        await asyncio.wait_for(asyncio.shield(one.stream.changed()), 0.01) if one.stream.full else None
        one.stream.put(b"x" * 9)
        await asyncio.sleep(0)
    with pytest.raises(StatusError, match="not kept any more"):
        await stuck
    behind.close()
    assert one.stop.ending is None and not stalled.written
    one.stream.end(b"end", None)
    await pumping
    assert len(quick.written) == 7


async def test_a_request_whose_client_left_is_ended_and_gets_nothing_more() -> None:
    one = Request()
    reader = one.stream.reader(0)
    one.stream.put(b"x" * 10)
    changed = one.stream.changed()
    reader.close()
    assert one.stop.ending == GONE and one.stream.gone and changed.done() and not one.stream.full
    one.stream.put(b"y")
    assert one.stream.log.next_no == 1 and one.stream.unsent_bytes == 0
    one.stream.end(b"end", None)
    assert one.stream.log.next_no == 2


async def test_the_last_reader_counts_not_the_first() -> None:
    one = Request()
    first, second = one.stream.reader(0), one.stream.reader(0)
    first.close()
    assert one.stop.ending is None
    second.close(deadline=True)
    assert one.stop.ending == Ending(FinishReason.DEADLINE_EXCEEDED, Cause.RPC_DEADLINE)


async def test_a_detached_request_runs_on_until_its_time_is_over() -> None:
    one = Request(detach_s=0.02)
    one.stream.reader(0).close()
    assert one.stop.ending is None and not one.stream.gone
    one.stream.put(b"x" * 12)
    assert not one.stream.full, "without a reader more may wait"
    with pytest.raises(Stopped) as stopped:
        await one.stop.sleep(2)
    assert stopped.value.ending == Ending(FinishReason.CANCELLED, Cause.DETACH_TIMEOUT)


async def test_a_reader_that_comes_back_stops_the_detached_clock() -> None:
    one = Request(detach_s=0.02)
    one.stream.reader(0).close()
    back = one.stream.reader(0)
    await asyncio.sleep(0.04)
    assert one.stop.ending is None
    back.close()
    with pytest.raises(Stopped):
        await one.stop.sleep(2)


async def test_a_request_from_another_router_waits_for_its_client_a_while() -> None:
    one = Request()
    one.presence.expect(0.01)
    with pytest.raises(Stopped) as stopped:
        await one.stop.sleep(2)
    assert stopped.value.ending == GONE


async def test_a_router_that_stood_still_does_not_take_clients_for_gone() -> None:
    """Who came meanwhile was not heard. It waits again; the first step after its sleep is the timer's."""
    one = Request()
    one.presence.expect(0.05)
    time.sleep(0.06 + STOOD_STILL_S)  # noqa: ASYNC251  (it stands still)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert one.stop.ending is None and not one.presence.given_up
    with pytest.raises(Stopped) as stopped:
        await one.stop.sleep(2)
    assert stopped.value.ending == GONE


async def test_what_is_left_after_the_end_is_taken_in_time_or_never() -> None:
    one, wire = Request(send_timeout_s=0.02), Wire(stalled=True)
    _, pumping = one.follow(wire)
    one.stream.put(b"x")
    one.stream.end(b"end", None)
    with pytest.raises(StatusError, match="not taken in time"):
        await pumping


async def test_readers_are_bounded() -> None:
    one = Request()
    readers = [one.stream.reader(0) for _ in range(2)]
    with pytest.raises(TooManyReaders):
        one.stream.reader(0)
    readers[0].close()
    one.stream.reader(0)


async def test_readers_of_a_request_that_moved_go_after_it() -> None:
    one, wire = Request(), Wire()
    _, pumping = one.follow(wire)
    one.stream.put(b"a")
    one.stream.move()
    with pytest.raises(Elsewhere) as elsewhere:
        await pumping
    assert wire.written == [b"a"] and elsewhere.value.next_no == 1 and one.stream.ended
    one.stream.put(b"late")
    assert one.stream.log.next_no == 1
