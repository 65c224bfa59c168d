"""The path of one request, top to bottom: record, queue, attempts, end.

Everything that is held is held by a context manager, so that every way out gives it back. Cancels, deadlines and lost
clients arrive through `Stop` and end whatever the request is doing. Nothing here knows how a client is reached: events go
into a RequestStream.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey, RequestRecord
from lifecycle.states import Event, State
from router import endings
from router.admission import Place
from router.attempt import MODEL_FAILED, Again, Attempt
from router.cell import Arrival, Cell
from router.choices import ChoiceProgress
from router.conclusion import answer_before_begun, conclude
from router.ledger import EndedBefore, KnownRequest, Ledger
from router.moving import MOVED, Source
from router.placement import Placement
from router.presence import Presence
from router.progress import Progress
from router.queue import QueueFull, WaitTooLong
from router.relay import RequestStream
from router.request import Delivery, OutputMode, SlowReader
from router.seat import Seat
from router.stop import Clocks, Stop, Stopped
from router.store import Reservations
from router.stream_log import StreamLog
from router.takeover import Takeover
from router.whole_output import WholeOutput
from rpc import clocks
from rpc.status import StatusError, internal, unavailable
from telemetry import logs, names

_log = logging.getLogger(__name__)

#: Members whose model may fail on a prompt. One such failure can be the doing of another prompt in the same step, or of a
#: member that is short of memory; after the second it is held to be the prompt's own.
MODEL_FAILURES_MAX = 2


class Route:
    """One request. `run` does everything; `stop` ends it early; `stream` is what its readers get.

    `standing` is the record that holds: this router's own, unless another end was written first.
    """

    def __init__(self, cell: Cell, arrival: Arrival, takeover: Takeover | None = None) -> None:
        request = arrival.request
        self.cell = cell
        self.arrival = arrival
        self.request = request
        self.stop = Stop()
        self.presence = Presence(self.stop, request.delivery.detach_s)
        self.stream = RequestStream(
            StreamLog(cell.limits.log) if takeover is None else takeover.log(request, cell.limits.log),
            self.presence,
            send_timeout_s=cell.limits.send_timeout_s,
            most_readers=cell.limits.most_readers,
            overrun=self._overrun if request.delivery.slow_reader is SlowReader.FAIL else None,
            whole=_whole(request.delivery, takeover),
        )
        arrived_at = arrival.deadlines.arrived_at
        self.takeover = takeover
        self.progress = (
            Progress(request.prompt_tokens, arrived_at, clocks.monotonic() - arrived_at)
            if takeover is None
            else takeover.progress(request, arrived_at)
        )
        self.record = _new_record(cell, arrival) if takeover is None else takeover.record
        if request.choices.several and not self.progress.choices:
            self.progress.choices = [ChoiceProgress(index) for index in range(request.choices.made)]
        self.standing = self.record
        self.ledger = Ledger(cell, self.record, self.stop)
        self.clocks = Clocks(arrival.deadlines, self.stop, rpc_bound=arrival.rpc_bound)
        self.seat: Seat | None = None
        #: The seat of a draining member that the next attempt takes the KV from.
        self.source: Source | None = None
        self._ended_seat: Seat | None = None
        self._until_end = AsyncExitStack()
        self._leaving: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()

    @property
    def detached(self) -> bool:
        """Whether nobody reads it, it may go on so, and another router could take it over from its seat."""
        seated = self.seat is not None and self.source is None and self.record.state is State.DECODING
        may_go_on = self.request.delivery.detach_s is not None and self.stop.ending is None
        return seated and may_go_on and not self.stream.read and not self.ledger.apart

    async def run(self) -> None:
        """From the queue to the terminal event. Whatever happens, the stream gets its end."""
        logs.bind(self.request.request_id, traceparent=self.record.traceparent)
        try:
            await self._run()
        except StatusError as refusal:
            self._refuse(refusal)
        except KnownRequest:
            self.stream.move()
            self.arrival.span.end(ok=True)
        except Exception:  # noqa: BLE001  (top of a request: it must end, and its client must be told)
            _log.exception("request %s failed inside the router", self.request.request_id)
            await self._break()
        finally:
            self.clocks.close()
            self.arrival.span.end(ok=False, error_type="router_fault")  # nothing is left of it after an end in order
            self.ended.set()

    def named(self, ending: Ending) -> Ending:
        """An ending that a member told, in this router's words: the overall clock may be the RPC's own deadline."""
        if ending.cause is Cause.OVERALL_DEADLINE and self.arrival.rpc_bound:
            return Ending(ending.reason, Cause.RPC_DEADLINE)
        return ending

    async def _run(self) -> None:
        with self.stop.tells(lambda _: self.ledger.observe()):
            async with self._until_end:
                ending = await self._serve()
                if ending is not None:
                    await conclude(self, ending)

    async def _serve(self) -> Ending | None:
        """Until nothing is held any more. None when the request was over before it began. Raises StatusError."""
        if self.takeover is not None:
            return await self._go_on(self.takeover)
        self.cell.retries.request()
        try:
            arrived_at, returned = self.arrival.deadlines.arrived_at, self.arrival.returned
            with self.cell.admission.enter(self.request, arrived_at, returned=returned) as place:
                if place.admitted is None:
                    await self.ledger.create()
                self.progress.queued()
                return await self._attempts(place, Attempt(self, place).run())
        except EndedBefore as over:
            answer_before_begun(self, over.record)
            return None
        except QueueFull as full:
            await self.ledger.unless_begun()
            raise endings.queue_full(full, self.request.tenant) from None
        except WaitTooLong as long:
            await self.ledger.unless_begun()
            raise endings.wait_too_long(long) from None
        except Stopped as stopped:
            return stopped.ending

    async def _go_on(self, takeover: Takeover) -> Ending:
        """From the seat of another router's attempt on."""
        arrived_at, member = self.arrival.deadlines.arrived_at, takeover.seat.member
        held = takeover.holds or Reservations(Placement(self.record.decode_member, self.record.prefill_member))
        self.ledger.taken_over(takeover.holds)
        try:
            with self.cell.admission.enter_seated(self.request, arrived_at, member, held) as place:
                self.presence.expect(takeover.grace_s)
                return await self._attempts(place, Attempt(self, place).take_over(takeover))
        except Stopped as stopped:
            return stopped.ending

    async def _attempts(self, place: Place, first: Coroutine[Any, Any, Ending | Again]) -> Ending:
        try:
            outcome = await first
            while True:
                if isinstance(outcome, Ending):
                    return outcome
                over = await self._again(outcome, place)
                if over is not None:
                    return over
                outcome = await Attempt(self, place).run()
        finally:
            await self.leave_source()
            if self._leaving:
                await asyncio.wait(self._leaving)

    async def seat_ended(self, seat: Seat, stack: AsyncExitStack) -> None:
        """The output has ended. The seat's stream, held by `stack`, stays open until the request's end stands: its member keeps
        what a router that would have to adopt the request goes on from."""
        await self._until_end.enter_async_context(stack)
        self._ended_seat = seat

    def cancel_choice(self, index: int) -> None:
        """A client wants the end of one of several outputs. When it has asked so for all, the request is cancelled."""
        choices = self.progress.choices
        choices[index].cancelled = True
        if self.seat is not None:
            self.seat.cancel_choice(index, Cause.CLIENT_CANCEL.value)
        elif all(one.cancelled for one in choices):
            self.stop.request(Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL))

    def keep_end(self) -> None:
        """The end will stand only when a client has read everything, which may take long."""
        if self._ended_seat is not None:
            self._ended_seat.keep_end()

    async def leave_seat(self) -> None:
        """The end stands: nobody will go on from the seat."""
        await self._until_end.aclose()

    def source_served(self) -> None:
        """The KV is where it was to go: the seat that it came from ends, beside whatever the request does."""
        if self.source is not None:
            task = asyncio.create_task(self.leave_source(), name=f"leave {self.source.member.name}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def leave_source(self) -> None:
        """Ends the seat that the sequence leaves, if there is one."""
        source, self.source = self.source, None
        if source is not None:
            await source.close(MOVED if self.stop.ending is None else self.stop.ending.cause.value)

    async def _again(self, outcome: Again, place: Place) -> Ending | None:
        """Back to the queue for the next attempt; an Ending when there is to be none."""
        if outcome.source is not None:
            self.source = outcome.source
            self._without_decode()
        elif outcome.event in (Event.PREFILL_LOST, Event.DECODE_LOST):
            over = self._lost(outcome)
            if over is not None:
                return over
        if outcome.event is not None:
            event = names.EVENT_REFUSED if outcome.event is Event.REFUSED else names.EVENT_RETRY
            self.arrival.span.event(event, {names.CAUSE: outcome.cause.value, names.ATTEMPT: self.record.attempt})
            await self.ledger.retry(outcome.event, outcome.cause.value)
        self.stop.check()
        self.progress.queued()
        key = AttemptKey(self.request.request_id, self.record.attempt)
        # Several outputs have nothing but the prompt in common.
        live = sum(one.end is None for one in self.progress.choices)
        chosen = 0 if live else self.progress.selected_tokens
        moved = self.source is not None and self.source.usable
        alone = self.request.delivery.scores_prompt and not self.progress.prompt_told
        self.cell.admission.again(
            place,
            key,
            chosen_tokens=chosen,
            outputs=max(1, live),
            moved=moved,
            alone=alone,
            avoid=outcome.avoid,
            wait_s=outcome.wait_s,
        )
        return None

    def _lost(self, outcome: Again) -> Ending | None:
        """A member was lost: another attempt, unless there were enough of them."""
        progress, limits = self.progress, self.cell.limits
        progress.lost_causes.append(outcome.cause)
        if progress.lost_causes.count(Cause.MODEL_FAILED) >= MODEL_FAILURES_MAX:
            return MODEL_FAILED
        tries = len(progress.lost_causes)
        if tries >= limits.max_attempts or not self.cell.retries.take():
            return Ending(FinishReason.TRANSPORT_ERROR, Cause.ATTEMPTS_EXHAUSTED if tries > 1 else outcome.cause)
        self.cell.metrics.failovers.inc(1, outcome.cause.value)
        if outcome.event is Event.DECODE_LOST or progress.first_token_at:
            self._without_decode()
        return None

    def _without_decode(self) -> None:
        """Nobody makes tokens now; that has a bound."""
        self.progress.decode_lost()
        self.clocks.decode_lost(self.progress.last_output_at, clocks.monotonic() + self.cell.limits.failover_wait_s)

    def _overrun(self) -> None:
        """The reader did not keep up, and the request asked to fail then."""
        self.stop.request(Ending(FinishReason.SLOW_CONSUMER, Cause.SLOW_CONSUMER))

    def _refuse(self, refusal: StatusError) -> None:
        """Refused at the door: there is no record, and no event, only the status."""
        self.arrival.span.end(ok=False, error_type=refusal.reason)
        self.cell.metrics.refusals.inc(1, endings.REFUSAL_LABELS.get(refusal.reason, "invalid"))
        self.stream.end(None, refusal)

    def give_up(self) -> None:
        """Another router has the request now, or will: it has no end here, and its readers follow it there."""
        _log.warning("request %s goes on at another router", self.request.request_id)
        self.arrival.span.end(ok=True)
        if self._ended_seat is not None:
            self._ended_seat.leave_end()
        if self.ledger.goes_on or not self.stream.log.next_no:
            self.stream.move()
            return
        message = f"request {self.request.request_id!r} was begun anew by another router; ask for it again"
        self.stream.move(unavailable(message, "BEGUN_ANEW"))

    async def _break(self) -> None:
        """A fault of this router: the request ends all the same."""
        if self.stream.ended:
            return
        try:
            await conclude(self, Ending(FinishReason.TRANSPORT_ERROR, Cause.ROUTER_LOST))
        except Exception:  # noqa: BLE001  (the client is told in any case)
            _log.exception("request %s could not be ended in order", self.request.request_id)
            if not self.stream.ended:
                self.stream.end(None, internal(self.request.request_id))


def _whole(delivery: Delivery, takeover: Takeover | None) -> WholeOutput | None:
    """What was returned before this router's log begins; None when Deltas hold what is new in them."""
    if delivery.output_mode is not OutputMode.CUMULATIVE:
        return None
    return WholeOutput() if takeover is None else takeover.whole


def _new_record(cell: Cell, arrival: Arrival) -> RequestRecord:
    request = arrival.request
    return RequestRecord(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model.name,
        model_snapshot=request.model.snapshot,
        fingerprint=request.fingerprint,
        priority=request.priority,
        router=cell.store.router,
        traceparent=arrival.span.traceparent,
        created_at=clocks.wall(),
        detach_s=request.delivery.detach_s,
        rpc_bound=arrival.rpc_bound,
        final_only=request.delivery.output_mode is OutputMode.FINAL_ONLY and not request.choices.several,
        adapter=request.adapter.name if request.adapter else "",
    )
