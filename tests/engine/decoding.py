"""A decode member's engine thread without its thread, over a real runner."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from decode_svc.draft_model import ModelDrafts
from decode_svc.drafts import DraftSource, Wish
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import (
    Command,
    EndpointMade,
    NoticesArrived,
    OpenSeat,
    OutputMade,
    PromptReady,
    PromptScored,
    SeatEnded,
    SeatGranted,
    SeatPaused,
    SeatPushed,
    SeatRefused,
    Sibling,
)
from decode_svc.scheduler import Scheduler, SchedulerLimits
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.grammar_library import CompiledGrammar
from engine.landing import LandingRows
from engine.log_probs import TokenLogProb
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.sequence import Earlier, SequenceSpec, StopSpec
from engine.sequence import Sequence as TokenSequence
from engine.swap import SwapArea
from kv_transfer.memory import MemoryFabric, MemoryReceiver
from kv_transfer.offer import Grant, Peer
from lifecycle.deadlines import Limits
from lifecycle.finish import FinishReason
from lifecycle.record import AttemptKey
from member.inbox import Inbox
from member.kv_layout import registered
from rpc import clocks
from tests.engine.handing_over import WritingEnd
from text.detokeniser import Detokeniser, plain_table

LANDING_ROWS = 4
MOST_TURNS = 2000


@dataclass(frozen=True)
class Ask:
    """What a member is asked for. `earlier`: tokens that an attempt before this one chose; `prefill`: who writes its pages,
    `moved`: as OpenSeat says. `indexes`: of the outputs of the prompt that are wanted, beside one another."""

    prompt: Sequence[int]
    sampling: SamplingParams
    output_tokens: int
    grammar: CompiledGrammar | None = None
    earlier: Sequence[int] = ()
    salt: bytes = b""
    limits: Limits = field(default_factory=Limits)
    prefill: Peer | None = None
    moved: bool = False
    scores_prompt: bool = False
    name: str = ""
    priority: int = 0
    indexes: Sequence[int] = (0,)
    adapter: str = ""


class Member:
    """Whoever holds it takes its turns. Seats are numbered from 0, in the order of asking.

    total_pages: of each KV group; None: all that the runner has. fabric: what hand-overs travel on.
    """

    def __init__(
        self,
        runner: Runner,
        limits: SchedulerLimits,
        *,
        host_pages: int = 0,
        drafts: DraftSource | None = None,
        draft_model: ModelDrafts | None = None,
        log_probs: int | None = None,
        total_pages: int | None = None,
        prefix_cache: bool = False,
        fabric: MemoryFabric | None = None,
        name: str = "decode-0",
    ) -> None:
        self.peer = Peer(name, f"{name}-1", "127.0.0.1:2")
        totals = [total_pages or slab.units for slab in runner.slabs]
        memory = DecodeMemory(runner.layout, totals, LANDING_ROWS, host_pages, limits.step.tokens, prefix_cache=prefix_cache)
        grant_ids = (f"{number:032x}" for number in itertools.count(1))
        handovers = Handovers(memory, self.peer, runner.layout.fingerprint, HandoverLimits(), lambda: next(grant_ids))
        table = plain_table([b"x"] * runner.vocabulary_size)
        self._make_sequence = partial(TokenSequence, streams=partial(Detokeniser, table))
        self.scheduler = Scheduler(limits, memory, handovers, self._make_sequence, drafts, draft_model)
        self.inbox: Inbox[Command] = Inbox(64)
        self.tokens: dict[int, list[int]] = {}
        self.log_probs: dict[int, list[TokenLogProb]] = {}
        self.prompt_log_probs: dict[int, list[TokenLogProb]] = {}
        self.ends: dict[int, SeatEnded] = {}
        self.refusals: dict[int, SeatRefused] = {}
        self.cached: dict[int, int] = {}
        self.grants: dict[int, Grant] = {}
        self.paused: dict[int, SeatPaused] = {}
        self.pushed: dict[int, SeatPushed] = {}
        self._top = log_probs
        self._seats = 0
        self._context_tokens = runner.context_tokens
        landing = LandingRows(LANDING_ROWS, runner.vocabulary_size)
        slabs = [registered(slab) for slab in (*runner.slabs, landing.slab)]
        self._receiver = MemoryReceiver(fabric, name, slabs) if fabric is not None else None
        self.writing = WritingEnd(fabric, name, runner.layout, slabs, self.inbox.put_always) if fabric is not None else None
        copies = SwapArea(runner.layout, runner.slab_data, host_pages).run if host_pages else lambda copies: None
        push = self.writing.transfer if self.writing is not None else lambda transfers: None
        ports = WorkerPorts(self._publish, self._make_endpoint, lambda writer: None, lambda armed: None, copies, push)
        self.worker = DecodeWorker(runner, landing, self.scheduler, self.inbox, ports)

    def _make_endpoint(self, writer: str) -> None:
        assert self._receiver is not None, "a hand-over is asked for and there is nothing that it could travel on"
        self.inbox.put_always(EndpointMade(writer, self._receiver.endpoint(writer)))

    def _publish(self, outbox: Outbox) -> None:
        for event in outbox.events:
            match event:
                case OutputMade():
                    self.tokens[event.seat] += event.selected
                    self.log_probs[event.seat] += event.log_probs
                case PromptScored():
                    self.prompt_log_probs.setdefault(event.seat, []).extend(event.log_probs)
                case SeatGranted():
                    self.cached[event.seat] = event.cached_tokens
                    if event.grant is not None:
                        self.grants[event.seat] = event.grant
                case SeatRefused():
                    self.refusals[event.seat] = event
                case SeatPaused():
                    self.paused[event.seat] = event
                case SeatPushed():
                    self.pushed[event.seat] = event
                case SeatEnded():
                    assert event.seat not in self.ends, f"seat {event.seat} ended twice"
                    self.ends[event.seat] = event
                case PromptReady():
                    pass

    def ask(self, ask: Ask) -> int:
        """Put an Open into the inbox; returns the seat's number, that of the first output: the others have the next ones."""
        first = self._seats
        specs = [self._spec(ask, first, index) for index in ask.indexes]
        for seat in range(first, first + len(specs)):
            self.tokens[seat], self.log_probs[seat] = [], []
        self._seats += len(specs)
        self.inbox.put_nowait(
            OpenSeat(
                seat=first,
                sequence=specs[0],
                limits=ask.limits,
                priority=ask.priority,
                sends_output=True,
                prefill=ask.prefill,
                received_at=clocks.monotonic(),
                begun=self._make_sequence(specs[0]) if ask.earlier else None,
                moved=ask.moved,
                salt=ask.salt,
                siblings=tuple(Sibling(first + place, spec) for place, spec in enumerate(specs) if place) or None,
            )
        )
        return first

    def _spec(self, ask: Ask, first: int, index: int) -> SequenceSpec:
        count = len(ask.earlier)
        return SequenceSpec(
            key=AttemptKey(ask.name or f"request-{first}", 2 if count else 1),
            index=index,
            prompt_token_ids=tuple(ask.prompt),
            sampling=ask.sampling,
            stop=StopSpec(),
            max_output_tokens=ask.output_tokens,
            context_tokens=self._context_tokens,
            earlier=Earlier(tuple(ask.earlier), count, count),  # each token shows one byte
            grammar=ask.grammar,
            log_probs=self._top,
            scores_prompt=ask.scores_prompt,
            adapter=ask.adapter,
        )

    def turn(self) -> bool:
        """One turn, with what has arrived by then; the books balance after it. True when a step ran."""
        if self._receiver is not None and (notices := self._receiver.poll()):
            self.inbox.put_always(NoticesArrived(tuple(notices)))
        if self.writing is not None:
            self.writing.poll()
        ran = self.worker.turn()
        assert self.scheduler.check() == []
        return ran

    def run(self, done: Callable[[], bool] | None = None) -> None:
        """Turns until `done`, or until every seat has ended or was refused."""
        over = done or (lambda: len(self.ends) + len(self.refusals) == self._seats)
        for _ in range(MOST_TURNS):
            if over():
                return
            self.turn()
        raise AssertionError(f"not done after {MOST_TURNS} turns")

    def assert_at_rest(self) -> None:
        """Nothing is held any more."""
        books = self.scheduler.books()
        held = {name: held for name, held in books.items() if held and name not in ("pages_total", "pages_free", "pages_cached")}
        assert held == {}
        assert books["pages_free"] + books["pages_cached"] == books["pages_total"]

    def say(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, output_tokens: int, *, scores_prompts: bool = False
    ) -> list[list[int]]:
        """The outputs of all prompts, computed beside one another."""
        seats = [self.ask(Ask(ids, sampling, output_tokens, scores_prompt=scores_prompts)) for ids in prompts]
        self.run()
        assert {self.ends[seat].ending.reason for seat in seats} == {FinishReason.MAX_OUTPUT_TOKENS}
        self.assert_at_rest()
        return [self.tokens[seat] for seat in seats]


class Known:
    """Implements DraftSource by outputs that are known, each seat's with a mistake at every place that `wrong` names."""

    def __init__(self, outputs: Sequence[Sequence[int]], vocabulary_size: int, wrong: Callable[[int], bool]) -> None:
        self._outputs = outputs
        self._vocabulary_size = vocabulary_size
        self._wrong = wrong

    def propose(self, wishes: Sequence[Wish]) -> Mapping[int, tuple[int, ...]]:
        """See DraftSource."""
        found = {}
        for wish in wishes:
            first = wish.sequence.selected_tokens
            tokens = self._outputs[wish.seat][first : first + wish.most]
            changed = (token + self._wrong(first + place) for place, token in enumerate(tokens))
            found[wish.seat] = tuple(token % self._vocabulary_size for token in changed)
        return found

    def forget(self, seat: int) -> None:
        """See DraftSource."""
