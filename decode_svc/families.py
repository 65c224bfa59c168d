"""Several outputs of one prompt: one seat gets the prompt's KV, the others begin with it. Pure.

The siblings are promised their pages when the request is opened, without those that they will share, and wait until the prompt's
last page is here. From then on each is a seat like any other: it is planned, preempted and ended alone.
"""

from collections.abc import Callable

from decode_svc.branching import branch
from decode_svc.kv_place import KvPlace
from decode_svc.memory import DecodeMemory
from decode_svc.messages import EndChoice
from decode_svc.seat_book import SeatBook
from decode_svc.seats import Family, Seat, SeatState
from engine.page_copy import PageClone


class Families:
    """Branches siblings off, and ends one of them."""

    def __init__(self, memory: DecodeMemory, seats: SeatBook) -> None:
        self._memory = memory
        self._seats = seats
        self._clones: list[PageClone] = []

    def handlers(self) -> dict[type, Callable[..., None]]:
        """Commands that are taken here, each with who takes it."""
        return {EndChoice: self._end_choice}

    def take_clones(self) -> list[PageClone]:
        """Clones since the last call, to be run in order before anything is written into pages or told of them."""
        clones, self._clones = self._clones, []
        return clones

    def landed(self, leader: Seat, family: Family, row: int) -> None:
        """The prompt's KV has arrived, with its logits in a landing row: who has no token yet draws from it, the others first
        compute what earlier attempts chose after the prompt."""
        leader.sequence.completed(len(leader.sequence.spec.prompt_token_ids))
        for seat in [leader, *self._branched(leader, family)]:
            if seat.sequence.spec.earlier.token_ids:
                seat.move(SeatState.COMPUTING)
            else:
                seat.landing_row = row
                family.row_readers += 1
                seat.move(SeatState.LANDED)
            seat.remember(self._memory)
        if not family.row_readers:
            self._memory.free_row(row)
            leader.released["landing_rows"] = 1

    def computed(self, leader: Seat) -> None:
        """A step has run; when it brought the prompt's end, the siblings begin. Those without a token draw from its logits."""
        family = leader.family
        if family is None or not leader.leads or leader.sequence.cache_tokens < len(leader.sequence.spec.prompt_token_ids):
            return
        for seat in self._branched(leader, family):
            seat.move(SeatState.COMPUTING)
            seat.remember(self._memory)

    def _branched(self, leader: Seat, family: Family) -> list[Seat]:
        prompt_tokens = len(leader.sequence.spec.prompt_token_ids)
        waiting, family.waiting = family.waiting, []
        for seat in waiting:
            self._clones += branch(self._memory, seat.holding, leader.holding, prompt_tokens)
            seat.put(KvPlace.RESIDENT)
            seat.sequence.completed(prompt_tokens)
            seat.begun_at, seat.ready_at, seat.handover_s = leader.begun_at, leader.ready_at, leader.handover_s
            seat.cached_tokens = leader.cached_tokens
        if family.ends_later is not None:
            leader.end_with(*family.ends_later)
        return waiting

    def _end_choice(self, command: EndChoice, now: float) -> None:
        """A seat whose siblings wait for its KV ends when they have it; nothing of what it brings out until then is told."""
        seat = self._seats.get(command.seat)
        if seat is None or seat.family is None:
            return
        if seat.leads:
            seat.family.ends_later = seat.family.ends_later or (command.ending, command.requested_at)
        else:
            seat.end_with(command.ending, command.requested_at)
