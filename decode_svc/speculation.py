"""Which sequences draft how many tokens in a step, by what drafts cost and bring. Pure.

A step of n sequences gives n tokens. One row more makes it longer for all of them, and brings a token with the probability that
the draft in it and those before it are right. So a draft is worth its row while that probability is above the share of the step
that a row costs, times n. Both are learned: the cost from the steps that ran, the probability from each sequence's own drafts.
Neither changes any token.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_svc.drafts import DraftSource, LookupDrafts, Wish
from decode_svc.memory import DecodeMemory
from decode_svc.planning import Plan
from decode_svc.seats import Seat, SeatState
from decode_svc.step_cost import StepCost
from engine.batch import Batch, Rows
from engine.prompt_lookup import LookupLimits

#: Weight that an earlier draft keeps for each later one of its sequence.
KEPT = 0.85
#: A sequence whose drafts are right less often does not draft, however cheap rows are.
ACCEPTED_LEAST = 0.05
#: A sequence that does not draft tries again after so many tokens, twice as many each time, up to the second number.
REST_TOKENS, REST_TOKENS_MOST = 32, 512
#: What the longest drafts are taken to be right with at most, so that one miss is never the end of drafting.
ACCEPTED_MOST = 0.99


class SpeculationKind(Enum):
    """Where drafts come from."""

    OFF = "off"
    """There are none."""
    PROMPT_LOOKUP = "prompt_lookup"
    """From what followed the last tokens where they stood before, in prompt and output."""


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """draft_tokens: most drafts of one sequence in one step."""

    kind: SpeculationKind = SpeculationKind.OFF
    draft_tokens: int = 8
    lookup: LookupLimits = field(default_factory=LookupLimits)

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens is {self.draft_tokens}, must be at least 1")


@dataclass(slots=True)
class SpeculationCounts:
    """Since the start: drafts that were computed, and those that were what was chosen."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Record:
    """How a sequence's drafts did. right, wrong: fading counts; tried_at: tokens it had when it drafted last, or began anew."""

    seat: Seat
    right: float = 0.0
    wrong: float = 0.0
    tried_at: int = 0
    rest_tokens: int = REST_TOKENS
    off: bool = False

    @property
    def accepted(self) -> float:
        """Probability that its next draft is right; one half while nothing is known."""
        return min(ACCEPTED_MOST, (self.right + 0.25) / (self.right + self.wrong + 0.5))

    def note(self, right: int, *, wrong: bool) -> None:
        """So many of its drafts were right before one was wrong, if one was."""
        self.right = KEPT * self.right + right
        self.wrong = KEPT * self.wrong + wrong
        self.tried_at = self.seat.sequence.selected_tokens
        if right:
            self.rest_tokens = REST_TOKENS

    def worth(self, least: float, most: int) -> int:
        """How many drafts are worth their rows: the last one of k is right with accepted ** k, which must be above `least`."""
        least = max(least, ACCEPTED_LEAST)
        self.off = self.accepted <= least
        if self.off:
            return self._try_again(most)
        return min(most, math.floor(math.log(least) / math.log(self.accepted))) if least < 1.0 else 0

    def _try_again(self, most: int) -> int:
        chosen = self.seat.sequence.selected_tokens
        if chosen - self.tried_at < self.rest_tokens:
            return 0
        if self.accepted < 0.5:
            self.right = self.wrong = 0.0
        self.tried_at = chosen
        self.rest_tokens = min(2 * self.rest_tokens, REST_TOKENS_MOST)
        return 0


class Speculation:
    """Adds drafts to plans and learns from what becomes of them. `source` None: what `limits.kind` says."""

    def __init__(self, limits: SpeculationLimits, memory: DecodeMemory, source: DraftSource | None = None) -> None:
        self.counts = SpeculationCounts()
        self.cost = StepCost()
        self._limits = limits
        self._memory = memory
        self._source = source
        if source is None and limits.kind is SpeculationKind.PROMPT_LOOKUP:
            self._source = LookupDrafts(limits.lookup)
        self._records: dict[int, Record] = {}

    @property
    def on(self) -> bool:
        """Whether anything is ever drafted."""
        return self._source is not None

    @property
    def sequences_off(self) -> int:
        """Sequences that do not draft, because it did not pay."""
        return sum(record.off for record in self._records.values())

    def add_drafts(self, plan: Plan, budget_tokens: int) -> None:
        """Drafts behind the rows of sequences that generate, as far as the step's budget and their own pages reach."""
        if self._source is None or plan.batch is None:
            return
        self._forget_ended()
        left = budget_tokens - plan.scheduled_tokens
        wishes = self._wishes(plan, left) if left > 0 else []
        if not wishes:
            return
        found = self._source.propose(wishes)
        for wish in wishes:
            drafts = wish.sequence.fit_drafts(found.get(wish.seat, ())[: min(left, wish.most)])
            if drafts:
                plan.drafts[wish.seat] = drafts
                left -= len(drafts)
        if plan.drafts:
            pairs = zip(plan.seats, plan.batch.rows, strict=True)
            plan.batch = Batch(tuple(self._longer(seat, rows, plan.drafts.get(seat.number, ())) for seat, rows in pairs))

    def accept(
        self, seat: Seat, drafts: Sequence[int], chosen: Sequence[int | None], following: Iterable[Callable[[], None]]
    ) -> None:
        """The first of `chosen` was chosen. While what was drafted is chosen, the next one was computed already: choose it.

        chosen: for each draft the token of its place. following: for each draft, how to choose the one after it. What stops a
        seat between two steps stops it here; what a grammar gave no mask for is left to the next step. Pages that only the other
        drafts needed go back to its promise.
        """
        accepted, wrong = 0, False
        for draft, token, choose in zip(drafts, chosen, following, strict=True):
            if not seat.runnable:
                break
            wrong = draft != token
            if wrong or not seat.sequence.drawn_ahead:
                break
            accepted += 1
            seat.completed(1)
            choose()
        if seat.state is SeatState.RUNNING:
            self._memory.give_back(seat.holding, seat.sequence.cache_tokens)
            if self._memory.windowed:
                self._memory.slide(seat.holding, seat.paged_tokens, computed=False)
        self.counts.drafted_tokens += len(drafts)
        self.counts.accepted_tokens += accepted
        self._records[seat.number].note(accepted, wrong=wrong)

    def ran(self, plan: Plan, seconds: float) -> None:
        """A step took so long in the model and the sampler."""
        if self._source is not None and plan.batch is not None and not plan.prompt_tokens:
            self.cost.add(plan.scheduled_tokens, seconds)

    # inside

    def _wishes(self, plan: Plan, left: int) -> list[Wish]:
        assert plan.batch is not None
        running = [seat for seat in plan.seats if seat.runnable and seat.sequence.waiting]
        least = self.cost.row_share(plan.scheduled_tokens) * max(1, len(plan.draws))
        wishes = []
        for seat in running:
            record = self._records.get(seat.number)
            if record is None:
                record = self._records[seat.number] = Record(seat, tried_at=seat.sequence.selected_tokens)
            reach = self._memory.reach(seat.holding) - seat.sequence.cache_tokens - 1
            most = min(record.worth(least, self._limits.draft_tokens), seat.sequence.draft_room, reach, left)
            if most > 0:
                wishes.append(Wish(seat.number, seat.sequence, most))
        return wishes

    def _longer(self, seat: Seat, rows: Rows, drafts: tuple[int, ...]) -> Rows:
        if not drafts:
            return rows
        self._memory.take(seat.holding, rows.end_position + len(drafts))
        return Rows(rows.sequence, (*rows.token_ids, *drafts), rows.first_position, rows.pages, True, draft_tokens=len(drafts))

    def _forget_ended(self) -> None:
        assert self._source is not None
        for number in [number for number, record in self._records.items() if record.seat.state is SeatState.ENDED]:
            del self._records[number]
            self._source.forget(number)
