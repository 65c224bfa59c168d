"""A decode member's engine thread without its thread, over a real runner."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from decode_svc.drafts import DraftSource, Wish
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import Command, OpenSeat, OutputMade, PromptScored, SeatEnded
from decode_svc.scheduler import Scheduler, SchedulerLimits
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.landing import LandingRows
from engine.log_probs import TokenLogProb
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec, StopSpec
from engine.swap import SwapArea
from kv_transfer.offer import Peer
from lifecycle.deadlines import Limits
from lifecycle.finish import FinishReason
from lifecycle.record import AttemptKey
from member.inbox import Inbox
from text.detokeniser import Detokeniser, plain_table


class Member:
    """`say` it once."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        *,
        host_pages: int = 0,
        drafts: DraftSource | None = None,
        log_probs: int | None = None,
    ) -> None:
        totals = [slab.units for slab in runner.slabs]
        memory = DecodeMemory(runner.layout, totals, 2, host_pages, limits.step.tokens)
        me = Peer("decode-0", "decode-1", "127.0.0.1:2")
        handovers = Handovers(memory, me, runner.layout.fingerprint, HandoverLimits(), lambda: "0" * 32)
        table = plain_table([b"x"] * runner.vocabulary_size)
        make_sequence = partial(TokenSequence, streams=partial(Detokeniser, table))
        self.scheduler = Scheduler(limits, memory, handovers, make_sequence, drafts)
        self.inbox: Inbox[Command] = Inbox(64)
        self.tokens: dict[int, list[int]] = {}
        self.log_probs: dict[int, list[TokenLogProb]] = {}
        self.prompt_log_probs: dict[int, list[TokenLogProb]] = {}
        self._top = log_probs
        self.ends: list[SeatEnded] = []
        copies = SwapArea(runner.layout, runner.slab_data, host_pages).run if host_pages else lambda copies: None
        ports = WorkerPorts(
            self._publish, lambda writer: None, lambda writer: None, lambda armed: None, copies, lambda transfers: None
        )
        self.worker = DecodeWorker(runner, LandingRows(2, runner.vocabulary_size), self.scheduler, self.inbox, ports)
        self._context_tokens = runner.context_tokens

    def _publish(self, outbox: Outbox) -> None:
        for event in outbox.events:
            if isinstance(event, OutputMade):
                self.tokens.setdefault(event.seat, []).extend(event.selected)
                self.log_probs.setdefault(event.seat, []).extend(event.log_probs)
            elif isinstance(event, PromptScored):
                self.prompt_log_probs.setdefault(event.seat, []).extend(event.log_probs)
            elif isinstance(event, SeatEnded):
                self.ends.append(event)

    def say(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, output_tokens: int, *, scores_prompts: bool = False
    ) -> list[list[int]]:
        """The outputs of all prompts, computed beside one another."""
        for seat, ids in enumerate(prompts):
            spec = SequenceSpec(
                key=AttemptKey(f"request-{seat}", 1),
                index=0,
                prompt_token_ids=tuple(ids),
                sampling=sampling,
                stop=StopSpec(),
                max_output_tokens=output_tokens,
                context_tokens=self._context_tokens,
                log_probs=self._top,
                scores_prompt=scores_prompts,
            )
            self.inbox.put_nowait(OpenSeat(seat, spec, Limits(), 0, True, None, 0.0))
        for _ in range(2000):
            self.worker.turn()
            assert self.scheduler.check() == []
            if len(self.ends) == len(prompts):
                break
        assert [end.ending.reason for end in self.ends] == [FinishReason.MAX_OUTPUT_TOKENS] * len(prompts)
        books = self.scheduler.books()
        assert books["pages_free"] == books["pages_total"] and not books["host_pages_used"]
        return [self.tokens[seat] for seat in range(len(prompts))]


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
