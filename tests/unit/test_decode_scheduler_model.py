"""Any order of opens, cancels, notices, drains, fences, clocks and steps: the books balance and every seat ends once."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_svc.flow import cost
from decode_svc.handover import HandoverLimits
from decode_svc.messages import (
    AskDrain,
    AskEndpoint,
    AskFence,
    DrainAnswer,
    DrainAnswered,
    EndpointMade,
    EndSeat,
    LosePrefill,
    NoticesArrived,
    OutputMade,
    OutputTaken,
    PromptReady,
    SeatEnded,
    SeatGranted,
    SeatRefused,
    WriterFenced,
)
from decode_svc.planning import StepLimits
from engine.sequence import Earlier
from kv_transfer.offer import Grant, Peer
from kv_transfer.plan import part_count
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause
from tests.unit.decode_world import CANCEL, EOS, World

WRITERS = [Peer("prefill-0", "writer-1", "127.0.0.1:1"), Peer("prefill-1", "writer-2", "127.0.0.1:2")]


class DecodeMachine(RuleBasedStateMachine):
    """Rules send what the outside may send, in any order; answers to errands may be late, missing or repeated."""

    #: Of a second KV group, in tokens.
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.world = World(
            total_pages=25,
            landing_rows=3,
            sequences=6,
            step=StepLimits(tokens=10, sequences=3, prompts=2),
            stream_bytes=60,
            handover=HandoverLimits(grants_max=4, expires_s=20.0, start_s=30.0, tries_before_fence=2),
            model=lambda seat: EOS if seat.sequence.selected_tokens > 12 else 97 + seat.number % 26,
            window=self.window,
        )
        self.seats: list[int] = []
        self.parts: list[tuple[str, bytes]] = []
        self.drains: list[str] = []
        self.fenced_pages: set[int] = set()

    def grants(self) -> list[tuple[int, Grant]]:
        return [(e.seat, e.grant) for e in self.world.events if isinstance(e, SeatGranted) and e.grant is not None]

    @initialize()
    def begin(self) -> None:
        self.world.open(prompt=3)
        self.seats.append(1)

    @rule(
        prompt=st.integers(1, 30),
        most=st.integers(1, 20),
        writer=st.sampled_from([None, *WRITERS]),
        clock=st.sampled_from([None, 3.0, 10.0]),
        priority=st.integers(-2, 2),
        final_only=st.booleans(),
        chosen=st.sampled_from([0, 0, 1, 7]),
    )
    def open(
        self, prompt: int, most: int, writer: Peer | None, clock: float | None, priority: int, final_only: bool, chosen: int
    ) -> None:
        """With `chosen` tokens of an earlier attempt, all delivered."""
        limits = Limits(first_token_s=clock, inter_token_s=clock, overall_s=None if clock is None else 4 * clock)
        earlier = Earlier(tuple(b"e" * chosen), chosen, chosen) if 0 < chosen < most else None
        seat = self.world.open(
            prompt, most, prefill=writer, limits=limits, priority=priority, sends_output=not final_only, earlier=earlier
        )
        self.seats.append(seat)

    @rule(data=st.data(), during=st.booleans())
    def step(self, data: st.DataObject, during: bool) -> None:
        commands = []
        if during and self.seats:
            commands = [EndSeat(data.draw(st.sampled_from(self.seats)), CANCEL, self.world.now)]
        self.world.step(*commands, seconds=data.draw(st.sampled_from([0.01, 0.5, 2.0])))

    @rule()
    def fail_a_step(self) -> None:
        plan = self.world.scheduler.next_batch(self.world.now)
        if plan is not None:
            self.world.scheduler.fail(plan, self.world.now)
        self.world.collect()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.seats)))

    @rule(data=st.data(), drained=st.booleans())
    def lose_prefill(self, data: st.DataObject, drained: bool) -> None:
        # A router says drained only of a writer that has stopped: its late notices are then its last.
        self.world.tell(LosePrefill(data.draw(st.sampled_from(self.seats)), Cause.PREFILL_FAILED, drained))

    @precondition(lambda self: any(isinstance(e, AskEndpoint) for e in self.world.errands))
    @rule(works=st.booleans())
    def endpoint(self, works: bool) -> None:
        errand = next(e for e in self.world.errands if isinstance(e, AskEndpoint))
        self.world.errands.remove(errand)
        if works:
            self.world.make_endpoint(errand.writer)
        else:
            self.world.tell(EndpointMade(errand.writer, None, "no memory"))

    @precondition(lambda self: bool(self.grants()))
    @rule(data=st.data())
    def notice(self, data: st.DataObject) -> None:
        """One part of any grant, however old."""
        _, grant = data.draw(st.sampled_from(self.grants()))
        part = data.draw(st.integers(0, part_count(grant) - 1))
        writer = data.draw(st.sampled_from(["writer-1", "writer-2"]))
        self.world.tell(NoticesArrived(((writer, self.world.notice(grant, part)),)))

    @precondition(lambda self: bool(self.grants()))
    @rule(data=st.data())
    def whole_handover(self, data: st.DataObject) -> None:
        _, grant = data.draw(st.sampled_from(self.grants()))
        for writer in ("writer-1", "writer-2"):
            parts = tuple((writer, self.world.notice(grant, part)) for part in range(part_count(grant)))
            self.world.tell(NoticesArrived(parts))

    @precondition(lambda self: any(isinstance(e, AskDrain) for e in self.world.errands))
    @rule(answer=st.sampled_from(list(DrainAnswer)))
    def drain_answer(self, answer: DrainAnswer) -> None:
        errand = next(e for e in self.world.errands if isinstance(e, AskDrain))
        self.world.errands.remove(errand)
        self.drains.append(errand.grant_id)
        self.world.tell(DrainAnswered(errand.grant_id, answer))

    @precondition(lambda self: bool(self.drains))
    @rule(data=st.data())
    def drain_answer_again(self, data: st.DataObject) -> None:
        self.world.tell(DrainAnswered(data.draw(st.sampled_from(self.drains)), DrainAnswer.STOPPED))

    @precondition(lambda self: any(isinstance(e, AskFence) for e in self.world.errands))
    @rule(proven=st.booleans())
    def fence(self, proven: bool) -> None:
        errand = next(e for e in self.world.errands if isinstance(e, AskFence))
        self.world.errands.remove(errand)
        self.world.tell(WriterFenced(errand.writer, proven))

    @rule(data=st.data())
    def take_output(self, data: st.DataObject) -> None:
        seat = self.world.scheduler.seats.get(data.draw(st.sampled_from(self.seats)))
        if seat is not None and seat.window.untaken_bytes:
            self.world.tell(OutputTaken(seat.number, data.draw(st.integers(1, seat.window.untaken_bytes))))

    @rule(seconds=st.sampled_from([0.1, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @invariant()
    def books_balance(self) -> None:
        self.world.check()
        assert len(self.world.scheduler.seats) <= 6
        assert self.world.handovers.open <= 4

    @invariant()
    def events_are_in_order(self) -> None:
        for seat in self.seats:
            kinds = [type(event) for event in self.world.events if event.seat == seat]
            assert kinds.count(SeatEnded) + kinds.count(SeatRefused) <= 1
            assert kinds.count(SeatGranted) <= 1 and kinds.count(PromptReady) <= 1
            if SeatEnded in kinds:
                assert kinds[-1] is SeatEnded
            if OutputMade in kinds:
                first = kinds.index(OutputMade)
                assert PromptReady in kinds[:first] and SeatGranted in kinds[:first]

    @invariant()
    def no_page_is_in_two_places(self) -> None:
        held = [
            (group, page)
            for seat in self.world.scheduler.seats
            for group, table in enumerate(seat.holding.tables)
            for page in table
            if page
        ]
        assert len(held) == len(set(held))

    @invariant()
    def a_window_is_never_much_over_its_bound(self) -> None:
        for seat in self.world.scheduler.seats:
            assert seat.window.untaken_bytes < 60 + cost(b"x" * 4) + 60

    def teardown(self) -> None:
        """Whatever happened: cancel all, answer everything, and nothing is left."""
        world = self.world
        for seat in self.seats:
            world.cancel(seat)
        for _ in range(60):
            world.step()
            errands, world.errands = world.errands, []
            for errand in errands:
                if isinstance(errand, AskDrain):
                    world.tell(DrainAnswered(errand.grant_id, DrainAnswer.STOPPED))
                elif isinstance(errand, AskFence):
                    world.tell(WriterFenced(errand.writer, True))
                else:
                    world.make_endpoint(errand.writer)
            world.now += 11.0
        for seat in self.seats:
            assert sum(isinstance(e, SeatEnded | SeatRefused) and e.seat == seat for e in world.events) == 1
        world.assert_empty()


TestDecodeScheduler = pytest.mark.slow(DecodeMachine.TestCase)
TestDecodeScheduler.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class BehindAWindow(DecodeMachine):
    """The same with a second KV group."""

    window = 6


TestBehindAWindow = pytest.mark.slow(BehindAWindow.TestCase)
TestBehindAWindow.settings = TestDecodeScheduler.settings
