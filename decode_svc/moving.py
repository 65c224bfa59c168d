"""Sequences that leave for another member: they stand still at a step's border, and their KV is written into a grant there. Pure.

A seat that stands still never runs here again: what becomes of it is its router's decision. Its clocks go on, and any end of it,
a cancel above all, is what it is for every seat.
"""

from collections.abc import Callable, Sequence

from decode_svc.messages import DrainPush, PauseSeat, PushSeat, SeatPaused, SeatPushed
from decode_svc.pushing import BAD_GRANT, PushEnd, Pushes
from decode_svc.seat_book import SeatBook
from decode_svc.seats import Seat, SeatState
from kv_transfer.grant_writer import PushesEnded
from kv_transfer.offer import Grant

_HANDOVER_OPEN = frozenset({SeatState.CONNECTING, SeatState.OFFERED})


class Moves:
    """Takes what routers ask of seats that are to move, and what becomes of the writes."""

    def __init__(self, seats: SeatBook, pushes: Pushes) -> None:
        self._seats = seats
        self._pushes = pushes
        self._asked: dict[int, None] = {}  # seats that are to stand still, in the order of asking
        self._awaited: set[int] = set()  # seats that were told to stand still while a writer fills their grant

    def handlers(self) -> dict[type, Callable[..., None]]:
        """Commands that are taken here, each with who takes it."""
        return {PauseSeat: self._pause, PushSeat: self._push, PushesEnded: self._pushes_ended, DrainPush: self._drain}

    def heard(self, now: float) -> None:
        """A turn has begun."""
        self._settle(self._pushes.heard(now), now)

    def border(self, now: float) -> None:
        """At a step's border, after the ends that are due: who was asked to stand still does."""
        for number in self._awaited.copy():
            seat = self._seats.get(number)
            if seat is None or seat.state not in _HANDOVER_OPEN:
                self._awaited.discard(number)
                if seat is not None and seat.state is not SeatState.RECLAIMING:
                    self._seats.stand_still(seat, now)
        asked, self._asked = self._asked, {}
        for number in asked:
            seat = self._seats.get(number)
            if seat is None or seat.state is SeatState.RECLAIMING:
                continue  # its end says it
            if seat.state is SeatState.LANDED:
                self._asked[number] = None  # the next step chooses its first token
                continue
            if seat.state in _HANDOVER_OPEN:
                self._awaited.add(number)
            elif seat.state not in (SeatState.PAUSED, SeatState.PUSHING):
                self._seats.stand_still(seat, now)
            self._seats.events.append(SeatPaused(number, seat.sequence.cache_tokens, seat.pushable))

    # commands; a seat that is gone had ended before the command came, which is normal

    def _pause(self, command: PauseSeat, now: float) -> None:
        self._asked[command.seat] = None

    def _push(self, command: PushSeat, now: float) -> None:
        seat = self._seats.get(command.seat)
        if seat is None or seat.ending is not None:
            return
        problem = _misfit(seat, command.plan.grant)
        if problem:
            self._seats.events.append(SeatPushed(seat.number, BAD_GRANT, problem, 0, 0.0))
            return
        seat.move(SeatState.PUSHING)
        cause = self._pushes.begin(seat.number, command.plan, seat.holding.tables, seat.sequence.cache_tokens, now)
        if cause:
            self._settle([PushEnd(seat.number, cause, "the grant was not taken", 0, 0.0)], now)

    def _pushes_ended(self, command: PushesEnded, now: float) -> None:
        self._settle(self._pushes.ended(command), now)

    def _drain(self, command: DrainPush, now: float) -> None:
        self._settle(self._pushes.drain(command.grant_id, command.asker), now)

    def _settle(self, ends: Sequence[PushEnd], now: float) -> None:
        for end in ends:
            seat = self._seats.get(end.seat)
            if seat is None:
                continue  # it did not wait for its writes
            if seat.state is SeatState.RECLAIMING:
                self._seats.writes_ended(seat, now)
                continue
            # Also after a push that went well: until the other member has committed, the KV may be wanted once more.
            seat.move(SeatState.PAUSED)
            self._seats.events.append(SeatPushed(seat.number, end.cause, end.detail, end.sent_bytes, end.seconds))


def _misfit(seat: Seat, grant: Grant) -> str:
    """Why the KV of a seat can not go into a grant; empty when it can."""
    mine, cached = seat.open.sequence.key, seat.sequence.cache_tokens
    if seat.state is not SeatState.PAUSED or not seat.pushable:
        return "the sequence does not stand still with its KV in pages"
    if grant.key.request_id != mine.request_id:
        return "the grant is of another request"
    if grant.token_count != cached:
        return f"grant.token_count is {grant.token_count} and {cached} tokens are in the cache"
    if grant.landing_row is not None:
        return "the grant has a landing row and a paused sequence has no logits"
    return ""
