"""Any order of arrivals, cancels, stalled readers, failed steps and clocks under page pressure: the books balance, every output
is the undisturbed one, nobody waits for ever and nothing is left."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_svc.messages import (
    AskDrain,
    AskEndpoint,
    DrainAnswer,
    DrainAnswered,
    EndChoice,
    EndSeat,
    OutputTaken,
    PauseSeat,
    SeatEnded,
    SeatRefused,
)
from decode_svc.planning import StepLimits
from decode_svc.preemption import PASSES_MAX, PreemptionKind
from decode_svc.seats import SeatState
from decode_svc.speculation import SpeculationKind, SpeculationLimits
from kv_transfer.offer import Peer
from lifecycle.deadlines import Limits
from lifecycle.finish import FinishReason
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from tests.unit.decode_world import CANCEL, PAGE_TOKENS, WRITER
from tests.unit.pressure_world import PressureWorld

#: Whatever happened before, that many steps with readers that read end everything: each seat has at most 30 tokens to go.
STEPS_MAX = 1500


def _drafter(model: str, pages: int, window: int | None) -> ScriptedRunner:
    """A draft model with few pages that says the same, or nothing that is right; its context is shorter."""
    runner = ScriptedRunner(
        ScriptedTokenizer().vocabulary_size,
        otherwise=None if model == "exact" else lambda history: 200,
        page_tokens=PAGE_TOKENS,
        total_pages=pages,
        context_tokens=40,
        window=window,
    )
    runner.slack_tokens = SpeculationLimits().draft_tokens
    return runner


class PressureMachine(RuleBasedStateMachine):
    """At most 8 seats over 11 to 16 pages of 4 tokens, each needing up to 11 pages; sometimes a second group behind a window."""

    @initialize(
        kind=st.sampled_from(list(PreemptionKind)),
        pages=st.integers(12, 17),
        host=st.integers(1, 12),
        expected=st.integers(1, 8),
        window=st.sampled_from([None, None, 1, 5, 8]),
        right=st.sampled_from([None, 0.2, 0.8, 1.0]),
        model=st.sampled_from([None, None, "exact", "exact", "wrong"]),
        model_pages=st.integers(6, 30),
    )
    def begin(
        self,
        kind: PreemptionKind,
        pages: int,
        host: int,
        expected: int,
        window: int | None,
        right: float | None,
        model: str | None,
        model_pages: int,
    ) -> None:
        drafter = None if model is None else _drafter(model, model_pages, window)
        speculation = SpeculationKind.OFF if model is None else SpeculationKind.BOTH if right else SpeculationKind.DRAFT_MODEL
        self.world = PressureWorld(
            kind,
            total_pages=pages,
            host_pages=host,
            expected=expected,
            sequences=8,
            step=StepLimits(tokens=9, sequences=3, prompts=2),
            stream_bytes=90,
            window=window,
            right=right,
            drafter=drafter,
            reads=8,
            speculation=SpeculationLimits(speculation),
        )
        self.world.exact_drafts = model == "exact" and right is None
        self.prompts: dict[int, tuple[int, ...]] = {}
        #: Seats with siblings, and how many tokens of each another member had chosen.
        self.begun: dict[int, int] = {}
        self.read = True
        for length in (1, 3, 5, 8):
            self.open(length, 30, None, None, 0)

    @rule(
        length=st.integers(1, 14),
        output=st.integers(10, 30),
        writer=st.sampled_from([None, None, WRITER]),
        clock=st.sampled_from([None, None, 8.0]),
        priority=st.integers(-2, 2),
    )
    def open(self, length: int, output: int, writer: Peer | None, clock: float | None, priority: int) -> None:
        ids = tuple((7 * len(self.prompts) + place) % 250 for place in range(length))
        limits = Limits(inter_token_s=clock, overall_s=None if clock is None else 5 * clock)
        seat = self.world.open(ids, output, prefill=writer, priority=priority, limits=limits)
        self.prompts[seat] = ids
        if AskEndpoint(WRITER.incarnation) in self.world.errands:
            self.world.errands.remove(AskEndpoint(WRITER.incarnation))
            self.world.make_endpoint()

    @rule(
        length=st.integers(1, 9),
        output=st.integers(10, 16),
        before=st.lists(st.integers(0, 6), min_size=2, max_size=3),
        writer=st.sampled_from([None, WRITER]),
        clock=st.sampled_from([None, None, 8.0]),
    )
    def open_choices(self, length: int, output: int, before: list[int], writer: Peer | None, clock: float | None) -> None:
        """Several outputs of one prompt, some of which another member had begun."""
        ids = tuple((7 * len(self.prompts) + place) % 250 for place in range(length))
        said = [tuple(self.world.runner.said(ids, count)) for count in sorted(before)]
        limits = Limits(inter_token_s=clock, overall_s=None if clock is None else 5 * clock)
        seats = self.world.open_choices(ids, output, said, prefill=writer, limits=limits)
        refused = {event.seat for event in self.world.events if isinstance(event, SeatRefused)}
        for seat, tokens in zip(seats, said, strict=True):
            if seats[0] not in refused:
                self.prompts[seat] = ids + tokens
                self.begun[seat] = len(tokens)
        if AskEndpoint(WRITER.incarnation) in self.world.errands:
            self.world.errands.remove(AskEndpoint(WRITER.incarnation))
            self.world.make_endpoint()

    @precondition(lambda self: getattr(self, "begun", None))
    @rule(data=st.data(), during=st.booleans())
    def cancel_one(self, data: st.DataObject, during: bool) -> None:
        command = EndChoice(data.draw(st.sampled_from(sorted(self.begun))), CANCEL, self.world.now)
        if during:
            self.world.step(command)
        else:
            self.world.tell(command)

    @rule(steps=st.integers(1, 30))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step(seconds=0.1)
            self.answer()
            if self.read:
                self.take_all()

    @rule(steps=st.integers(10, 30))
    def steps(self, steps: int) -> None:
        self.step(steps)

    @precondition(lambda self: self.away())
    @rule(data=st.data(), during=st.booleans(), which=st.sampled_from(["any", "away", "away"]))
    def cancel(self, data: st.DataObject, during: bool, which: str) -> None:
        seat = data.draw(st.sampled_from(self.away() if which == "away" else sorted(self.prompts)))
        if during:
            self.world.step(EndSeat(seat, CANCEL, self.world.now))
        else:
            self.world.cancel(seat)

    @precondition(lambda self: self.away())
    @rule(data=st.data())
    def stand_still(self, data: st.DataObject) -> None:
        """A preempted seat is to be moved: it waits for its router from now on."""
        self.world.tell(PauseSeat(data.draw(st.sampled_from(self.away()))))

    @precondition(lambda self: self.away())
    @rule()
    def fail_a_step(self) -> None:
        plan = self.world.scheduler.next_batch(self.world.now)
        self.world.clone(self.world.scheduler.families.take_clones())
        self.world.copy(self.world.preemption.take_copies())
        if plan is not None:
            self.world.scheduler.draft(plan)
            self.world.scheduler.fail(plan, self.world.now)
        self.world.collect()
        self.world.spoil()

    @rule(reads=st.booleans())
    def readers(self, reads: bool) -> None:
        self.read = reads

    @rule()
    def hand_over(self) -> None:
        for seat in list(self.world.scheduler.seats):
            if seat.state is SeatState.OFFERED:
                self.world.fill(seat.number)

    @rule(seconds=st.sampled_from([0.5, 9.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    def away(self) -> list[int]:
        """Seats that are preempted now."""
        return [seat.number for seat in self.world.scheduler.seats if seat.away] if hasattr(self, "world") else []

    def answer(self) -> None:
        errands, self.world.errands = self.world.errands, []
        for errand in errands:
            assert isinstance(errand, AskDrain)
            self.world.tell(DrainAnswered(errand.grant_id, DrainAnswer.STOPPED))

    def take_all(self) -> None:
        for seat in list(self.world.scheduler.seats):
            if seat.window.untaken_bytes:
                self.world.tell(OutputTaken(seat.number, seat.window.untaken_bytes))

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def every_output_is_the_undisturbed_one(self) -> None:
        if hasattr(self, "world"):
            for seat, ids in self.prompts.items():
                self.world.said(seat, ids)

    @invariant()
    def who_waits_is_not_passed_for_ever(self) -> None:
        if hasattr(self, "world"):
            assert all(seat.passed <= PASSES_MAX for seat in self.world.scheduler.seats)

    @invariant()
    def no_page_is_in_two_places(self) -> None:
        if hasattr(self, "world"):
            for group in range(len(self.world.memory.groups)):
                # Siblings share pages, and only they.
                held: dict[int, set[int]] = {}
                for seat in self.world.scheduler.seats:
                    owner = seat.number if seat.family is None else seat.family.leader.number
                    held.setdefault(owner, set()).update(page for page in seat.holding.tables[group] if page)
                assert len(set().union(*held.values())) == sum(map(len, held.values()))

    def teardown(self) -> None:
        """Readers read and writers write: everything that lives ends by itself, within a bound."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(STEPS_MAX):
            self.answer()
            if not len(world.scheduler.seats):
                break
            self.hand_over()
            self.take_all()
            for seat in list(world.scheduler.seats):
                if seat.state is SeatState.PAUSED:
                    world.cancel(seat.number)
            world.step(seconds=0.001)
        assert len(world.scheduler.seats) == 0, "somebody waits for ever"
        for seat, ids in self.prompts.items():
            assert sum(isinstance(event, SeatEnded | SeatRefused) and event.seat == seat for event in world.events) == 1
            world.said(seat, ids)
            end = world.ended(seat)
            if end is not None and end.ending.reason is FinishReason.MAX_OUTPUT_TOKENS:
                assert len(world.selected(seat)) + self.begun.get(seat, 0) == end.usage.selected_tokens
        world.assert_empty()


TestDecodePressure = pytest.mark.slow(PressureMachine.TestCase)
TestDecodePressure.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
