"""Any order of pauses, pushes, failures, cancels, clocks and losses at two decode members.

The books of both balance, every seat ends once, and whatever the members said is what one of them would have said alone.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decode_svc.messages import EndAll, EndSeat, LosePrefill, PauseSeat, SeatEnded, SeatPaused, SeatPushed, SeatRefused
from decode_svc.seats import SeatState
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from tests.unit.decode_world import CANCEL
from tests.unit.moving_world import MOVED, Move, MovingWorld, Pair

SHUTTING_DOWN = Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)


class MovingMachine(RuleBasedStateMachine):
    """The routers of several requests, each doing anything at any time; the wire carries a little at each turn."""

    moves = st.integers(0, 5)

    @initialize(seed=st.integers(0, 99), step_bytes=st.sampled_from([8, 32, 1 << 20]), window=st.sampled_from([None, 1, 5, 8]))
    def begin(self, seed: int, step_bytes: int, window: int | None) -> None:
        self.pair = Pair(seed, step_bytes, pages=17, landing_rows=2, sequences=6, window=window)
        self.moves_begun: list[Move] = []
        self.targets: list[tuple[Move, int]] = []
        for prompt in (3, 9):
            self.moves_begun.append(self.pair.begin(prompt, most=9, steps=2))

    def one(self, number: int) -> Move | None:
        return self.moves_begun[number % len(self.moves_begun)] if self.moves_begun else None

    @rule(prompt=st.integers(1, 14), steps=st.integers(0, 4), clock=st.sampled_from([None, None, 4.0]))
    def open(self, prompt: int, steps: int, clock: float | None) -> None:
        if len(self.moves_begun) < 6:
            self.moves_begun.append(self.pair.begin(prompt, most=9, steps=steps, limits=Limits(inter_token_s=clock)))

    @rule(number=moves, during=st.booleans())
    def pause(self, number: int, during: bool) -> None:
        move = self.one(number)
        if move is None:
            return
        if during:
            self.pair.source.step(PauseSeat(move.begins), seconds=0.01)
        else:
            self.pair.source.tell(PauseSeat(move.begins))
            self.pair.source.step(seconds=0.01)

    @rule(number=moves)
    def open_target(self, number: int) -> None:
        move = self.one(number)
        if move is None or not self.standing(move) or not self.ended(self.pair.target, move.goes_on):
            return
        self.targets.append((move, self.pair.open_target(move)))

    @rule(number=moves)
    def go_on(self, number: int) -> None:
        """What a router does next when all is well."""
        move = self.one(number)
        assert move is not None
        source = self.pair.source.scheduler.seats.get(move.begins)
        if source is None or source.state is SeatState.PUSHING:
            self.pair.carry(4)
            self.pair.target.step(seconds=0.01)
        elif source.state is not SeatState.PAUSED:
            self.pause(number, during=True)
            self.pair.source.step(seconds=0.01)
        elif self.ended(self.pair.target, move.goes_on):
            self.open_target(number)
        elif self.granted(move.goes_on) and not self.pair.target.ready(move.goes_on):
            self.pair.source.push_seat(move.begins, self.pair.target.grant_of(move.goes_on))
            self.pair.source.take_orders()
            self.pair.source.post()
        else:
            self.pair.leave(move)

    @rule(number=moves)
    def push(self, number: int) -> None:
        """Any grant that was told, however old, and whatever the source does meanwhile."""
        told = [(move, seat) for move, seat in self.targets if self.granted(seat)]
        if told:
            move, seat = told[number % len(told)]
            self.pair.source.push_seat(move.begins, self.pair.target.grant_of(seat))

    @rule(there=st.booleans(), seconds=st.sampled_from([0.01, 0.5, 3.0]))
    def step(self, there: bool, seconds: float) -> None:
        self.world(there).step(seconds=seconds)

    @rule()
    def post(self) -> None:
        self.pair.serve(self.pair.source)
        self.pair.source.post()

    @rule(there=st.booleans())
    def poll(self, there: bool) -> None:
        self.world(there).poll()

    @rule(there=st.booleans())
    def serve(self, there: bool) -> None:
        self.pair.serve(self.world(there))

    @rule(rounds=st.integers(1, 8))
    def carry(self, rounds: int) -> None:
        self.pair.carry(rounds)

    @precondition(lambda self: self.targets)
    @rule(rarely=st.integers(0, 5))
    def fail_a_write(self, rarely: int) -> None:
        _, seat = self.targets[-1]
        if rarely == 5 and self.granted(seat):
            agent = self.pair.target.grant_of(seat).endpoint.agent
            if self.pair.fabric.slabs_of(agent) is not None:
                self.pair.fabric.fail_next(agent)

    @rule(number=moves, there=st.booleans(), ending=st.sampled_from([CANCEL, MOVED]))
    def end(self, number: int, there: bool, ending: Ending) -> None:
        move = self.one(number)
        if move is not None and (not there or ending is CANCEL):
            asked_at = self.world(there).now if ending is CANCEL else None
            self.world(there).tell(EndSeat(move.goes_on if there else move.begins, ending, asked_at))

    @rule(ending=st.sampled_from([CANCEL, MOVED, SHUTTING_DOWN]), seconds=st.sampled_from([0.01, 2.1]))
    def end_what_is_pushed(self, ending: Ending, seconds: float) -> None:
        source = self.pair.source
        for seat in [seat for seat in source.scheduler.seats if seat.state is SeatState.PUSHING]:
            source.tell(EndSeat(seat.number, ending, source.now))
            source.step(seconds=seconds)
            source.now += seconds

    @rule(number=moves)
    def lose_writer(self, number: int) -> None:
        """The router heard that the push failed: nothing is in flight."""
        for move, seat in self.targets:
            source = self.pair.source.scheduler.seats.get(move.begins)
            failed = source is None or source.state is SeatState.PAUSED
            pushed = [event for event in self.pair.source.events if isinstance(event, SeatPushed) and event.seat == move.begins]
            if failed and pushed and pushed[-1].cause in ("transfer_failed", "lease_expired"):
                self.pair.target.tell(LosePrefill(seat, Cause.PREFILL_FAILED, drained=False))

    @rule(seconds=st.sampled_from([0.1, 2.5, 12.0]), there=st.booleans())
    def sleep(self, seconds: float, there: bool) -> None:
        self.world(there).now += seconds

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    @invariant()
    def nobody_runs_after_it_was_said_to_stand_still(self) -> None:
        if not hasattr(self, "pair"):
            return
        for move in self.moves_begun:
            mine = [event for event in self.pair.source.events if event.seat == move.begins]
            first = next((index for index, event in enumerate(mine) if isinstance(event, SeatPaused)), len(mine))
            assert not any(getattr(event, "selected", ()) for event in mine[first:])

    @invariant()
    def what_is_told_as_released_is_released(self) -> None:
        if not hasattr(self, "pair"):
            return
        for event in self.pair.source.events:
            if isinstance(event, SeatEnded) and event.report.cancel_effective_at is not None:
                assert not self.pair.source.scheduler.pushes.busy(event.seat)

    @invariant()
    def what_is_said_is_what_would_have_been_said(self) -> None:
        if not hasattr(self, "pair"):
            return
        for move in self.moves_begun:
            said = self.pair.source.selected(move.begins)
            assert said == self.pair.source.runner.said(move.prompt, len(said))
        for move, seat in self.targets:
            said = [*move.told, *self.pair.target.selected(seat)] if seat == move.goes_on else []
            assert said == self.pair.target.runner.said(move.prompt, len(said))

    def teardown(self) -> None:
        """Whatever happened: end everything, let the wire run, and nothing is left."""
        if not hasattr(self, "pair"):
            return
        for world in self.pair.worlds:
            world.tell(EndAll(SHUTTING_DOWN))
        for _ in range(6):
            for world in self.pair.worlds:
                world.step()
            self.pair.carry(80)
            self.pair.pass_time(3.0)
        for move in self.moves_begun:
            assert self.ended(self.pair.source, move.begins)
        for _, seat in self.targets:
            assert self.ended(self.pair.target, seat)
        self.pair.assert_empty()

    # reading

    def world(self, there: bool) -> MovingWorld:
        return self.pair.target if there else self.pair.source

    def standing(self, move: Move) -> bool:
        seat = self.pair.source.scheduler.seats.get(move.begins)
        return seat is not None and seat.state is SeatState.PAUSED and seat.pushable

    def granted(self, seat: int) -> bool:
        return self.pair.target.granted(seat)

    def ended(self, world: MovingWorld, seat: int) -> bool:
        if seat == 0:
            return True
        ends = [event for event in world.events if event.seat == seat and isinstance(event, SeatEnded | SeatRefused)]
        assert len(ends) <= 1
        return len(ends) == 1


TestMoving = pytest.mark.slow(MovingMachine.TestCase)
TestMoving.settings = settings(max_examples=60, stateful_step_count=50, suppress_health_check=list(HealthCheck))
