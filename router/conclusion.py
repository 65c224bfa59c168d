"""The end of a request: what is left is delivered, the terminal is fixed once, its event goes out, then the status."""

import logging
from typing import TYPE_CHECKING

from lifecycle.finish import COMPLETE, Cause, Ending, FinishReason
from lifecycle.record import RequestRecord
from lifecycle.states import Event, State
from router import endings
from router.client_messages import completed
from router.observing import observe_before_begun, observe_end
from router.progress import note_cancel, with_cancel_times
from router.request import OutputMode
from router.spans import end_spans
from router.stop import Stopped
from rpc import clocks
from rpc.status import internal

if TYPE_CHECKING:
    from router.route import Route

_log = logging.getLogger(__name__)


async def conclude(route: "Route", ending: Ending) -> None:
    """Ends a request that holds nothing any more.

    What was asked for until `_fix` counts; what comes after it has come after the end.
    """
    if not route.ledger.created:
        route.stream.end(None, internal(route.request.request_id))
        return
    ending = await _deliver(route, ending)
    await route.ledger.close()
    if route.ledger.disowned:
        route.give_up()
        return
    ending = _first(route, ending)
    if ending.cause is Cause.CLIENT_CANCEL:
        await route.ledger.learn_cancel()
    _fix(route, ending)
    standing = await route.ledger.finish()
    if route.ledger.disowned:
        route.give_up()
        return
    route.standing = standing
    await route.leave_seat()
    answer_ended(route, standing)
    observe_end(route.cell.metrics, standing)
    _note_end(route, standing)


def answer_before_begun(route: "Route", record: RequestRecord) -> None:
    """A cancel had come before the request: it has ended without any work."""
    route.standing = record
    answer_ended(route, record)
    observe_before_begun(route.cell.metrics, record)
    _note_end(route, record)


def answer_ended(route: "Route", record: RequestRecord) -> None:
    """Tells the client how the request ended, and the RPC's status."""
    end = route.progress.seat_end
    final_only = route.request.delivery.output_mode is OutputMode.FINAL_ONLY
    text, returned = (end.text, end.returned) if end is not None and final_only else ("", b"")
    route.stream.end(completed(record, route.stream.log.next_no, text, returned), endings.status_of(record))


def _note_end(route: "Route", record: RequestRecord) -> None:
    """In the trace, in the log, and in what people are shown."""
    route.cell.ends.add(record)
    end_spans(route.cell.tracing, route.arrival.span, record, route.progress)
    said = {
        "state": record.state.value,
        "finish_reason": record.ending.reason.value if record.ending else "",
        "cause": record.ending.cause.value if record.ending else "",
        "returned_tokens": record.usage.returned_tokens,
        "total_s": round(record.timings.total_s, 6),
    }
    _log.info("request ended", extra=said)


async def _deliver(route: "Route", ending: Ending) -> Ending:
    """DRAINING: waits until a reader has everything, or none is there. Returns the ending that holds after that."""
    ending = _first(route, ending)
    if ending.state(route.progress.usage().returned_tokens) is not State.FINISHED or not _can_finish(route, ending):
        return ending
    if route.record.state is State.PREFILLING:  # a member that ended well without telling of its commit
        route.ledger.advance(Event.COMMITTED)
    if route.record.state is not State.DRAINING:  # a request from another router may be that far
        route.ledger.advance(Event.STOPPED)
    stream = route.stream
    if stream.read and not stream.empty:
        route.keep_end()
    try:
        while stream.read and not stream.empty:
            await route.stop.until(stream.changed())
    except Stopped:
        pass
    return _first(route, ending)


def _can_finish(route: "Route", ending: Ending) -> bool:
    """Whether the record has an edge to FINISHED: not when a clock ran out while the request waited for another member."""
    state = route.record.state
    return state in (State.DECODING, State.DRAINING) or (state is State.PREFILLING and ending.reason in COMPLETE)


def _first(route: "Route", ending: Ending) -> Ending:
    """An early end that was asked for goes before one that came by itself, unless everything is delivered already."""
    asked = route.stop.ending
    if asked is None:
        return ending
    return asked if asked.reason is FinishReason.CANCELLED or not route.stream.empty else ending


def _fix(route: "Route", ending: Ending) -> None:
    """Enters the terminal state, with everything that the record keeps."""
    record, progress, stream = route.record, route.progress, route.stream
    now, wall = clocks.monotonic(), clocks.wall()
    record.ending = ending
    record.terminal_sequence_no = stream.log.next_no
    record.usage = progress.usage()
    record.sent_bytes = stream.sent_text_bytes
    record.held_bytes = progress.seat_end.held_bytes if progress.seat_end else 0
    record.timings = progress.timings(now, stream.send_s)
    state = ending.state(record.usage.returned_tokens)
    if state is State.FINISHED and record.state is State.DRAINING:
        record.advance(Event.DELIVERED, wall)
    elif state is State.CANCELLED:
        if record.state is not State.CANCEL_REQUESTED:
            record.advance(Event.CANCEL, wall)
        note_cancel(record, progress, wall, now)
        record.timings = with_cancel_times(record)
        record.advance(Event.RELEASED, wall)
    else:
        record.advance(Event.FAIL, wall)
