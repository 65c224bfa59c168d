"""A decode member's engine thread alone, driven as fast as it goes: no streams, no router, no hand-over."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from decode_svc.draft_model import ModelDrafts
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import Command, OpenSeat, OutputMade, PromptReady, SeatEnded
from decode_svc.scheduler import Scheduler, SchedulerLimits
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.grammar_library import CompiledGrammar
from engine.landing import LandingRows
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec, StopSpec, TextStreams
from kv_transfer.offer import Peer
from lifecycle.deadlines import Limits
from lifecycle.record import AttemptKey
from member.inbox import Inbox
from rpc import clocks

ME = Peer("decode-0", "d", "here:1")


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was said to each prompt, and how. seconds, steps: from the step that ended the last prompt on, when all decode."""

    outputs: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int
    drafted_tokens: int
    accepted_tokens: int


class Decoding:
    """`run` as often as wanted; what is learned about the cost of steps stays."""

    def __init__(
        self, runner: Runner, limits: SchedulerLimits, streams: TextStreams, draft_model: ModelDrafts | None = None
    ) -> None:
        memory = DecodeMemory(runner.layout, [slab.units for slab in runner.slabs], 1, step_tokens=limits.step.tokens)
        handovers = Handovers(memory, ME, runner.layout.fingerprint, HandoverLimits(), lambda: "0" * 32)
        self._scheduler = Scheduler(limits, memory, handovers, partial(TokenSequence, streams=streams), None, draft_model)
        self._inbox: Inbox[Command] = Inbox(limits.sequences)
        ports = WorkerPorts(
            self._publish, lambda writer: None, lambda writer: None, lambda armed: None, lambda copies: None, lambda pushes: None
        )
        self._worker = DecodeWorker(runner, LandingRows(1, runner.vocabulary_size), self._scheduler, self._inbox, ports)
        self._context_tokens = runner.context_tokens
        self._seats = 0
        self._outputs: dict[int, list[int]] = {}
        self._waiting: set[int] = set()
        self._running: set[int] = set()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        output_tokens: int,
        grammar: CompiledGrammar | None = None,
    ) -> Decoded:
        """All prompts beside one another, each to the same number of tokens, or to the end of the grammar."""
        seats = range(self._seats + 1, self._seats + 1 + len(prompts))
        self._seats += len(prompts)
        self._outputs = {seat: [] for seat in seats}
        self._waiting, self._running = set(seats), set(seats)
        for seat, ids in zip(seats, prompts, strict=True):
            key = AttemptKey(f"bench-{seat}", 1)
            spec = SequenceSpec(key, 0, tuple(ids), sampling, StopSpec(), output_tokens, self._context_tokens, grammar=grammar)
            self._inbox.put_nowait(OpenSeat(seat, spec, Limits(), 0, False, None, clocks.monotonic()))
        while self._waiting:
            self._worker.turn()
        counts, steps, began_at = self._scheduler.speculation.counts, self._scheduler.steps, clocks.monotonic()
        before = (counts.drafted_tokens, counts.accepted_tokens)
        while self._running:
            self._worker.turn()
        return Decoded(
            tuple(tuple(tokens) for tokens in self._outputs.values()),
            clocks.monotonic() - began_at,
            self._scheduler.steps - steps,
            counts.drafted_tokens - before[0],
            counts.accepted_tokens - before[1],
        )

    def _publish(self, outbox: Outbox) -> None:
        for event in outbox.events:
            if isinstance(event, OutputMade):
                self._outputs[event.seat] += event.selected
            elif isinstance(event, PromptReady):
                self._waiting.discard(event.seat)
            elif isinstance(event, SeatEnded):
                self._running.discard(event.seat)
