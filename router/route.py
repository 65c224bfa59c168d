"""The path of one request, top to bottom: record, queue, attempts, end.

Everything that is held is held by a context manager, so that every way out gives it back. Cancels, deadlines and lost
clients arrive through `Stop` and end whatever the request is doing. Nothing here knows how a client is reached: events go
into a ClientStream.
"""

import asyncio
import logging
import time

from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey, RequestRecord
from lifecycle.states import Event
from router import endings
from router.admission import Place
from router.attempt import Again, Attempt
from router.cell import Arrival, Cell
from router.conclusion import answer_before_begun, conclude
from router.ledger import Ledger
from router.progress import Progress
from router.queue import QueueFull
from router.relay import ClientStream
from router.seat import Seat
from router.stop import Clocks, Stop, Stopped
from rpc.status import StatusError, internal
from telemetry import logs, names

_log = logging.getLogger(__name__)


class Route:
    """One request. `run` does everything; `stop` ends it early; `stream` is what its client gets.

    `standing` is the record that holds: this router's own, unless another end was written first.
    """

    def __init__(self, cell: Cell, arrival: Arrival) -> None:
        request = arrival.request
        self.cell = cell
        self.arrival = arrival
        self.request = request
        self.stop = Stop()
        self.stream = ClientStream(cell.limits.buffer_bytes, cell.limits.send_timeout_s)
        self.progress = Progress(request.prompt_tokens, arrival.deadlines.arrived_at)
        self.record = RequestRecord(
            request_id=request.request_id,
            tenant=request.tenant,
            model=request.model.name,
            model_snapshot=request.model.snapshot,
            fingerprint=request.fingerprint,
            priority=request.priority,
            router=cell.store.router,
            traceparent=arrival.span.traceparent,
            created_at=time.time(),
        )
        self.standing = self.record
        self.ledger = Ledger(cell, self.record, self.stop)
        self.clocks = Clocks(arrival.deadlines, self.stop, rpc_bound=arrival.rpc_bound)
        self.seat: Seat | None = None
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """From the queue to the terminal event. Whatever happens, the stream gets its end."""
        logs.bind(self.request.request_id, traceparent=self.record.traceparent)
        try:
            await self._run()
        except StatusError as refusal:
            self._refuse(refusal)
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
            ending = await self._serve()
            if ending is not None:
                await conclude(self, ending)

    async def _serve(self) -> Ending | None:
        """Until nothing is held any more. None when the request was over before it began. Raises StatusError."""
        self.cell.retries.request()
        try:
            with self.cell.admission.enter(self.request, self.arrival.deadlines.arrived_at) as place:
                over = await self.ledger.create()
                if over is not None:
                    answer_before_begun(self, over)
                    return None
                return await self._attempts(place)
        except QueueFull as full:
            raise endings.queue_full(full, self.request.tenant) from None
        except Stopped as stopped:
            return stopped.ending

    async def _attempts(self, place: Place) -> Ending:
        self.stop.check()
        self.ledger.advance(Event.ACCEPTED)
        self.progress.queued()
        while True:
            outcome = await Attempt(self, place).run()
            if isinstance(outcome, Ending):
                return outcome
            over = await self._again(outcome, place)
            if over is not None:
                return over

    async def _again(self, outcome: Again, place: Place) -> Ending | None:
        """Back to the queue for the next attempt; an Ending when there is to be none."""
        if outcome.event is Event.PREFILL_LOST:
            self.progress.lost_causes.append(outcome.cause)
            tries = len(self.progress.lost_causes)
            if tries >= self.cell.limits.max_attempts or not self.cell.retries.take():
                cause = Cause.ATTEMPTS_EXHAUSTED if tries > 1 else outcome.cause
                return Ending(FinishReason.TRANSPORT_ERROR, cause)
            self.cell.metrics.failovers.inc(1, outcome.cause.value)
        if outcome.event is not None:
            event = names.EVENT_REFUSED if outcome.event is Event.REFUSED else names.EVENT_RETRY
            self.arrival.span.event(event, {names.CAUSE: outcome.cause.value, names.ATTEMPT: self.record.attempt})
            await self.ledger.retry(outcome.event)
        self.stop.check()
        self.progress.queued()
        key = AttemptKey(self.request.request_id, self.record.attempt)
        self.cell.admission.again(place, key, avoid=outcome.avoid, wait_s=outcome.wait_s)
        return None

    def _refuse(self, refusal: StatusError) -> None:
        """Refused at the door: there is no record, and no event, only the status."""
        self.arrival.span.end(ok=False, error_type=refusal.reason)
        self.cell.metrics.refusals.inc(1, endings.REFUSAL_LABELS.get(refusal.reason, "invalid"))
        self.stream.end(None, refusal)

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
