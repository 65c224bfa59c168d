"""A decode scheduler under page pressure over real pages: what it forgets to save or to compute again shows as a wrong token."""

from collections.abc import Sequence

from decode_svc.draft_model import ModelDrafts
from decode_svc.messages import SeatGranted
from decode_svc.planning import Plan, StepLimits
from decode_svc.preemption import PreemptionKind, PressureLimits, Reservation
from decode_svc.seats import Seat
from engine.page_clones import PageCloner
from engine.page_copy import PageClone, PageCopy
from engine.page_types import PageState
from engine.swap import SwapArea
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from tests.unit.decode_world import PAGE_TOKENS, World
from tests.unit.guesses import Guesses

#: What free pages are filled with: the KV of no token.
GARBAGE = 99_999


class PressureWorld(World):
    """`kind`: how preempted seats are kept, None the cheaper way; `expected`: length of outputs seen before, in tokens.

    right: there are drafts, each right with this probability; as many as are wanted if that is 1, else any number.
    drafter: a draft model, which the settings have to ask for; `reads`: tokens that it reads before one step.

    After each step everything in free pages is spoilt, so a seat that reads what it does not hold says something else.
    """

    def __init__(
        self,
        kind: PreemptionKind | None = PreemptionKind.RECOMPUTE,
        *,
        total_pages: int = 13,
        host_pages: int = 40,
        expected: int = 1,
        reservation: Reservation = Reservation.EXPECTED,
        step: StepLimits | None = None,
        window: int | None = None,
        right: float | None = None,
        draft_seed: int = 0,
        drafter: ScriptedRunner | None = None,
        reads: int = 16,
        **options: object,
    ) -> None:
        host = 0 if kind is PreemptionKind.RECOMPUTE else host_pages
        runner = ScriptedRunner(
            ScriptedTokenizer().vocabulary_size,
            page_tokens=PAGE_TOKENS,
            total_pages=total_pages,
            context_tokens=64,
            window=window,
        )
        self.guesses = Guesses(runner, right or 0.0, draft_seed)
        #: The draft model says what the model says: drafts show what it has read.
        self.exact_drafts = False
        self.model_drafts = None if drafter is None else ModelDrafts(drafter, runner.vocabulary_size, reads)
        super().__init__(
            drafts=self.guesses if right is not None else None,
            draft_model=self.model_drafts,
            total_pages=total_pages,
            host_pages=host,
            step=step,
            window=window,
            pressure=PressureLimits(reservation, kind, quantile=1.0, margin=0.0),
            **options,  # type: ignore[arg-type]
        )
        self.runner = runner
        self.swap = SwapArea(self.runner.layout, self.runner.slab_data, host) if host else None
        self.preemption = self.scheduler.preemption
        for _ in range(8):
            self.preemption.estimate.add(expected)
        self.spoil()

    def fill(self, seat: int, writer: str = "writer-1") -> None:
        """The whole hand-over arrives, its pages first; found by position, as a writer finds them."""
        grant = self.grant_of(seat)
        given = self.seat(seat).sequence.given_token_ids
        for group, kv in zip(grant.groups, self.runner.kv, strict=True):
            for position in range(grant.first_position, grant.token_count):
                if page := group.page_ids[(position - grant.first_position) // PAGE_TOKENS]:
                    kv[page, position % PAGE_TOKENS] = given[position] + 1
        super().fill(seat, writer)

    def seat(self, number: int) -> Seat:
        """A live seat."""
        seat = self.scheduler.seats.get(number)
        assert seat is not None, f"seat {number} is gone"
        return seat

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Run the copies on the bytes; what was left is spoilt at once."""
        if copies:
            assert self.swap is not None
            self.swap.run(copies)
        self.spoil()

    def clone(self, clones: Sequence[PageClone]) -> None:
        """Clone the bytes."""
        PageCloner(self.runner.layout, self.runner.slab_data).run(clones)

    def compute(self, plan: Plan) -> list[int | None]:
        """Tokens that the script says after what is in the pages, and after a handed-over prompt."""
        logits = self.runner.run(plan.batch) if plan.batch is not None else ()
        if self.exact_drafts and plan.batch is not None:
            for seat, rows in zip(plan.seats, plan.batch.rows, strict=True):
                history = self.runner.history(rows)[: rows.end_position - rows.draft_tokens]
                assert list(plan.drafts_of(seat)) == self.runner.said(history, rows.draft_tokens)
        drawn: list[int | None] = [None if row.isnan().any() else int(row.argmax()) for row in logits]
        own = plan.draws[: len(plan.draws) - len(plan.shared)]
        landed = own[len(own) - len(plan.landing_rows) :]
        drawn += [self.runner.next_token(seat.sequence.given_token_ids) for seat in landed]
        first = {seat.number: rows.start for seat, rows in plan.drawn_rows()}
        return drawn + [drawn[first[leader.number]] for leader in plan.shared]

    def spoil(self) -> None:
        """Nothing can be read out of a page that nobody holds."""
        for pool, kv in zip(self.memory.pools, self.runner.kv, strict=True):
            for page in range(1, pool.usable_pages + 1):
                if pool.state(page) is PageState.FREE:
                    kv[page] = GARBAGE

    def said(self, seat: int, prompt: Sequence[int]) -> None:
        """Whatever a seat said is what it would have said alone."""
        selected = self.selected(seat)
        assert selected == self.runner.said(prompt, len(selected)), f"seat {seat} was disturbed"

    @property
    def preempted(self) -> int:
        """Preemptions so far."""
        return sum(self.preemption.counts.preempted.values())

    def granted(self, seat: int) -> bool:
        """Whether a seat was given."""
        return any(isinstance(event, SeatGranted) and event.seat == seat for event in self.events)
