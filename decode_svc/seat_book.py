"""All seats of a decode member, and how each ends: release, then terminal, once. Pure."""

from collections import Counter
from collections.abc import Iterator

from decode_svc.handover import Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import OutputMade, SeatEnded, SeatEvent
from decode_svc.pushing import ABANDONED, Pushes
from decode_svc.seats import Family, Seat, SeatState
from lifecycle.finish import Cause, Ending
from lifecycle.record import AttemptKey

#: Endings that do not wait for a word about their pages: the router waits for them, to try elsewhere.
_TOLD_AT_ONCE = frozenset({Cause.PREFILL_LOST, Cause.PREFILL_FAILED, Cause.HANDOVER_FAILED, Cause.SHUTTING_DOWN})

_BEFORE_COMMIT = frozenset({SeatState.CONNECTING, SeatState.OFFERED})

#: A token was chosen that is not in the cache yet.
_CHOSEN = frozenset({SeatState.RUNNING, SeatState.PUSHING})


class SeatBook:
    """`release_wait_s`: how long, in seconds, an ending waits for its writer's answer, so that it can say what was released."""

    def __init__(self, memory: DecodeMemory, handovers: Handovers, pushes: Pushes, release_wait_s: float) -> None:
        self.events: list[SeatEvent] = []
        self._memory = memory
        self._handovers = handovers
        self._pushes = pushes
        self._release_wait_s = release_wait_s
        self._seats: dict[int, Seat] = {}
        #: How many seats each attempt has.
        self._keys: Counter[AttemptKey] = Counter()
        #: By the number of the leader, for as long as any of them lives.
        self._families: dict[int, Family] = {}
        self._grants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def get(self, number: int | None) -> Seat | None:
        """The seat; None when it has ended or never was, which is normal for late messages."""
        return None if number is None else self._seats.get(number)

    def has(self, key: AttemptKey) -> bool:
        """Whether an attempt has a seat."""
        return key in self._keys

    def add(self, seat: Seat) -> None:
        """A new seat."""
        key = seat.open.sequence.key
        assert seat.number not in self._seats and key not in self._keys, f"seat {seat.number} or its attempt is there already"
        self._add(seat)
        if seat.grant_id:
            self._grants[seat.grant_id] = seat.number

    def add_family(self, family: Family) -> None:
        """The siblings of a new seat."""
        self._families[family.leader.number] = family
        family.leader.family = family
        for seat in family.waiting:
            assert seat.number not in self._seats, f"seat {seat.number} is there already"
            seat.family = family
            self._add(seat)

    def _add(self, seat: Seat) -> None:
        self._seats[seat.number] = seat
        self._keys[seat.open.sequence.key] += 1

    def mark(self, number: int, ending: Ending, requested_at: float | None = None) -> None:
        """Ask for an ending at the next step border, of a seat and its siblings. The first one stays."""
        family, seat = self._families.get(number), self._seats.get(number)
        for one in family.seats if family is not None else filter(None, [seat]):
            one.end_with(ending, requested_at)

    def end_due(self, now: float) -> None:
        """At a step border: end what was asked to end, what a clock ended, and what has waited long enough for its writer."""
        for seat in list(self._seats.values()):
            if seat.state is SeatState.ENDED:
                continue  # with its leader
            if seat.state is SeatState.RECLAIMING:
                if now >= seat.end_by:
                    self.finish(seat, now, everything_released=False)
                continue
            if seat.ending is None and now >= seat.expires_at:
                seat.ending = seat.expired(now)
            if seat.ending is not None:
                self.end(seat, now)

    def end(self, seat: Seat, now: float) -> None:
        """End a seat with its `ending`, at a step border. Its text so far is shown; a grant that is out is taken back first."""
        ending = seat.ending
        assert ending is not None and seat.state is not SeatState.RECLAIMING, f"seat {seat.number} has nothing to end with"
        seat.cancel_observed_at = now
        self._end_output(seat, ending, now)
        if seat.state is SeatState.WAITING:
            self._end_waiting(seat, now)
            return
        if seat.state not in _BEFORE_COMMIT:
            writing = self._writing(seat, ending)
            self.release(seat)
            if writing:
                self._reclaim(seat, ending, now)
            else:
                self.finish(seat, now, everything_released=True)
            return
        pages = self._handovers.take_back(seat.grant_id, seat.writer_drained)
        self._release_front(seat)
        if pages is not None:
            self._note_grant(seat, pages)
            self.finish(seat, now, everything_released=True)
            return
        self._reclaim(seat, ending, now)

    def ended_by_itself(self, seat: Seat, ending: Ending, now: float) -> None:
        """The output ended with the token just chosen."""
        seat.ending = ending
        self.release(seat)
        self.finish(seat, now, everything_released=True)

    def release(self, seat: Seat) -> None:
        """Give back what a seat holds after the commit, or for a prompt computed here. Pages of drafts are not counted."""
        seat.remember(self._memory)
        self._memory.give_back(seat.holding, seat.sequence.cache_tokens)
        if seat.state is SeatState.LANDED:
            self.free_landing_row(seat)
        if seat.state is SeatState.RUNNING and not seat.away:
            seat.released["batch_places"] = 1
        if host_pages := self._memory.host.held(seat.holding.holder):
            seat.released["host_pages"] = host_pages
        seat.released["pages"] = seat.released.get("pages", 0) + self._memory.release(seat.holding)

    def stand_still(self, seat: Seat, now: float) -> None:
        """A seat stops for good, at a step border; it keeps its pages."""
        if seat.state is SeatState.LANDED:
            self.free_landing_row(seat)
        if seat.state is SeatState.RUNNING and not seat.away:
            seat.released["batch_places"] = 1
        seat.move(SeatState.PAUSED)
        seat.paused_at = now

    def writes_ended(self, seat: Seat, now: float) -> None:
        """The last write from the pages of a seat that has ended is done."""
        self.finish(seat, now, everything_released=True)

    def free_landing_row(self, seat: Seat) -> None:
        """The logits of the prompt were read, or are not wanted any more. The last of siblings frees their row."""
        if seat.family is not None:
            seat.family.row_readers -= 1
            if seat.family.row_readers:
                return
        self._memory.free_row(seat.landing_row)
        seat.released["landing_rows"] = 1

    # the hand-over's news

    def grant_reclaimed(self, number: int, pages: int, now: float) -> None:
        """The writer of a grant that was taken back has stopped. A seat that did not wait for it is gone already."""
        seat = self._seats.get(number)
        if seat is not None and seat.state is SeatState.RECLAIMING:
            self._note_grant(seat, pages)
            self.finish(seat, now, everything_released=True)

    def grant_set_aside(self, grant_id: str, now: float) -> None:
        """The writer does not answer; the request does not wait for its pages any longer."""
        seat = self.get(self._grants.get(grant_id))
        if seat is not None and seat.state is SeatState.RECLAIMING:
            self.finish(seat, now, everything_released=False)

    def grant_lost(self, number: int, pages: int, ending: Ending, now: float) -> None:
        """A fence ended a grant that was still being filled; its pages are free."""
        seat = self._seats[number]
        seat.ending = seat.ending or ending
        seat.cancel_observed_at = now
        self._end_output(seat, seat.ending, now)
        self._release_front(seat)
        self._note_grant(seat, pages)
        self.finish(seat, now, everything_released=True)

    def finish(self, seat: Seat, now: float, *, everything_released: bool) -> None:
        """The terminal, once: the seat is gone after it."""
        seat.move(SeatState.ENDED)
        del self._seats[seat.number]
        self._keys[seat.open.sequence.key] -= 1
        self._keys += Counter()
        self._grants.pop(seat.grant_id, None)
        self._leave_family(seat)
        ending = seat.sequence.ending
        assert ending is not None, f"seat {seat.number} is finished and its output has not ended"
        cached = min(seat.cached_tokens, len(seat.sequence.spec.prompt_token_ids)) if seat.open.prefill is None else 0
        self.events.append(SeatEnded(seat.number, ending, seat.sequence.usage(cached), seat.report(now, everything_released)))

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        faults = []
        if self._keys.total() != len(self._seats):
            faults.append(f"{len(self._seats)} seats are there and attempts have {self._keys.total()}")
        landed = [seat for seat in self if seat.state is SeatState.LANDED]
        rows = {seat.number if seat.family is None else seat.family.leader.number: seat.landing_row for seat in landed}
        faults += self._memory.check(list(rows.values()))
        for number, family in self._families.items():
            readers = sum(seat.state is SeatState.LANDED for seat in family.seats)
            if readers != family.row_readers:
                faults.append(
                    f"{readers} siblings of seat {number} wait for their first token and {family.row_readers} are noted"
                )
        for seat in self:
            prompt, cached = len(seat.sequence.spec.prompt_token_ids), seat.sequence.cache_tokens
            if seat.state in _CHOSEN and cached != prompt + seat.sequence.selected_tokens - 1:
                faults.append(f"seat {seat.number} has {cached} tokens in the cache after {seat.sequence.selected_tokens} chosen")
            if seat.state is SeatState.PUSHING and not self._pushes.busy(seat.number):
                faults.append(f"seat {seat.number} is being pushed and nobody writes")
        return faults

    def _end_output(self, seat: Seat, ending: Ending, now: float) -> None:
        # What may go on at another member is decided about there; a router that ends a request ends it for good.
        for_good = ending.cause not in _TOLD_AT_ONCE or seat.cancel_requested_at is not None
        goes_on = ending.cause is Cause.MOVED or not for_good
        last = seat.sequence.leave(ending) if goes_on else seat.sequence.end(ending, now)
        if last.text or last.token_ids:
            self.events.append(OutputMade(seat.number, (), last.text, last.token_ids))
        if seat.leads and seat.family is not None:
            for one in list(seat.family.waiting):
                one.ending = one.ending or ending
                self.end(one, now)

    def _end_waiting(self, seat: Seat, now: float) -> None:
        """A sibling ends before it has the prompt's KV: it gives its promise back. A leader that waited for its siblings to have
        the KV ends with the last of them."""
        self._memory.release(seat.holding)
        self.finish(seat, now, everything_released=True)
        family = seat.family
        if family is None or family.waiting or family.ends_later is None:
            return
        if family.leader.end_with(*family.ends_later):
            self.end(family.leader, now)

    def _leave_family(self, seat: Seat) -> None:
        family = seat.family
        if family is None:
            return
        if seat in family.waiting:
            family.waiting.remove(seat)
        if all(one.state is SeatState.ENDED for one in family.seats):
            del self._families[family.leader.number]

    def _release_front(self, seat: Seat) -> None:
        """Before the commit a seat holds what it found in the cache, and its promise."""
        if pages := self._memory.release(seat.holding):
            seat.released["pages"] = pages

    def _note_grant(self, seat: Seat, pages: int) -> None:
        seat.released["pages"] = seat.released.get("pages", 0) + pages
        if not seat.open.moved:
            seat.released["landing_rows"] = 1

    def _reclaim(self, seat: Seat, ending: Ending, now: float) -> None:
        """Wait, for a while, until somebody else lets go of the seat's pages."""
        seat.move(SeatState.RECLAIMING)
        seat.end_by = now + self._release_wait_s
        if ending.cause in _TOLD_AT_ONCE:
            self.finish(seat, now, everything_released=False)

    def _writing(self, seat: Seat, ending: Ending) -> bool:
        """Whether writes read from the pages of a seat that ends; they are stopped unless the sequence goes on with them."""
        if ending.cause is Cause.MOVED:
            return self._pushes.busy(seat.number)
        return not self._pushes.stop(seat.number, ABANDONED)
