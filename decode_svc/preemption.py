"""Who has KV pages when there are too few: what a seat is promised, who is preempted, who comes back and when. Pure.

Pages are taken only between two steps, so never from a seat with rows in the running one. What a preempted seat is in the
middle of stays as it is: the next token, the text, the log, the sampler's position. It comes back with pages for everything
that it had and for its next token, or not at all, so no two seats can hold the pool against each other; and the seat that
ranks highest is never preempted, so there is always one that goes on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.estimate import Estimate
from decode_svc.kv_place import KvPlace
from decode_svc.memory import DecodeMemory, Holding, NoPages, Wanted
from decode_svc.preemption_cost import PreemptionCost
from decode_svc.seats import Seat, SeatState
from engine.page_copy import CopyKind, PageCopy
from engine.sequence import Sequence as TokenSequence
from lifecycle.finish import COMPLETE, Ending

#: One point of priority is added for each preemption and for so many steps of being away.
AGE_STEPS = 16
#: Seats that may come back before one that does not fit; then nobody comes back before it.
PASSES_MAX = 4

#: What may be preempted: nobody else writes into its pages or reads from them.
_PREEMPTIBLE = frozenset({SeatState.COMPUTING, SeatState.LANDED, SeatState.RUNNING})
#: What can go on only with pages. A landed seat draws its first token without them.
_NEEDS_PAGES = frozenset({SeatState.COMPUTING, SeatState.RUNNING})


class Reservation(Enum):
    """What a seat is promised beyond its prompt."""

    FULL = "full"
    """All of max_output_tokens: nobody is ever preempted."""
    EXPECTED = "expected"
    """As much output as others had."""


class PreemptionKind(Enum):
    """How the content of pages is kept when they are taken away."""

    RECOMPUTE = "recompute"
    """Not at all: it is computed again."""
    SWAP = "swap"
    """In host pages, as long as there are enough; else as above."""


@dataclass(frozen=True, slots=True)
class PressureLimits:
    """`kind` None: whichever is cheaper for the sequence at hand. `quantile` and `margin` as in Estimate."""

    reservation: Reservation = Reservation.FULL
    kind: PreemptionKind | None = None
    quantile: float = 0.8
    margin: float = 0.1


@dataclass(slots=True)
class PreemptionCounts:
    """Since the start. swapped_bytes: by direction. dropped_tokens: in pages that were taken, to be computed again."""

    preempted: dict[PreemptionKind, int] = field(default_factory=lambda: dict.fromkeys(PreemptionKind, 0))
    swapped_bytes: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))
    dropped_tokens: int = 0


class Preemption:
    """Gives pages to seats and takes them away. `seats`: all seats of the member, as they are when it is iterated."""

    def __init__(self, limits: PressureLimits, memory: DecodeMemory, seats: Iterable[Seat]) -> None:
        self.counts = PreemptionCounts()
        self.estimate = Estimate(limits.quantile, limits.margin)
        self.cost = PreemptionCost()
        self._limits = limits
        self.memory = memory
        self._seats = seats
        #: Preempted seats; one that has ended is dropped when they are next looked at.
        self._away: dict[int, Seat] = {}
        self._step = 0
        self._copies: list[PageCopy] = []

    # promises

    @property
    def expected_output_tokens(self) -> int | None:
        """Output that a new seat is promised, in tokens; None: all of its max_output_tokens."""
        return self.estimate.output_tokens if self._limits.reservation is Reservation.EXPECTED else None

    def promise(
        self, holder: str, sequence: TokenSequence, wanted: Wanted | None = None, *, computed: bool, shared_tokens: int = 0
    ) -> Holding:
        """Pages for a new seat, those of `wanted` that are here among them; computed: its prompt is, here; shared_tokens: as in
        DecodeMemory.promise. Raises NoPages, also while preempted seats want them."""
        kept = [0] * len(self.memory.pools)
        for seat in self._wanting():
            kept = [pages + more for pages, more in zip(kept, self._need(seat), strict=True)]
        tokens = self._tokens(sequence)
        return self.memory.promise(holder, tokens, kept, wanted, computed=computed, shared_tokens=shared_tokens)

    def ended(self, sequence: TokenSequence, ending: Ending) -> None:
        """An output ended by itself: its length counts for those to come, unless it broke."""
        if ending.reason in COMPLETE:
            self.estimate.add(sequence.selected_tokens)

    def _tokens(self, sequence: TokenSequence) -> int:
        """Tokens whose KV a sequence is promised: all that it has, the next one, and the output that is expected."""
        spec, most = sequence.spec, sequence.spec.most_cache_tokens
        if self._limits.reservation is Reservation.FULL:
            return most
        total = self.estimate.total(sequence.selected_tokens, spec.max_output_tokens)
        fed = len(spec.prompt_token_ids) + total - 1
        return min(most, max(len(sequence.given_token_ids), sequence.cache_tokens + 1, fed))

    # at a step's border

    def come_back(self, step: int) -> None:
        """Give pages to preempted seats that can go on, the highest rank first. `step`: the one that is planned."""
        self._step = step
        blocked: list[Seat] = []
        back: list[Seat] = []
        for seat in sorted(self._wanting(), key=self._rank, reverse=True):
            if any(one.passed >= PASSES_MAX for one in blocked):
                return
            need = self._need(seat)
            if self._fits(need) or self._displace(seat, need, back):
                self._return(seat)
                back.append(seat)
                for one in blocked:
                    one.passed += 1
            else:
                blocked.append(seat)

    def secure(self, seat: Seat, tokens: int) -> bool:
        """Pages of a resident seat for `tokens` tokens, others preempted for it if need be; False when it ranked lowest itself.

        Another seat that was given its pages for the same step may lose them by it: look at its place before it is run.
        """
        while True:
            try:
                self.memory.take(seat.holding, tokens)
            except NoPages:
                victim = min(self._preemptible(), key=self._rank)
                self._preempt(victim)
                if victim is seat:
                    return False
            else:
                return True

    def copied(self, copies: Sequence[PageCopy], seconds: float) -> None:
        """Copies have been run; for what they cost the next time."""
        self.cost.copied(sum(len(copy.pages) * self.memory.page_bytes[copy.group] for copy in copies), seconds)

    def take_copies(self) -> list[PageCopy]:
        """Copies since the last call, to be run in order before the next step."""
        copies, self._copies = self._copies, []
        return copies

    # books

    @property
    def away(self) -> int:
        """Seats that are preempted."""
        return len(self._preempted())

    def wanted_pages(self) -> int:
        """Pages of the measuring group which preempted seats need to come back."""
        return sum(self._need(seat)[self.memory.measure] for seat in self._wanting())

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        faults = []
        away = {seat.number for seat in self._seats if seat.away}
        if away != self._preempted().keys():
            faults.append(f"{len(away)} seats are preempted, {len(self._away)} are noted")
        for seat in self._seats:
            held, promised = seat.holding.pages, sum(seat.holding.promised)
            host = self.memory.host.held(seat.holding.holder)
            if seat.away and (held or promised):
                faults.append(f"seat {seat.number} is preempted, holds {held} pages and is promised {promised}")
            if (host > 0) != (seat.place is KvPlace.SWAPPED):
                faults.append(f"seat {seat.number} holds {host} host pages and its KV is {seat.place.value}")
            if seat.missing_tokens and seat.place not in (KvPlace.RESIDENT, KvPlace.DROPPED):
                faults.append(f"seat {seat.number} lacks {seat.missing_tokens} tokens and its KV is {seat.place.value}")
            if seat.place is KvPlace.RESIDENT and not self._covered(seat):
                faults.append(f"seat {seat.number} has {seat.sequence.cache_tokens} tokens of KV in {held} pages")
        return faults

    # inside

    def _rank(self, seat: Seat) -> tuple[bool, int, int]:
        """Who is preempted first ranks lowest: whoever can not run, then by priority and age, then the youngest."""
        return not seat.stopped, self._aged(seat), -seat.number

    def _aged(self, seat: Seat) -> int:
        waited = seat.waited_steps + (self._step - seat.away_since if seat.away else 0)
        return seat.open.priority + seat.preemptions + waited // AGE_STEPS

    def _preemptible(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.place is KvPlace.RESIDENT and seat.state in _PREEMPTIBLE]

    def _wanting(self) -> list[Seat]:
        """Preempted seats that would go on if they had pages."""
        return [seat for seat in self._preempted().values() if seat.state in _NEEDS_PAGES and not seat.stopped]

    def _preempted(self) -> dict[int, Seat]:
        """All preempted seats, by number; none is looked at that has its pages."""
        for number in [number for number, seat in self._away.items() if seat.state is SeatState.ENDED]:
            del self._away[number]
        return self._away

    def _need(self, seat: Seat) -> list[int]:
        """Pages of each group with which a preempted seat can go on."""
        return self.memory.need(self._tokens(seat.sequence), computed=seat.computes)

    def _fits(self, need: Sequence[int]) -> bool:
        return all(count <= room for count, room in zip(need, self.memory.room(), strict=True))

    def _displace(self, seat: Seat, need: Sequence[int], back: Sequence[Seat]) -> bool:
        """Preempt seats that can not run, or whose priority with their age is below this one's without; none if not enough.

        A seat is never displaced by one that it could displace in turn, so two do not change places for ever.
        """
        room = self.memory.room()
        victims: list[Seat] = []
        for other in sorted(self._preemptible(), key=self._rank):
            if all(count <= pages for count, pages in zip(need, room, strict=True)):
                break
            if other in back or not (other.stopped or self._aged(other) < seat.open.priority):
                continue
            victims.append(other)
            # What victims share with one another is not counted: rather one too many stays than one too few goes.
            room = [pages + more for pages, more in zip(room, self.memory.freed_by(other.holding), strict=True)]
        if any(count > pages for count, pages in zip(need, room, strict=True)):
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _preempt(self, seat: Seat) -> None:
        """Take everything from a resident seat. Until others need its pages they can be found by what they hold."""
        seat.remember(self.memory)
        kind = PreemptionKind.RECOMPUTE
        tokens = seat.sequence.cache_tokens
        if tokens and not seat.missing_tokens and self._swaps(tokens):
            copies = self.memory.swap_out(seat.holding, tokens)
            if copies is not None:
                kind = PreemptionKind.SWAP
                self._note_copies(copies)
                seat.put(KvPlace.SWAPPED)
        if kind is PreemptionKind.RECOMPUTE:
            self.memory.vacate(seat.holding)
            self.counts.dropped_tokens += tokens - seat.missing_tokens
            seat.missing_tokens = tokens
            seat.put(KvPlace.DROPPED)
        self.counts.preempted[kind] += 1
        self._away[seat.number] = seat
        seat.preemptions += 1
        seat.away_since = self._step

    def _swaps(self, tokens: int) -> bool:
        """Whether the KV of so many tokens is better kept than computed again, if the host has room."""
        if self._limits.kind is not None:
            return self._limits.kind is PreemptionKind.SWAP
        if not self.memory.host.units:
            return False
        pages = zip(self.memory.need(tokens), self.memory.page_bytes, strict=True)
        return self.cost.swap_is_cheaper(tokens, sum(count * size for count, size in pages))

    def _return(self, seat: Seat) -> None:
        """Give a preempted seat all that it needs; the caller has seen that there is enough."""
        tokens = self._tokens(seat.sequence)
        if seat.place is KvPlace.SWAPPED:
            self.memory.refill(seat.holding, tokens, computed=seat.computes)
            self._note_copies(self.memory.swap_back(seat.holding, seat.sequence.cache_tokens))
        else:
            seat.missing_tokens -= self.memory.refill(seat.holding, tokens, seat.sequence.cache_tokens, computed=seat.computes)
        seat.put(KvPlace.RESIDENT)
        del self._away[seat.number]
        seat.waited_steps += self._step - seat.away_since
        seat.passed = 0

    def _note_copies(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.counts.swapped_bytes[copy.kind] += len(copy.pages) * self.memory.page_bytes[copy.group]
        self._copies += copies

    def _covered(self, seat: Seat) -> bool:
        return self.memory.covers(seat.holding, seat.paged_tokens)
