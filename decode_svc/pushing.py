"""The grants of other members that this one fills with the KV of its paused sequences. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from decode_svc.messages import Errand, PushDrained
from engine.pages import PagePool
from kv_transfer.grant_writer import Filling, GrantWriter, PushesEnded
from kv_transfer.grants import AnswerNow, Drained, DuplicateGrant, Filled, GrantRevoked, GrantsFull, WriterBook, WriterOutcome
from kv_transfer.plan import Computed, HandoverPlan

# Closed labels of Pushed.cause, beside those of the writer's book.
LAYOUT_MISMATCH = "layout_mismatch"
BAD_GRANT = "bad_grant"
REVOKED = "revoked"
QUEUE_FULL = "queue_full"
ABANDONED = "abandoned"


class PushEnd(NamedTuple):
    """The end of one push: every write is done (`cause` is empty), or nothing of it is in flight and nothing will start.

    seconds: first write to last.
    """

    seat: int
    cause: str
    detail: str
    sent_bytes: int
    seconds: float


class Pushes:
    """One push for each seat at most. `pools`: the source's allocators, which pin what a write reads."""

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self._writer = GrantWriter(WriterBook(), pools, self._answer)
        self._seats: dict[str, int] = {}
        self._fillings: dict[int, Filling] = {}
        self._errands: list[Errand] = []

    def begin(self, seat: int, plan: HandoverPlan, tables: tuple[Sequence[int], ...], tokens: int, now: float) -> str:
        """Write the pages of `tokens` positions into a grant. Returns why not, as a label; empty when it has begun."""
        assert seat not in self._fillings, f"seat {seat} is being pushed already"
        try:
            filling = self._writer.accept(plan, now)
        except GrantRevoked:
            return REVOKED
        except DuplicateGrant:
            return BAD_GRANT
        except GrantsFull:
            return QUEUE_FULL
        self._seats[filling.grant_id] = seat
        self._fillings[seat] = filling
        self._writer.begin(filling, tables)
        self._writer.send(filling, Computed(tokens), 0, now)
        return ""

    def busy(self, seat: int) -> bool:
        """Whether a push of this seat has not ended."""
        return seat in self._fillings

    def stop(self, seat: int, cause: str) -> bool:
        """Give the push of a seat up, if there is one; True when nothing of it is in flight. Else its end comes later."""
        filling = self._fillings.get(seat)
        if filling is None:
            return True
        outcome = self._writer.fail(filling.grant_id, cause)
        assert outcome is not None, f"the push of seat {seat} is open here and not in the writer's book"
        return self._end(outcome) is not None

    # what others say; each returns the pushes that ended by it

    def heard(self, now: float) -> list[PushEnd]:
        """A turn of the engine thread. One that comes too late gives every push up: see WriterBook."""
        return self._ends(self._writer.heard(now)) if self._writer.open else []

    def ended(self, pushes: PushesEnded) -> list[PushEnd]:
        """Writes have ended."""
        return self._ends(self._writer.ended(pushes))

    def drain(self, grant_id: str, asker: int) -> list[PushEnd]:
        """The other member wants its grant back."""
        answer = self._writer.drain(grant_id, asker)
        return self._ends([Drained(grant_id, answer.cause)]) if isinstance(answer, AnswerNow) else []

    # reading

    def take_errands(self) -> list[Errand]:
        """Answers to Drains, and what the transfer thread is to do, since the last call."""
        errands, self._errands = self._errands, []
        transfers = self._writer.take_transfers()
        if transfers:
            errands.append(transfers)
        return errands

    @property
    def open(self) -> int:
        """Pushes that have not ended."""
        return self._writer.open

    @property
    def in_flight(self) -> int:
        """Writes given out whose end was not told."""
        return self._writer.pushes_in_flight

    @property
    def drains_waiting(self) -> int:
        """Drains that wait for writes to end."""
        return self._writer.drains_waiting

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        faults = self._writer.check()
        open_ids = set(self._writer.open_ids())
        if open_ids != set(self._seats) or open_ids != {filling.grant_id for filling in self._fillings.values()}:
            faults.append(f"pushes: {len(open_ids)} grants are open, {len(self._fillings)} seats push into them")
        return faults

    # inside

    def _ends(self, outcomes: Sequence[WriterOutcome]) -> list[PushEnd]:
        return [end for end in map(self._end, outcomes) if end is not None]

    def _end(self, outcome: WriterOutcome) -> PushEnd | None:
        if not isinstance(outcome, Filled | Drained):
            return None
        seat = self._seats.pop(outcome.grant_id, None)
        if seat is None:
            return None
        filling = self._fillings.pop(seat)
        if isinstance(outcome, Filled):
            return PushEnd(seat, "", "", filling.plan.size_bytes, filling.seconds)
        return PushEnd(seat, outcome.cause, filling.problem, 0, filling.seconds)

    def _answer(self, asker: int, committed: bool) -> None:
        self._errands.append(PushDrained(asker, committed))
