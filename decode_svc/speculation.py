"""Which sequences draft how many tokens in a step, by what drafts cost and bring. Pure.

A step of n sequences gives n tokens. One row more makes it longer for all of them, and brings a token with the probability that
the draft in it and those before it are right. So a draft is worth its row, and what it takes to make it, while that probability
is above the share of the step that these cost, times n. All of it is learned: the costs from the steps that ran, the probability
from each sequence's own drafts. None of it changes any token.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from decode_svc.draft_model import ModelDrafts
from decode_svc.draft_records import DraftOrigin, Origin, SpeculationCounts
from decode_svc.drafts import DraftSource, GrammarDrafts, LookupDrafts, Wish
from decode_svc.memory import DecodeMemory
from decode_svc.planning import Plan
from decode_svc.seats import Seat, SeatState
from decode_svc.step_cost import StepCost
from engine.batch import Batch, Rows
from engine.prompt_lookup import LookupLimits


class SpeculationKind(Enum):
    """Where drafts come from."""

    OFF = "off"
    """There are none."""
    PROMPT_LOOKUP = "prompt_lookup"
    """From what followed the last tokens where they stood before, in prompt and output."""
    DRAFT_MODEL = "draft_model"
    """From a smaller model."""
    BOTH = "both"
    """From the text where that has any, else from the model."""

    @property
    def looks_up(self) -> bool:
        """Whether the text is asked."""
        return self in (SpeculationKind.PROMPT_LOOKUP, SpeculationKind.BOTH)

    @property
    def asks_model(self) -> bool:
        """Whether a model is asked."""
        return self in (SpeculationKind.DRAFT_MODEL, SpeculationKind.BOTH)


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """draft_tokens: most drafts of one sequence in one step."""

    kind: SpeculationKind = SpeculationKind.OFF
    draft_tokens: int = 8
    lookup: LookupLimits = field(default_factory=LookupLimits)

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens is {self.draft_tokens}, must be at least 1")


class Speculation:
    """Adds drafts to plans and learns from what becomes of them.

    Grammars are asked first, then `source`; None: what `limits.kind` says. `model`: asked for the others, where that wants one.
    """

    def __init__(
        self,
        limits: SpeculationLimits,
        memory: DecodeMemory,
        source: DraftSource | None = None,
        model: ModelDrafts | None = None,
    ) -> None:
        if limits.kind.asks_model and model is None:
            raise ValueError(f"speculation is {limits.kind.value}, and there is no draft model")
        self.counts = SpeculationCounts()
        self.cost = StepCost()
        self._limits = limits
        self._memory = memory
        self._model = model if limits.kind.asks_model else None
        self._origins: list[Origin] = []
        #: Of the step that runs, by seat.
        self._drafted_by: dict[int, Origin] = {}
        if limits.kind is not SpeculationKind.OFF:
            self._origins.append(Origin(DraftOrigin.GRAMMAR, GrammarDrafts()))
        if source is None and limits.kind.looks_up:
            source = LookupDrafts(limits.lookup)
        if source is not None:
            self._origins.append(Origin(DraftOrigin.PROMPT_LOOKUP, source))
        if self._model is not None:
            self._origins.append(Origin(DraftOrigin.DRAFT_MODEL, self._model))

    @property
    def sequences_off(self) -> int:
        """Sequences that do not draft, because it did not pay from any source."""
        off = {number for origin in self._origins for number, record in origin.records.items() if record.off}
        return len(off.difference(*(origin.drafting() for origin in self._origins)))

    def counts_by_origin(self) -> dict[DraftOrigin, SpeculationCounts]:
        """The counts of each source that there is."""
        return {origin.kind: origin.counts for origin in self._origins}

    @property
    def model_pages(self) -> int:
        """Pages that sequences hold in the draft model's own memory."""
        return 0 if self._model is None else self._model.pages

    @property
    def model_sequences(self) -> int:
        """Sequences that the draft model keeps something for."""
        return 0 if self._model is None else self._model.sequences

    def check(self) -> list[str]:
        """Sentences about what does not add up."""
        return [] if self._model is None else self._model.check()

    def add_drafts(self, plan: Plan, budget_tokens: int) -> None:
        """Drafts behind the rows of sequences that generate, as far as the step's budget and their own pages reach."""
        self._drafted_by.clear()
        for origin in self._origins:
            origin.asked, origin.drafted_tokens = False, 0
        if plan.batch is None:
            return
        left = budget_tokens - plan.scheduled_tokens
        for origin in self._origins:
            left -= self._add_from(origin, plan, left)
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
                seat.slide(self._memory)
        origin = self._drafted_by[seat.number]
        for counts in (self.counts, origin.counts):
            counts.drafted_tokens += len(drafts)
            counts.accepted_tokens += accepted
        origin.record(seat).note(accepted, wrong=wrong)

    def ran(self, plan: Plan, seconds: float, draft_s: float = 0.0) -> None:
        """A step took so long in the model and the sampler, and its drafts `draft_s` before it."""
        if plan.batch is None or not self._origins:
            return
        if not plan.prompt_tokens:
            self.cost.add(plan.scheduled_tokens, seconds)
        for origin in self._origins:
            if origin.kind is DraftOrigin.DRAFT_MODEL:
                origin.cost.add(origin.drafted_tokens, draft_s if origin.asked else 0.0)

    def let_go(self) -> None:
        """At a step's border: nothing is kept of seats that have ended, and no page of the model for those that stand still."""
        for origin in self._origins:
            for number in [number for number, record in origin.records.items() if record.seat.state is SeatState.ENDED]:
                origin.forget(number)
            if origin.source is self._model:
                for number, record in origin.records.items():
                    if record.seat.away or record.seat.state is not SeatState.RUNNING:
                        self._model.forget(number)

    # inside

    def _add_from(self, origin: Origin, plan: Plan, left: int) -> int:
        """Drafts of one source for the seats that have none; returns how many rows they take of the `left` ones."""
        wishes = self._wishes(origin, plan, left) if left > 0 else []
        if not wishes:
            return 0
        found = origin.source.propose(wishes)
        origin.asked = True
        for wish in wishes:
            room = min(left - origin.drafted_tokens, wish.most)
            drafts = wish.sequence.fit_drafts(found.get(wish.seat, ())[:room])
            if drafts:
                plan.drafts[wish.seat] = drafts
                self._drafted_by[wish.seat] = origin
                origin.drafted_tokens += len(drafts)
        return origin.drafted_tokens

    def _wishes(self, origin: Origin, plan: Plan, left: int) -> list[Wish]:
        running = [seat for seat in plan.seats if seat.runnable and seat.sequence.waiting and seat.number not in plan.drafts]
        share = self.cost.row_share(plan.scheduled_tokens, origin.cost.token_s)
        least = share * max(1, len(plan.draws))
        wishes = []
        for seat in running:
            if origin.kind is DraftOrigin.GRAMMAR and seat.sequence.grammar is None:
                continue
            reach = self._memory.reach(seat.holding) - seat.sequence.cache_tokens - 1
            worth = origin.record(seat).worth(least, self._limits.draft_tokens)
            most = min(worth, seat.sequence.draft_room, reach, left)
            if most > 0:
                wishes.append(Wish(seat.number, seat.sequence, most))
        return wishes

    def _longer(self, seat: Seat, rows: Rows, drafts: tuple[int, ...]) -> Rows:
        if not drafts:
            return rows
        self._memory.take(seat.holding, rows.end_position + len(drafts))
        return replace(rows, token_ids=(*rows.token_ids, *drafts), draft_tokens=len(drafts))
