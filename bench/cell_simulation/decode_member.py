"""A simulated decode member: the real scheduler, memory and grants; steps, agents and fences cost a modelled time."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import cast

from bench.cell_simulation.events import Events
from bench.cell_simulation.known import Known, News, decode_load
from bench.cell_simulation.output import EOS, TOKEN, Output
from bench.cell_simulation.settings import CellSettings
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import AskEndpoint, AskFence, Command, EndpointMade, SeatEvent, WriterFenced
from decode_svc.planning import Plan, StepLimits
from decode_svc.scheduler import Scheduler, SchedulerLimits
from engine.layout import GroupKind, GroupLayout, Layout
from engine.sequence import Sequence as TokenSequence
from engine.sequence import SequenceSpec
from kv_transfer.offer import Peer, Slab, endpoint_of
from router.member_facts import MemberInfo, MemberLoad, Role

#: Bytes of a page and of a row of logits as grants name them: small, so that a hand-over has few parts.
PAGE_BYTES, ROW_BYTES = 65_536, 64
LANDING_ROWS = 64
#: Weight of the newest step in the running figure of a step's time, as in decode_svc.worker.
RATE_WEIGHT = 0.2


class DecodeMember:
    """`tell` gets what its streams would be told. `lengths`: output tokens by request."""

    def __init__(
        self, number: int, settings: CellSettings, events: Events, lengths: dict[str, int], tell: Callable[[SeatEvent], None]
    ) -> None:
        self.peer = Peer(f"decode-{number}", f"decode-{number}", "decode:1")
        self._settings = settings
        self._events = events
        self._lengths = lengths
        self._tell = tell
        layout = Layout("simulated", (GroupLayout(GroupKind.FULL, 1, 1, 1, settings.page_tokens, "bfloat16"),))
        pages = settings.service.kv_tokens // settings.page_tokens + 1
        self._slabs = (Slab(1 << 40, pages * PAGE_BYTES, PAGE_BYTES), Slab(1 << 50, LANDING_ROWS * ROW_BYTES, ROW_BYTES))
        memory = DecodeMemory(layout, pages, LANDING_ROWS)
        grant_ids = (f"{number:08x}{grant:024x}" for grant in itertools.count())
        handovers = Handovers(memory, self.peer, layout.fingerprint, HandoverLimits(), partial(next, grant_ids))
        tokens = settings.decode_step_sequences + settings.mixed_prompt_tokens
        limits = SchedulerLimits(
            sequences=settings.decode_sequences,
            step=StepLimits(tokens, settings.decode_step_sequences),
            pressure=settings.pressure,
        )
        self.scheduler = Scheduler(limits, memory, handovers, _sequence)
        self.info = _info(self.peer, settings, pages - 1)
        self.known = Known(self.info, decode_load(self.scheduler, 0.0, 0.0))
        self.news = News(self.known, events, settings.news_s, self._load)
        self.network_free_at = 0.0
        self.busy_s = 0.0
        self._inbox: list[Command] = []
        self._step_s = 0.0
        self._prompt_tokens_per_s = 0.0
        self._running = False

    def send(self, command: Command) -> None:
        """A command arrives."""
        self._inbox.append(command)
        if not self._running:
            self._running = True
            self._events.after(0.0, self._turn)

    def _load(self) -> MemberLoad:
        return decode_load(self.scheduler, self._step_s, self._prompt_tokens_per_s)

    def _turn(self) -> None:
        now = self._events.now
        commands, self._inbox = self._inbox, []
        self.scheduler.accept(commands, now)
        plan = self.scheduler.next_batch(now)
        self.scheduler.preemption.take_copies()
        self._publish()
        if plan is None:
            self._running = False
            return
        seconds = self._settings.service.step_s(plan.batch.rows) if plan.batch else self._settings.service.overhead_s
        self._events.after(seconds, self._ran, plan, seconds)

    def _ran(self, plan: Plan, seconds: float) -> None:
        now = self._events.now
        commands, self._inbox = self._inbox, []
        self.scheduler.accept(commands, now)
        lengths = self._lengths
        tokens = [
            EOS if seat.sequence.selected_tokens + 1 >= lengths[seat.open.sequence.key.request_id] else TOKEN
            for seat in plan.draws
        ]
        self.scheduler.commit(plan, tokens, now)
        self.busy_s += seconds
        self._step_s += (RATE_WEIGHT if self._step_s else 1.0) * (seconds - self._step_s)
        if plan.prompt_tokens:
            rate = plan.prompt_tokens / seconds
            self._prompt_tokens_per_s += (RATE_WEIGHT if self._prompt_tokens_per_s else 1.0) * (rate - self._prompt_tokens_per_s)
        self._publish()
        self._turn()

    def _publish(self) -> None:
        for event in self.scheduler.take_events():
            self._tell(event)
        for errand in self.scheduler.take_errands():
            if isinstance(errand, AskEndpoint):
                endpoint = endpoint_of(errand.writer, b"-", self._slabs)
                self._events.after(self._settings.endpoint_s, self.send, EndpointMade(errand.writer, endpoint))
            elif isinstance(errand, AskFence):
                self._events.after(self._settings.fence_s, self.send, WriterFenced(errand.writer, True))
        self.news.changed()


def _sequence(spec: SequenceSpec) -> TokenSequence:
    return cast(TokenSequence, Output(spec))


def _info(peer: Peer, settings: CellSettings, pages: int) -> MemberInfo:
    return MemberInfo(
        name=peer.member,
        incarnation=peer.incarnation,
        address=peer.address,
        role=Role.DECODE,
        model_snapshot="simulated",
        page_tokens=settings.page_tokens,
        total_pages=pages,
        context_tokens=settings.service.model.context_tokens,
        max_sequences=settings.decode_sequences,
        max_queued_tokens=0,
        computes_prompts=True,
    )
