"""Who is in the next step. Pure: decode rows first, then prompt chunks under what is left of the token budget."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest

from decode_svc.memory import DecodeMemory
from decode_svc.seats import Seat, SeatState
from engine.batch import Batch, Rows

#: Steps of waiting that one point of priority is worth: priority goes first and nobody waits for ever.
PRIORITY_STEPS = 16


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


@dataclass(slots=True)
class Plan:
    """One step. `draws`: seats a token is chosen for, first those with logits in the batch, then those with a landing row."""

    number: int
    batch: Batch | None = None
    seats: list[Seat] = field(default_factory=list)
    draws: list[Seat] = field(default_factory=list)
    landing_rows: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def scheduled_tokens(self) -> int:
        """Tokens that the model computes in this step."""
        return self.batch.scheduled_tokens if self.batch else 0


def make_plan(number: int, seats: Iterable[Seat], memory: DecodeMemory, limits: StepLimits, now: float) -> Plan | None:
    """The next step; None when nothing can run. Takes the pages that its rows need."""
    runnable: list[Seat] = []
    computing: list[Seat] = []
    landed: list[Seat] = []
    for seat in seats:
        state = seat.state
        if state is SeatState.RUNNING:
            if not seat.window.paused:
                runnable.append(seat)
        elif state is SeatState.COMPUTING:
            computing.append(seat)
        elif state is SeatState.LANDED:
            landed.append(seat)
    plan = Plan(number)
    rows: list[Rows] = []
    if len(runnable) > limits.sequences:
        runnable = nsmallest(limits.sequences, runnable, key=_turn)
    for place, seat in enumerate(runnable):
        token, position = seat.sequence.next_input()
        holding = seat.holding
        memory.take(holding, position + 1)
        rows.append(Rows(holding.holder, (token,), position, holding.tables, True))
        # The place too, so that there are no ties: among equals it is strictly in turn.
        seat.last_turn = number + place / len(runnable)
        plan.draws.append(seat)
    plan.seats += runnable
    if computing:
        _add_chunks(plan, rows, nsmallest(limits.prompts, computing, key=_turn), memory, limits.tokens, now)
    for seat in landed:
        plan.draws.append(seat)
        plan.landing_rows.append(seat.landing_row)
    if rows:
        plan.batch = Batch(tuple(rows))
    return plan if plan.draws or rows else None


def _add_chunks(
    plan: Plan, rows: list[Rows], computing: list[Seat], memory: DecodeMemory, budget_tokens: int, now: float
) -> None:
    """Chunks of the prompts that came first; finishing one before the next begins gives the shortest mean wait."""
    left = budget_tokens - len(rows)
    for seat in computing:
        if left < 1:
            return
        prompt = seat.sequence.spec.prompt_token_ids
        first = seat.sequence.cache_tokens
        chunk = prompt[first : first + left]
        end = first + len(chunk)
        memory.take(seat.holding, end)
        last = end == len(prompt)
        rows.append(Rows(seat.holding.holder, chunk, first, seat.holding.tables, last))
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
