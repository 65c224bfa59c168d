"""Who gets a seat, with its siblings: all that they are promised, or a refusal. Pure."""

import math
from collections.abc import Callable

from decode_svc import admission
from decode_svc.admission import Refusal
from decode_svc.arrivals import Arrivals
from decode_svc.flow import FlowWindow
from decode_svc.handover import Handovers
from decode_svc.kv_place import KvPlace
from decode_svc.memory import DecodeMemory, Holding, NoPages
from decode_svc.messages import OpenSeat, SeatGranted
from decode_svc.preemption import Preemption
from decode_svc.scheduler_limits import SchedulerLimits
from decode_svc.seat_book import SeatBook
from decode_svc.seats import Family, Seat, SeatState
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from lifecycle.deadlines import Deadlines


class Seating:
    """`make_sequence`: for an output that was not begun."""

    def __init__(
        self,
        limits: SchedulerLimits,
        handovers: Handovers,
        preemption: Preemption,
        arrivals: Arrivals,
        make_sequence: Callable[[SequenceSpec], TokenSequence],
    ) -> None:
        self._limits = limits
        self._memory: DecodeMemory = preemption.memory
        self._handovers = handovers
        self._seats: SeatBook = arrivals.seats
        self._preemption = preemption
        self._arrivals = arrivals
        self._make_sequence = make_sequence

    def open(self, command: OpenSeat, steps: int, now: float) -> Refusal | None:
        """Give a seat, or say why not; nothing was changed then. `steps` that have run."""
        return self._refusal(command) or self._admit(command, steps, now)

    def _refusal(self, command: OpenSeat) -> Refusal | None:
        key, siblings = command.sequence.key, command.siblings or ()
        if self._seats.has(key):
            return admission.duplicate_attempt(key.attempt)
        if len(self._seats) + len(siblings) >= self._limits.sequences:
            return admission.too_many_sequences(1 + len(siblings), self._limits.sequences)
        tokens = command.sequence.most_cache_tokens
        if not self._memory.fits_ever(tokens, len(siblings), len(command.sequence.prompt_token_ids)):
            return admission.too_long(tokens, 1 + len(siblings), self._memory.most_tokens)
        if command.prefill is not None:
            writer = command.prefill.incarnation
            return admission.handover_refusal(self._handovers, self._memory, writer, with_row=not command.moved)
        return None

    def _admit(self, command: OpenSeat, steps: int, now: float) -> Refusal | None:
        promised: list[Holding] = []
        try:
            sequence = command.begun or self._make_sequence(command.sequence)
            wanted = admission.wanted(command, sequence)
            computed = command.prefill is None or command.siblings is not None
            promised.append(self._preemption.promise(_holder(command.seat), sequence, wanted, computed=computed))
            siblings = [one.begun or self._make_sequence(one.sequence) for one in command.siblings or ()]
            prompt_tokens = len(command.sequence.prompt_token_ids)
            for one, mine in zip(command.siblings or (), siblings, strict=True):
                holder = _holder(one.seat)
                promised.append(self._preemption.promise(holder, mine, computed=True, shared_tokens=prompt_tokens))
        except NoPages as short:
            for holding in promised:
                self._memory.release(holding)
            return Refusal(admission.NO_PAGES, str(short), True)
        cached = promised[0].found_tokens
        if command.prefill is None:
            refusal = admission.prefix_gone(len(wanted.token_ids) - cached, command.most_computed_tokens)
            if refusal is not None:
                for holding in promised:
                    self._memory.release(holding)
                return refusal
        state = SeatState.COMPUTING if command.prefill is None else SeatState.CONNECTING
        seat = self._made(command.seat, command, sequence, promised[0], state, steps)
        seat.cached_tokens = cached
        self._seat(seat, now)
        if command.siblings is not None:
            pairs = zip(command.siblings, siblings, promised[1:], strict=True)
            others = [self._made(one.seat, command, mine, held, SeatState.WAITING, steps) for one, mine, held in pairs]
            self._seats.add_family(Family(seat, [seat, *others], list(others)))
        return None

    def _made(
        self, number: int, command: OpenSeat, sequence: TokenSequence, holding: Holding, state: SeatState, steps: int
    ) -> Seat:
        seat = Seat(
            number=number,
            open=command,
            sequence=sequence,
            holding=holding,
            window=FlowWindow(self._limits.windows.of(command.slow_reader)),
            deadlines=Deadlines(command.limits, command.received_at),
            state=state,
            last_turn=steps,
            last_token_at=command.last_token_at,
            kept_tokens=math.inf if self._limits.keep_generated else len(sequence.spec.prompt_token_ids),
        )
        seat.set_clock()
        return seat

    def _seat(self, seat: Seat, now: float) -> None:
        """A seat with the pages that it was promised; its first tokens may be in them already."""
        command = seat.open
        if command.prefill is None:
            if seat.cached_tokens:
                seat.sequence.completed(seat.cached_tokens)
            seat.granted_at = now
            seat.put(KvPlace.RESIDENT)
            self._seats.add(seat)
            self._seats.events.append(SeatGranted(seat.number, None, seat.cached_tokens))
            return
        given = seat.sequence.given_token_ids if command.siblings is None else command.sequence.prompt_token_ids
        tokens = len(given) - command.moved
        seat.grant_id, offer = self._handovers.reserve(
            seat.number, command.sequence.key, seat.holding, command.prefill, tokens, now, with_row=not command.moved
        )
        self._seats.add(seat)
        if offer is not None:
            self._arrivals.announce(offer, now)


def _holder(seat: int) -> str:
    return f"seat-{seat}"
