"""One try at serving a request: ticket, seat, prefill, relay. What it holds goes back on every way out."""

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from lifecycle.states import Event
from router.admission import Admitted, Place
from router.client_messages import started
from router.ledger import StoreRefused
from router.pool_messages import Dispatch, SeatEnd, open_message, prefill_message
from router.prefill_call import PrefillCall, PrefillFailure, PrefillListener, prefill_at
from router.seat import Committed, Granted, Output, Seat, SeatLost, SeatRefused, open_seat
from router.stop import Stopped
from router.store import Reservations

if TYPE_CHECKING:
    from router.route import Route

_log = logging.getLogger(__name__)

#: For the prefill member's last word after the end: its counts and times belong into the record.
_PREFILL_WORD_S = 0.25
#: Pause before the store is asked again for a budget that other routers hold, doubled by chance.
_SHORT_S = 0.05
#: Causes of an Ended before the commit after which another attempt makes sense.
_REPEATABLE = frozenset({Cause.PREFILL_LOST, Cause.PREFILL_FAILED, Cause.HANDOVER_FAILED})


@dataclass(frozen=True, slots=True)
class Again:
    """The attempt came to nothing. `event` sends the request back (None: it never left the queue for the store), `avoid`
    names members to leave out for a moment."""

    event: Event | None
    cause: Cause
    avoid: tuple[str, ...] = ()
    wait_s: float = 0.0


class Attempt:
    """See the module. `run` once."""

    def __init__(self, route: "Route", place: Place) -> None:
        self._route = route
        self._place = place
        self._cell = route.cell
        self._progress = route.progress
        self._key = AttemptKey(route.request.request_id, route.record.attempt)

    async def run(self) -> Ending | Again:
        """From the ticket to the seat's end. Raises Stopped when the request has to end before it has a seat."""
        async with self._cell.admission.ticket(self._place, self._route.stop) as admitted:
            holds = Reservations(admitted.placement, admitted.claims)
            try:
                shortage = await self._route.ledger.admit(holds)
            except StoreRefused as refusal:
                _log.error("%s", refusal)
                return Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
            if shortage is not None:
                return Again(None, Cause.NONE, wait_s=_SHORT_S * random.uniform(1.0, 2.0))
            self._progress.new_attempt()
            self._progress.admitted()
            self._cell.metrics.attempts.inc()
            return await self._sit(admitted)

    async def _sit(self, admitted: Admitted) -> Ending | Again:
        """The seat, from Open to its end."""
        first_sequence_no = max(1, self._progress.next_sequence_no)
        dispatch, limits, timeout_s = self._dispatch(), self._cell.limits.seat, self._hop_timeout_s()
        opening = open_message(dispatch, admitted.decode, admitted.prefill, first_sequence_no)
        async with open_seat(admitted.decode, opening, limits, traceparent=dispatch.traceparent, timeout_s=timeout_s) as seat:
            self._route.seat = seat
            try:
                with self._route.stop.tells(lambda ending: self._leave(seat, ending)):
                    return await self._seated(admitted, seat, await seat.granted())
            except (SeatRefused, SeatLost) as refusal:
                return self._refused(admitted.placement.decode_member, refusal)
            finally:
                self._route.seat = None

    async def _seated(self, admitted: Admitted, seat: Seat, granted: Granted) -> Ending | Again:
        """A seat was given: the prompt is computed there, or elsewhere and handed over."""
        route = self._route
        self._cell.admission.seated(admitted)
        route.clocks.admitted()
        self._progress.decode_cached_tokens = granted.cached_tokens
        route.ledger.advance(Event.SENT)
        if self._progress.next_sequence_no == 0:
            route.stream.put(started(route.request, 0))
            self._progress.next_sequence_no = 1
        if admitted.prefill is None or granted.grant is None:
            return await self._follow(seat)
        dispatch, timeout_s = self._dispatch(), self._hop_timeout_s()
        request = prefill_message(dispatch, admitted.prefill, granted.grant)
        listener = PrefillListener(
            accepted=lambda: self._cell.admission.accepted(admitted),
            failed=lambda failure: self._prefill_failed(seat, failure),
        )
        async with prefill_at(
            admitted.prefill, request, listener, traceparent=dispatch.traceparent, timeout_s=timeout_s
        ) as prefill:
            with route.stop.tells(lambda ending: prefill.cut(ending.reason.value)):
                return await self._handed_over(seat, prefill)

    async def _handed_over(self, seat: Seat, prefill: PrefillCall) -> Ending | Again:
        outcome = await self._follow(seat)
        if self._progress.committed is not None:
            self._progress.prefill = await prefill.settled(_PREFILL_WORD_S)
        return outcome

    async def _follow(self, seat: Seat) -> Ending | Again:
        """Reads the seat to its end."""
        try:
            while True:
                event = await seat.read()
                if isinstance(event, Output):
                    await self._relay(event)
                elif isinstance(event, Committed):
                    self._committed(event)
                elif isinstance(event, SeatEnd):
                    return self._ended(event)
                else:
                    raise SeatLost(f"{type(event).__name__} out of turn")
        except (SeatLost, SeatRefused) as lost:
            return self._lost(lost)

    async def _relay(self, output: Output) -> None:
        """Passes one output on as it is. While the client's buffer is full the seat is not read: decode pauses."""
        progress, stream, stop = self._progress, self._route.stream, self._route.stop
        now = time.monotonic()
        if progress.last_output_at:
            self._cell.metrics.inter_token.observe(now - progress.last_output_at)
        progress.output(output, now)
        if not output.response:
            return
        while stream.full and not stream.gone and stop.ending is None:
            try:
                await stop.until(stream.changed())
            except Stopped:
                break
        if stream.full or stream.gone or progress.gap:
            progress.discarded(output)
            return
        stream.put(output.response, output.text_bytes)
        progress.next_sequence_no = output.next_sequence_no

    def _committed(self, event: Committed) -> None:
        progress, now = self._progress, time.monotonic()
        progress.committed = event
        if not progress.first_token_at:
            progress.first_token_at = now
            self._route.clocks.first_token(now)
        self._cell.admission.committed(self._place)
        self._route.ledger.advance(Event.COMMITTED)

    def _ended(self, event: SeatEnd) -> Ending | Again:
        progress, record = self._progress, self._route.record
        progress.seat_end = event
        for name, amount in event.released:
            record.released[name] = record.released.get(name, 0) + amount
        if self._route.stop.ending is not None:
            return self._route.stop.ending
        if progress.committed is None and progress.prefill_failure is not None:
            return self._after_prefill(progress.prefill_failure)
        if progress.committed is None and event.ending.cause in _REPEATABLE:
            return Again(Event.PREFILL_LOST, event.ending.cause, self._prefill_names())
        return self._route.named(event.ending)

    def _lost(self, lost: Exception) -> Ending | Again:
        progress = self._progress
        if self._route.stop.ending is not None:
            return self._route.stop.ending
        if progress.committed is None and progress.prefill_failure is not None:
            return self._after_prefill(progress.prefill_failure)
        _log.warning("decode member %s is lost: %s", self._route.record.decode_member, lost)
        return Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST)

    def _refused(self, name: str, refusal: Exception) -> Ending | Again:
        """No seat: back to the queue, unless no other member could give one either."""
        if self._route.stop.ending is not None:
            return self._route.stop.ending
        self._cell.metrics.refusals.inc(1, "member_refused")
        _log.info("decode member %s gave no seat: %s", name, refusal)
        if isinstance(refusal, SeatRefused) and not refusal.retryable:
            return Ending(FinishReason.TRANSPORT_ERROR, Cause.NO_MEMBER)
        return Again(Event.REFUSED, Cause.NO_MEMBER, (name,))

    def _prefill_failed(self, seat: Seat, failure: PrefillFailure) -> None:
        """The hand-over will not be completed: decode is told, and its Ended starts the next attempt."""
        if self._progress.committed is None and self._route.stop.ending is None:
            _log.warning("prefill member %s: %s", self._route.record.prefill_member, failure.label)
            self._progress.prefill_failure = failure
            seat.prefill_lost(failure.cause.value)

    def _after_prefill(self, failure: PrefillFailure) -> Ending | Again:
        if failure.retryable:
            return Again(Event.PREFILL_LOST, failure.cause, self._prefill_names())
        if failure.label == "model_error":
            return Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
        return Ending(FinishReason.TRANSPORT_ERROR, failure.cause)

    def _leave(self, seat: Seat, ending: Ending) -> None:
        """The request has to end: the member is told why, in the words of the port."""
        self._progress.cancel_sent_at = time.monotonic()
        if ending.cause is Cause.CLIENT_GONE:
            seat.cancel(ending.cause.value)
        elif ending.reason is FinishReason.DEADLINE_EXCEEDED:
            seat.cancel(ending.reason.value)
        else:
            seat.cancel(FinishReason.CANCELLED.value)

    def _prefill_names(self) -> tuple[str, ...]:
        name = self._route.record.prefill_member
        return (name,) if name else ()

    def _dispatch(self) -> Dispatch:
        route = self._route
        return Dispatch(self._key, route.request, route.arrival.deadlines, route.record.traceparent, time.monotonic())

    def _hop_timeout_s(self) -> float | None:
        """A last resort for a member that ignores its clocks: what is left of the overall clock, and the cancel's grace."""
        deadlines = self._route.arrival.deadlines
        left_s = deadlines.remaining(time.monotonic(), deadlines.limits.overall_s)
        return None if left_s is None else left_s + self._cell.limits.seat.cancel_grace_s + 1.0
