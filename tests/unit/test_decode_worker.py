"""One turn of a decode member's engine thread: what it tells, and when."""

import itertools
from functools import partial

import pytest
import torch

from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.load import Load
from decode_svc.memory import DecodeMemory
from decode_svc.messages import Command, EndSeat, OpenSeat
from decode_svc.scheduler import Scheduler, SchedulerLimits
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.batch import Batch, LayerMarks
from engine.landing import LandingRows
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence, SequenceSpec, StopSpec
from kv_transfer.offer import Peer
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from member.inbox import Inbox
from rpc import clocks
from tests.scripted import ScriptedRunner, ScriptedTokenizer
from text.stop_matcher import StopRules


class Runner(ScriptedRunner):
    """Writes down when it ran, and lets a message arrive meanwhile."""

    def __init__(self, story: list[object]) -> None:
        super().__init__(ScriptedTokenizer().vocabulary_size)
        self.story = story
        self.meanwhile: list[Command] = []
        self.inbox: Inbox[Command] = Inbox(8)

    def run(self, batch: Batch, marks: LayerMarks | None = None) -> torch.Tensor:
        logits = super().run(batch, marks)
        self.story.append("step")
        while self.meanwhile:
            self.inbox.put_always(self.meanwhile.pop(0))
        return logits


class Engine:
    """A worker whose turns a test takes. `story`: steps and the kinds of events told, one entry for each hop."""

    def __init__(self, limits: SchedulerLimits | None = None) -> None:
        self.story: list[object] = []
        self.loads: list[Load] = []
        self.runner = Runner(self.story)
        self.inbox = self.runner.inbox
        layout = self.runner.layout
        memory = DecodeMemory(layout, 41, 4)
        me = Peer("decode-0", "decode-1", "127.0.0.1:2")
        handovers = Handovers(memory, me, layout.fingerprint, HandoverLimits(), lambda: "0" * 32)
        scheduler = Scheduler(
            limits or SchedulerLimits(), memory, handovers, partial(Sequence, streams=ScriptedTokenizer().detokeniser)
        )
        ports = WorkerPorts(
            self._publish,
            lambda writer: None,
            lambda writer: None,
            lambda armed: None,
            lambda copies: None,
            lambda transfers: None,
        )
        self.worker = DecodeWorker(self.runner, LandingRows(4, self.runner.vocabulary_size), scheduler, self.inbox, ports)
        self._seats = itertools.count(1)

    def _publish(self, outbox: Outbox) -> None:
        self.story.append([type(event).__name__ for event in outbox.events])
        if outbox.snapshot is not None:
            self.loads.append(outbox.snapshot.load)

    def open(self, max_output_tokens: int = 8, limits: Limits | None = None) -> OpenSeat:
        seat = next(self._seats)
        spec = SequenceSpec(
            key=AttemptKey(f"request-{seat}", 1),
            index=0,
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(temperature=0.0),
            stop=StopSpec(StopRules(()), eos_ids=frozenset()),
            max_output_tokens=max_output_tokens,
            context_tokens=64,
        )
        return OpenSeat(seat, spec, limits or Limits(), 0, True, None, clocks.monotonic())

    def turn(self) -> list[object]:
        """What one more turn did."""
        self.story.clear()
        self.worker.turn()
        return list(self.story)


def test_a_grant_is_told_before_the_step_that_it_takes_part_in() -> None:
    engine = Engine()
    engine.inbox.put_nowait(engine.open())
    assert engine.turn() == [["SeatGranted"], "step", ["PromptReady", "OutputMade"]]
    assert engine.turn() == ["step", ["OutputMade"]], "one hop for a step when nothing came"


@pytest.mark.parametrize("cause", [Cause.CLIENT_CANCEL, Cause.FIRST_TOKEN_DEADLINE])
def test_an_end_at_the_border_is_told_before_the_step_of_the_others(cause: Cause) -> None:
    engine = Engine()
    engine.inbox.put_nowait(engine.open())
    engine.turn()
    short = engine.open(limits=Limits(first_token_s=0.0) if cause is Cause.FIRST_TOKEN_DEADLINE else Limits())
    engine.inbox.put_nowait(short)
    if cause is Cause.CLIENT_CANCEL:
        engine.inbox.put_nowait(EndSeat(short.seat, Ending(FinishReason.CANCELLED, cause), clocks.monotonic()))
    assert engine.turn() == [["SeatGranted", "SeatEnded"], "step", ["OutputMade"]]


class Standing:
    """Implements rpc.clocks.Clocks: moved by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    wall = monotonic


def test_what_a_clock_ends_while_nothing_else_happens_shows_in_the_load() -> None:
    """Its reader does not read, so no step follows: routers would take its pages for held for as long as nobody else comes."""
    engine, clock = Engine(SchedulerLimits(stream_bytes=1)), Standing()
    with clocks.replaced_by(clock):
        engine.inbox.put_nowait(engine.open(limits=Limits(overall_s=5.0)))
        for _ in range(3):
            engine.turn()
        assert "step" not in engine.turn() and engine.loads[-1].running == 1
        free = engine.loads[-1].free_pages
        clock.now += 6.0
        assert engine.turn() == [["SeatEnded"]]
    assert engine.loads[-1].running == 0 and engine.loads[-1].free_pages > free


def test_a_cancel_that_comes_during_a_step_throws_its_token_away_and_is_told_with_the_step() -> None:
    engine = Engine()
    first, second = engine.open(), engine.open()
    engine.inbox.put_nowait(first)
    engine.inbox.put_nowait(second)
    engine.turn()
    engine.runner.meanwhile.append(EndSeat(first.seat, Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL), clocks.monotonic()))
    assert engine.turn() == ["step", ["SeatEnded", "OutputMade"]]
