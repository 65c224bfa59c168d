"""What arrives for the grants of a decode member: endpoints, notices, answers of writers, fences. Pure."""

from collections.abc import Callable

from decode_svc.families import Families
from decode_svc.handover import Handovers, Offer
from decode_svc.kv_place import KvPlace
from decode_svc.memory import DecodeMemory
from decode_svc.messages import DrainAnswer, DrainAnswered, EndpointMade, NoticesArrived, PromptReady, SeatGranted, WriterFenced
from decode_svc.seat_book import SeatBook
from decode_svc.seats import Seat, SeatState
from kv_transfer.grants import Committed
from kv_transfer.grants import Refused as NoticeRefused
from lifecycle.finish import Cause, Ending, FinishReason

_HANDOVER_FAILED = Ending(FinishReason.TRANSPORT_ERROR, Cause.HANDOVER_FAILED)
_PREFILL_LOST = Ending(FinishReason.TRANSPORT_ERROR, Cause.PREFILL_LOST)


class Arrivals:
    """Takes the hand-over's news in for the seats that they are about."""

    def __init__(self, seats: SeatBook, handovers: Handovers, memory: DecodeMemory, families: Families) -> None:
        self._memory = memory
        self._families = families
        self.seats = seats
        self._handovers = handovers

    def handlers(self) -> dict[type, Callable[..., None]]:
        """Commands that are taken here, each with who takes it."""
        return {
            EndpointMade: self._endpoint_made,
            NoticesArrived: self._notices,
            DrainAnswered: self._drain_answered,
            WriterFenced: self._fenced,
        }

    def announce(self, offer: Offer, now: float) -> None:
        """The grant of a seat is out: its router is told."""
        seat = self.seats.get(offer.seat)
        assert seat is not None, f"grant {offer.grant.grant_id} is offered to seat {offer.seat}, which is gone"
        seat.move(SeatState.OFFERED)
        seat.granted_at = now
        self.seats.events.append(SeatGranted(seat.number, offer.grant, seat.cached_tokens))

    def _endpoint_made(self, command: EndpointMade, now: float) -> None:
        if command.endpoint is None:
            for number in self._handovers.endpoint_failed(command.writer):
                self.seats.mark(number, _HANDOVER_FAILED)
            return
        for offer in self._handovers.endpoint_made(command.writer, command.endpoint, now):
            self.announce(offer, now)

    def _notices(self, command: NoticesArrived, now: float) -> None:
        for writer, notice in command.notices:
            number, outcome = self._handovers.arrived(writer, notice, now)
            seat = self.seats.get(number)
            if seat is None:
                continue
            if seat.begun_at is None:
                seat.begun_at = now
            if isinstance(outcome, Committed):
                row = self._handovers.commit(outcome, seat.holding)
                seat.handover_s = outcome.handover_s
                seat.ready_at = now
                seat.put(KvPlace.RESIDENT)
                self._landed(seat, row)
            elif isinstance(outcome, NoticeRefused):
                seat.end_with(_HANDOVER_FAILED)

    def _landed(self, seat: Seat, row: int | None) -> None:
        """All pages are here. `row`: of the logits to choose from; None when a sequence moved here, whose token waits."""
        if row is None:
            seat.sequence.moved_here()
            seat.move(SeatState.RUNNING)
            self.seats.events.append(PromptReady(seat.number, seat.handover_s, 0.0, 0.0, seat.holding.granted_bytes))
        elif seat.family is not None:
            self._families.landed(seat, seat.family, row)
            return
        else:
            seat.landing_row = row
            seat.sequence.completed(len(seat.sequence.given_token_ids))
            seat.move(SeatState.LANDED)
        seat.remember(self._memory)

    def _drain_answered(self, command: DrainAnswered, now: float) -> None:
        freed = self._handovers.drain_answered(command.grant_id, command.answer, now)
        if freed is not None:
            self.seats.grant_reclaimed(freed.seat, freed.pages, now)
        elif command.answer is not DrainAnswer.STOPPED:
            self.seats.grant_set_aside(command.grant_id, now)

    def _fenced(self, command: WriterFenced, now: float) -> None:
        for freed in self._handovers.fenced(command.writer, command.proven, now):
            if freed.lost:
                self.seats.grant_lost(freed.seat, freed.pages, _PREFILL_LOST, now)
            else:
                self.seats.grant_reclaimed(freed.seat, freed.pages, now)
