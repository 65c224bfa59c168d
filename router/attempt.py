"""One try at serving a request: ticket, seat, prefill, relay. What it holds goes back on every way out."""

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from lifecycle.states import Event, State
from router.admission import Admitted, Place
from router.client_messages import started
from router.ledger import StoreRefused
from router.moving import Source
from router.observing import observe_gap
from router.pool_messages import Dispatch, Output, SeatEnd, open_message, prefill_message
from router.prefill_call import PrefillCall, PrefillFailure, PrefillListener, prefill_at
from router.resume import resume_of
from router.seat import DUPLICATE_ATTEMPT, PREFIX_GONE, Committed, Granted, Paused, Seat, SeatLost, SeatRefused, seat_stream
from router.stop import Stopped
from router.store import Reservations
from router.takeover import Takeover
from rpc import clocks

if TYPE_CHECKING:
    from router.route import Route

_log = logging.getLogger(__name__)

#: For the prefill member's last word after the end: its counts and times belong into the record.
_PREFILL_WORD_S = 0.25
#: Pause before the store is asked again for a budget that other routers hold, doubled by chance.
_SHORT_S = 0.05
#: The ending of a prompt that a model can not compute.
MODEL_FAILED = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)
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
    source: Source | None = None


class Attempt:
    """See the module. `run` once."""

    def __init__(self, route: "Route", place: Place) -> None:
        self._route = route
        self._place = place
        self._cell = route.cell
        self._progress = route.progress
        self._pausing = False

    async def run(self) -> Ending | Again:
        """From the ticket to the seat's end, with the record made before it if it is not there yet.

        Raises Stopped when the request has to end before it has a seat, and what `Ledger.create` raises.
        """
        route = self._route
        async with self._cell.admission.ticket(self._place, route.stop) as admitted, AsyncExitStack() as stack:
            seat = None
            holds = Reservations(admitted.placement, admitted.claims)
            try:
                if not route.ledger.created:
                    # The stream comes about while the store is asked.
                    seat = await self._reach(admitted, stack)
                    shortage = await route.ledger.begin(holds)
                else:
                    shortage = await route.ledger.admit(holds)
            except StoreRefused as refusal:
                _log.error("%s", refusal)
                return Ending(FinishReason.TRANSPORT_ERROR, Cause.STORE_LOST)
            if shortage is not None:
                return Again(None, Cause.NONE, wait_s=_SHORT_S * random.uniform(1.0, 2.0))
            self._progress.new_attempt(moved=admitted.moved)
            self._progress.admitted()
            self._cell.metrics.attempts.inc()
            self._cell.metrics.placements.inc(1, _way(admitted))
            if seat is None or seat.over:  # a member waits for its first message for some seconds only
                seat = await self._reach(admitted, stack)
            return await self._sit(admitted, seat, stack)

    async def take_over(self, takeover: Takeover) -> Ending | Again:
        """From another router's open seat to its end."""
        seat, admitted, route = takeover.seat, self._place.admitted, self._route
        async with takeover.stack as stack:
            route.seat = seat
            try:
                with route.stop.tells(lambda ending: self._leave(seat, ending)):
                    outcome = await self._taken_over(takeover, admitted)
            finally:
                route.seat = None
            return await self._left(seat, stack, outcome)

    async def _taken_over(self, takeover: Takeover, admitted: Admitted | None) -> Ending | Again | Paused:
        route, seat, adopted = self._route, takeover.seat, takeover.adopted
        if admitted is not None:
            self._cell.admission.seated(admitted)
        route.clocks.admitted()
        if adopted.committed is not None:
            self._committed(adopted.committed)
        elif adopted.opening.HasField("prefill"):
            # The call to the prefill member went with the other router. A hand-over that is complete all the same goes on.
            self._prefill_failed(seat, PrefillFailure(Cause.PREFILL_LOST, "router_lost", retryable=True))
        return await self._follow(seat)

    async def _reach(self, admitted: Admitted, stack: AsyncExitStack) -> Seat:
        """A stream to the decode member, closed with the stack."""
        stream = seat_stream(
            admitted.decode,
            self._cell.limits.seat,
            traceparent=self._route.record.traceparent,
            timeout_s=self._hop_timeout_s(),
        )
        return await stack.enter_async_context(stream)

    async def _sit(self, admitted: Admitted, seat: Seat, stack: AsyncExitStack) -> Ending | Again:
        """The seat, from Open to its end; its stream is closed with the stack."""
        first_sequence_no, hold_s = max(1, self._progress.next_sequence_no), self._cell.limits.seat.hold_s
        source = self._source(admitted)
        writer = source.member if source is not None else admitted.prefill
        moved = source is not None
        opening = open_message(
            self._dispatch(),
            admitted.decode,
            writer,
            first_sequence_no,
            hold_s=hold_s,
            moved=moved,
            most_computed_tokens=admitted.most_computed_tokens,
        )
        seat.open(opening)
        self._route.seat = seat
        try:
            with self._route.stop.tells(lambda ending: self._leave(seat, ending)):
                outcome = await self._seated(admitted, seat, await seat.granted(), source)
        except (SeatRefused, SeatLost) as refusal:
            return self._refused(admitted, refusal)
        finally:
            self._route.seat = None
        return await self._left(seat, stack, outcome)

    async def _seated(self, admitted: Admitted, seat: Seat, granted: Granted, source: Source | None) -> Ending | Again | Paused:
        """A seat was given: the prompt is computed there, or elsewhere and handed over, or the KV comes from `source`."""
        route = self._route
        self._cell.admission.seated(admitted)
        route.clocks.admitted()
        for choice in self._progress.choices:
            if choice.cancelled and choice.end is None:
                seat.cancel_choice(choice.index, Cause.CLIENT_CANCEL.value)
        if source is None:
            self._progress.decode_cached_tokens = granted.cached_tokens
        route.record.decode_incarnation = admitted.decode.info.incarnation
        route.ledger.advance(Event.SENT)
        if source is not None:
            self._tell_started()
            return await self._moved(seat, source, granted)
        if admitted.prefill is None or granted.grant is None:
            self._tell_started()
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
            self._tell_started()  # the prompt goes first: nobody waits for this event as for the first token
            with route.stop.tells(lambda ending: prefill.cut(ending.reason.value)):
                return await self._handed_over(seat, prefill)

    def _tell_started(self) -> None:
        if self._progress.next_sequence_no == 0:
            self._route.stream.put(started(self._route.request, 0))
            self._progress.next_sequence_no = 1

    async def _handed_over(self, seat: Seat, prefill: PrefillCall) -> Ending | Again | Paused:
        self._progress.prefilling = prefill
        outcome = await self._follow(seat)
        if self._progress.committed is not None:
            self._progress.prefill = await prefill.settled(_PREFILL_WORD_S)
        self._progress.prefill_cached_tokens = prefill.cached_tokens
        return outcome

    async def _moved(self, seat: Seat, source: Source, granted: Granted) -> Ending | Again | Paused:
        """The seat that is left writes the KV; it ends when this one has it, or when this one has come to nothing."""
        push = asyncio.create_task(self._push(seat, source, granted), name=f"move to {seat.member.name}")
        try:
            return await self._follow(seat)
        finally:
            await self._route.leave_source()
            await asyncio.wait([push])

    async def _push(self, seat: Seat, source: Source, granted: Granted) -> None:
        done = await source.push(granted.grant)
        self._cell.metrics.moves.inc(1, "ok" if done.ok else "failed")
        if not done.ok:
            self._prefill_failed(seat, PrefillFailure(Cause.HANDOVER_FAILED, done.cause, retryable=True))

    async def _follow(self, seat: Seat) -> Ending | Again | Paused:
        """Reads the seat to its end, or until its sequence stands still."""
        try:
            while True:
                event = await seat.read()
                if isinstance(event, Output):
                    await self._relay(event)
                    self._look_after(seat)
                elif isinstance(event, Committed):
                    self._committed(event)
                    self._look_after(seat)
                elif isinstance(event, Paused):
                    return event
                elif isinstance(event, Granted) and self._route.takeover is not None:
                    self._progress.decode_cached_tokens = event.cached_tokens
                elif isinstance(event, SeatEnd):
                    if event.last is not None:
                        await self._relay(event.last)
                    return self._ended(event)
                else:
                    raise SeatLost(f"{type(event).__name__} out of turn")
        except (SeatLost, SeatRefused) as lost:
            if isinstance(lost, SeatLost) and lost.adopted:
                await self._route.ledger.seat_taken()
            return self._lost(lost)

    def _look_after(self, seat: Seat) -> None:
        """A member that drains is left while it still can be, when another one has room."""
        if not seat.member.load.draining or self._pausing or self._route.stop.ending is not None:
            return
        if self._progress.choices:
            return  # several outputs do not move: what has not ended when the member stops is computed again elsewhere
        if self._cell.admission.could_move(self._place, self._progress.selected_tokens):
            self._pausing = True
            seat.pause()

    async def _left(self, seat: Seat, stack: AsyncExitStack, outcome: Ending | Again | Paused) -> Ending | Again:
        """Nothing is read from the seat any more. The seat of an output that ended stays open until the request's end stands."""
        if isinstance(outcome, Paused):
            return self._moves(seat, stack.pop_all(), outcome)
        if self._route.ledger.disowned:
            seat.leave_end()
        elif isinstance(outcome, Ending) and seat.ended and self._route.stop.ending is None:
            await self._route.seat_ended(seat, stack.pop_all())
        return outcome

    def _moves(self, seat: Seat, stack: AsyncExitStack, paused: Paused) -> Ending | Again:
        """The sequence stands still: the next attempt takes it from here."""
        progress, place, admission = self._progress, self._place, self._cell.admission
        progress.paused(paused.selected, paused.held_log_probs)
        source = Source(seat, stack, paused, lambda: admission.not_moved(place))
        return Again(Event.DECODE_LOST, Cause.MOVED, source=source)

    def _source(self, admitted: Admitted) -> Source | None:
        """The seat that this attempt's KV is to come from; None when it is to be computed."""
        source = self._route.source
        return source if admitted.moved and source is not None and source.usable else None

    async def _relay(self, output: Output) -> None:
        """Passes one output on as it is. While the client's buffer is full the seat is not read: decode pauses."""
        progress, stream, stop = self._progress, self._route.stream, self._route.stop
        now = clocks.monotonic()
        if progress.last_output_at and not progress.choices:
            observe_gap(self._cell.metrics, now - progress.last_output_at, self._route.record.traceparent)
        progress.output(output, now)
        if not output.response:
            return
        while (full := stream.full) and not stream.gone and stop.ending is None:
            try:
                await stop.until(stream.changed())
            except Stopped:
                break
        if full or stream.gone or progress.gap:
            progress.discarded(output)
            return
        stream.put(output.response, output.text_bytes)
        progress.next_sequence_no = output.next_sequence_no

    def _committed(self, event: Committed) -> None:
        progress, now = self._progress, clocks.monotonic()
        progress.committed, progress.decoding_since = event, now
        if not progress.first_token_at:
            progress.first_token_at = now
            self._route.clocks.first_token(now)
        self._cell.admission.committed(self._place)
        if self._route.record.state is State.PREFILLING:  # a request from another router may be further
            self._route.ledger.advance(Event.COMMITTED)
        self._route.source_served()

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
        # A member that does not tell how each choice ended knows nothing of choices.
        ending = progress.ending if progress.choices else event.ending
        if ending is None or event.ending.reason is FinishReason.TRANSPORT_ERROR:  # it could not go on; another member can
            return self._decode_lost(event.ending.cause.value)
        return self._route.named(ending)

    def _lost(self, lost: Exception) -> Ending | Again:
        progress = self._progress
        if self._route.stop.ending is not None:
            return self._route.stop.ending
        if progress.committed is None and progress.prefill_failure is not None:
            return self._after_prefill(progress.prefill_failure)
        return self._decode_lost(str(lost))

    def _decode_lost(self, why: str) -> Ending | Again:
        """The seat is gone before its end: another member goes on from what was told, unless the client missed some of it."""
        name = self._route.record.decode_member
        if self._progress.ending is not None:  # all outputs had ended before
            return self._route.named(self._progress.ending)
        _log.warning("decode member %s is lost: %s", name, why)
        if self._progress.gap:
            return Ending(FinishReason.TRANSPORT_ERROR, Cause.DECODE_LOST)
        return Again(Event.DECODE_LOST, Cause.DECODE_LOST, (name,))

    def _refused(self, admitted: Admitted, refusal: Exception) -> Ending | Again:
        """No seat: back to the queue, unless no other member could give one either."""
        name = admitted.placement.decode_member
        if self._route.stop.ending is not None:
            return self._route.stop.ending
        if isinstance(refusal, SeatRefused) and refusal.reason == PREFIX_GONE:
            self._cell.metrics.placements.inc(1, "prefix_gone")
            self._cell.admission.refute(admitted, self._place)
            return Again(Event.REFUSED, Cause.NO_MEMBER)
        self._cell.metrics.refusals.inc(1, "member_refused")
        _log.info("decode member %s gave no seat: %s", name, refusal)
        if isinstance(refusal, SeatRefused) and not refusal.retryable:
            return Ending(FinishReason.TRANSPORT_ERROR, Cause.NO_MEMBER)
        # A member that has this attempt already may well seat the next one.
        duplicate = isinstance(refusal, SeatRefused) and refusal.reason == DUPLICATE_ATTEMPT
        return Again(Event.REFUSED, Cause.NO_MEMBER, () if duplicate else (name,))

    def _prefill_failed(self, seat: Seat, failure: PrefillFailure) -> None:
        """The hand-over will not be completed: decode is told, and its Ended starts the next attempt."""
        if self._progress.committed is None and self._route.stop.ending is None:
            _log.warning("prefill member %s: %s", self._route.record.prefill_member, failure.label)
            self._progress.prefill_failure = failure
            seat.prefill_lost(failure.cause.value)

    def _after_prefill(self, failure: PrefillFailure) -> Ending | Again:
        cause = Cause.MODEL_FAILED if failure.label == "model_error" else failure.cause
        if failure.retryable:
            return Again(Event.PREFILL_LOST, cause, self._prefill_names())
        if cause is Cause.MODEL_FAILED:
            return MODEL_FAILED
        return Ending(FinishReason.TRANSPORT_ERROR, cause)

    def _leave(self, seat: Seat, ending: Ending) -> None:
        """The request has to end: the member is told why, in the words of the port. If another router has the request, it has
        the seat too."""
        if self._route.ledger.disowned:
            seat.cut("another router has the request")
            return
        self._progress.cancel_sent_at = clocks.monotonic()
        seat.cancel(ending.cause.value)

    def _prefill_names(self) -> tuple[str, ...]:
        name = self._route.record.prefill_member
        return (name,) if name else ()

    def _dispatch(self) -> Dispatch:
        route, progress, now = self._route, self._progress, clocks.monotonic()
        resume = resume_of(progress, route.stream, now)
        key = AttemptKey(route.request.request_id, route.record.attempt)
        return Dispatch(key, route.request, route.arrival.deadlines, route.record.traceparent, now, resume)

    def _hop_timeout_s(self) -> float | None:
        """A last resort for a member that ignores its clocks: what is left of the overall clock, and the cancel's grace."""
        deadlines = self._route.arrival.deadlines
        left_s = deadlines.remaining(clocks.monotonic(), deadlines.limits.overall_s)
        return None if left_s is None else left_s + self._cell.limits.seat.cancel_grace_s + 1.0


def _way(admitted: Admitted) -> str:
    """Where the prompt's KV is to come from."""
    if admitted.moved:
        return "moved"
    if admitted.prefill is not None:
        return "handed_over"
    return "decode" if admitted.most_computed_tokens is None else "decode_cached"
