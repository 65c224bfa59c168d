"""Who is in the next step. Pure: decode rows first, then prompt chunks under what is left of the token budget."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest

from decode_svc.kv_place import KvPlace
from decode_svc.memory import DecodeMemory
from decode_svc.preemption import Preemption
from decode_svc.seats import Seat, SeatState
from engine.batch import Batch, Rows

#: Steps of waiting that one point of priority is worth: priority goes first and nobody waits for ever.
PRIORITY_STEPS = 16
#: Most tokens of a chunk that has all its logits: they take a row of the vocabulary's size each, for as long as the step lasts.
SCORED_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Budgets of one step. Prompt chunks have places of their own, so decode rows never shut them out, nor they decode rows."""

    tokens: int = 256
    sequences: int = 32
    prompts: int = 4

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"step_{name} is {getattr(self, name)}; it must be at least 1")
        if self.tokens <= self.sequences:
            raise ValueError(
                f"step_tokens is {self.tokens}; so that prompts go on it must be above step_sequences {self.sequences}"
            )


@dataclass(frozen=True, slots=True)
class Scored:
    """A chunk whose rows of logits are those from `first_row` on: they tell of the tokens that follow, `tokens`."""

    seat: Seat
    first_row: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """One step. `draws`: seats a token is chosen for, first those with logits in the batch, then those with a landing row.

    drafts: of some of them, by seat, what may follow the token that is fed; there are logits, and a token is chosen, after each.
    shared: for the last of `draws`, which are siblings that begin in this step, whose logits they draw from.
    """

    number: int
    batch: Batch | None = None
    seats: list[Seat] = field(default_factory=list)
    draws: list[Seat] = field(default_factory=list)
    landing_rows: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    shared: list[Seat] = field(default_factory=list)

    def logit_rows(self) -> tuple[list[int], list[Scored]]:
        """Where in the batch's logits the rows of each of its draws are, and what else they are wanted for."""
        draws, scored, row = list[int](), list[Scored](), 0
        drawn = {seat.number for seat in self.draws}
        for seat, rows in zip(self.seats, self.batch.rows if self.batch is not None else (), strict=True):
            if not rows.wants_logits:
                continue
            if rows.all_logits:
                prompt = seat.sequence.spec.prompt_token_ids
                scored.append(Scored(seat, row, prompt[rows.first_position + 1 : rows.end_position + 1]))
                row += len(rows.token_ids) - 1
            draws += range(row, row + rows.draft_tokens)
            row += rows.draft_tokens
            if seat.number in drawn:
                draws.append(row)
            row += 1
        return draws, scored

    @property
    def scheduled_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return self.batch.scheduled_tokens if self.batch else 0

    def drafts_of(self, seat: Seat) -> tuple[int, ...]:
        """What a seat drafts; empty for most."""
        return self.drafts.get(seat.number, ())

    def drawn_rows(self) -> Iterator[tuple[Seat, range]]:
        """For each of `draws` which rows of logits are its: the token's, then one for each of its drafts."""
        row = 0
        for seat in self.draws:
            end = row + 1 + len(self.drafts_of(seat))
            yield seat, range(row, end)
            row = end


def make_plan(
    number: int, seats: Iterable[Seat], memory: DecodeMemory, preemption: Preemption, limits: StepLimits, now: float
) -> Plan | None:
    """The next step; None when nothing can run. Takes the pages that its rows need, if need be from other seats."""
    runnable: list[Seat] = []
    computing: list[Seat] = []
    landed: list[Seat] = []
    for seat in seats:
        state = seat.state
        if state is SeatState.LANDED:
            landed.append(seat)
        elif seat.place is KvPlace.RESIDENT:
            if state is SeatState.COMPUTING or seat.missing_tokens:
                computing.append(seat)
            elif state is SeatState.RUNNING and not seat.window.paused:
                runnable.append(seat)
    plan = Plan(number)
    rows: list[Rows] = []
    if len(runnable) > limits.sequences:
        runnable = nsmallest(limits.sequences, runnable, key=_turn)
    for seat in runnable:
        if seat.place is KvPlace.RESIDENT:
            preemption.secure(seat, seat.sequence.cache_tokens + 1)
    # Only now is it known who kept its pages.
    runnable = [seat for seat in runnable if seat.place is KvPlace.RESIDENT]
    computing = [seat for seat in computing if seat.place is KvPlace.RESIDENT]
    for place, seat in enumerate(runnable):
        token, position = seat.sequence.next_input()
        holding = seat.holding
        rows.append(Rows(holding.holder, (token,), position, holding.tables, True, adapter=seat.sequence.spec.adapter))
        # The place too, so that there are no ties: among equals it is strictly in turn.
        seat.last_turn = number + place / len(runnable)
        plan.draws.append(seat)
    plan.seats += runnable
    if computing:
        _add_chunks(plan, rows, nsmallest(limits.prompts, computing, key=_chunk_turn), memory, limits.tokens, now)
    for seat in landed:
        plan.draws.append(seat)
        plan.landing_rows.append(seat.landing_row)
    for leader in [seat for seat in plan.draws if seat.leads]:
        begins = [seat for seat in leader.family.waiting if not seat.sequence.spec.earlier.token_ids] if leader.family else []
        plan.draws += begins
        plan.shared += [leader] * len(begins)
    if rows:
        plan.batch = Batch(tuple(rows))
    return plan if plan.draws or rows else None


def _add_chunks(
    plan: Plan, rows: list[Rows], computing: list[Seat], memory: DecodeMemory, budget_tokens: int, now: float
) -> None:
    """Chunks of what was lost, then of the first prompts; finishing one before the next gives the shortest mean wait."""
    left = budget_tokens - len(rows)
    for seat in computing:
        if left < 1:
            return
        scored = seat.sequence.spec.scores_prompt and not seat.missing_tokens
        chunk, first = seat.next_chunk(min(left, SCORED_CHUNK_TOKENS) if scored else left)
        end = first + len(chunk)
        memory.take(seat.holding, end)
        last = not seat.missing_tokens and end == len(seat.sequence.given_token_ids)
        adapter, wanted = seat.sequence.spec.adapter, last or scored
        rows.append(Rows(seat.holding.holder, chunk, first, seat.holding.tables, wanted, scored, adapter=adapter))
        plan.seats.append(seat)
        plan.prompt_tokens += len(chunk)
        left -= len(chunk)
        if seat.begun_at is None:
            seat.begun_at = now
        if last:
            plan.draws.append(seat)


def _turn(seat: Seat) -> tuple[float, int]:
    # `last_turn` of a prompt stays what it was when its seat was opened: first come, first served.
    return seat.last_turn - PRIORITY_STEPS * seat.open.priority, seat.number


def _chunk_turn(seat: Seat) -> tuple[bool, float, int]:
    # Who was in the middle of its output goes before those that have not begun.
    return (not seat.missing_tokens, *_turn(seat))
