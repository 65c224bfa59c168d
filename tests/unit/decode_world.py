"""A decode scheduler in virtual time with everything around it played by the test: model, writers, transfer thread."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from decode_svc.draft_model import ModelDrafts
from decode_svc.drafts import DraftSource
from decode_svc.flow import SlowReader
from decode_svc.handover import HandoverLimits, Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.messages import (
    AskDrain,
    AskEndpoint,
    AskFence,
    Command,
    EndpointMade,
    EndSeat,
    Errand,
    NoticesArrived,
    OpenSeat,
    OutputMade,
    PromptReady,
    SeatEnded,
    SeatEvent,
    SeatGranted,
    SeatRefused,
    Sibling,
)
from decode_svc.planning import Plan, StepLimits
from decode_svc.preemption import PressureLimits
from decode_svc.scheduler import Scheduler, SchedulerLimits
from decode_svc.seats import Seat
from decode_svc.speculation import SpeculationLimits
from engine.layout import GroupKind, GroupLayout, Layout
from engine.page_copy import PageClone, PageCopy
from engine.sampling_params import SamplingParams
from engine.sequence import Earlier, SequenceSpec, StopSpec
from engine.sequence import Sequence as TokenSequence
from kv_transfer.offer import Grant, Peer, Slab, endpoint_of
from kv_transfer.plan import Notice, part_count, sent_page_counts
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from text.detokeniser import Detokeniser, plain_table
from text.stop_matcher import StopRules

PAGE_TOKENS = 4
CONTEXT_TOKENS = 64
EOS = 256
TABLE = plain_table([bytes([value]) for value in range(256)] + [b""])
WRITER = Peer("prefill-0", "writer-1", "127.0.0.1:1")
ME = Peer("decode-0", "decode-1", "127.0.0.1:2")
CANCEL = Ending(FinishReason.CANCELLED, Cause.CLIENT_CANCEL)


def fresh_ids() -> Callable[[], str]:
    """Grant ids in order: 32 hex digits."""
    numbers = itertools.count(1)
    return lambda: f"{next(numbers):032x}"


class World:
    """`model` gives the next token of a seat; the default says "a", "b", "c" and so on by position.

    window: of a second KV group, in tokens; None: there is none.
    """

    def __init__(
        self,
        *,
        total_pages: int = 41,
        landing_rows: int = 4,
        sequences: int = 16,
        step: StepLimits | None = None,
        stream_bytes: int = 1000,
        handover: HandoverLimits | None = None,
        model: Callable[[Seat], int | None] | None = None,
        pressure: PressureLimits | None = None,
        host_pages: int = 0,
        me: Peer = ME,
        new_grant_id: Callable[[], str] | None = None,
        window: int | None = None,
        drafts: DraftSource | None = None,
        draft_model: ModelDrafts | None = None,
        speculation: SpeculationLimits | None = None,
        prefix_cache: bool = False,
        keep_generated: bool = True,
    ) -> None:
        groups = [GroupLayout(GroupKind.FULL, 1, 1, 1, PAGE_TOKENS, "float32")]
        if window is not None:
            groups.append(GroupLayout(GroupKind.SLIDING, 1, 1, 1, PAGE_TOKENS, "float32", window))
        layout = Layout("snapshot", tuple(groups))
        steps = step or StepLimits(tokens=24, sequences=8)
        self.fingerprint = layout.fingerprint
        self.memory = DecodeMemory(layout, total_pages, landing_rows, host_pages, steps.tokens, prefix_cache=prefix_cache)
        self.slabs = (
            *(Slab((1 + number) << 20, total_pages * 32, 32) for number in range(len(groups))),
            Slab(1 << 24, landing_rows * 1028, 1028),
        )
        self.me = me
        limits_of_grants = handover or HandoverLimits()
        self.handovers = Handovers(self.memory, me, layout.fingerprint, limits_of_grants, new_grant_id or fresh_ids())
        limits = SchedulerLimits(
            sequences,
            stream_bytes,
            release_wait_s=2.0,
            step=steps,
            pressure=pressure or PressureLimits(),
            coalesce_bytes=8 * stream_bytes,
            speculation=speculation or SpeculationLimits(),
            keep_generated=keep_generated,
        )
        self.make_sequence = partial(TokenSequence, streams=partial(Detokeniser, TABLE))
        self.scheduler = Scheduler(limits, self.memory, self.handovers, self.make_sequence, drafts, draft_model)
        self.now = 100.0
        self.model = model or (lambda seat: 97 + seat.sequence.selected_tokens % 26)
        self.events: list[SeatEvent] = []
        self.errands: list[Errand] = []
        self.plans: list[Plan] = []
        self._seats = itertools.count(1)

    # commands

    def open(
        self,
        prompt: int | Sequence[int] = 5,
        max_output_tokens: int = 8,
        *,
        prefill: Peer | None = None,
        limits: Limits | None = None,
        priority: int = 0,
        stops: tuple[bytes, ...] = (),
        min_output_tokens: int = 0,
        sends_output: bool = True,
        key: AttemptKey | None = None,
        earlier: Earlier | None = None,
        last_token_at: float | None = None,
        moved: bool = False,
        slow_reader: SlowReader = SlowReader.PAUSE,
        salt: bytes = b"",
        most_computed_tokens: int | None = None,
    ) -> int:
        """Send an Open; returns its seat number."""
        seat = next(self._seats)
        ids = tuple(prompt) if not isinstance(prompt, int) else tuple(range(1, prompt + 1))
        spec = SequenceSpec(
            key=key or AttemptKey(f"request-{seat}", 1),
            index=0,
            prompt_token_ids=ids,
            sampling=SamplingParams(temperature=0.0),
            stop=StopSpec(StopRules(stops), eos_ids=frozenset({EOS}), min_output_tokens=min_output_tokens),
            max_output_tokens=max_output_tokens,
            context_tokens=CONTEXT_TOKENS,
            earlier=earlier or Earlier(),
        )
        begun = self.make_sequence(spec) if earlier is not None else None
        said = limits or Limits()
        command = OpenSeat(seat, spec, said, priority, sends_output, prefill, self.now, begun, last_token_at, moved, slow_reader)
        self.tell(replace(command, salt=salt, most_computed_tokens=most_computed_tokens))
        return seat

    def open_choices(
        self,
        prompt: Sequence[int],
        max_output_tokens: int,
        earlier: Sequence[tuple[int, ...]],
        *,
        prefill: Peer | None = None,
        limits: Limits | None = None,
        priority: int = 0,
    ) -> list[int]:
        """Send an Open of several outputs, one for each of `earlier`, their tokens so far, the shortest first; their seats."""
        seats = [next(self._seats) for _ in earlier]
        specs = [
            SequenceSpec(
                key=AttemptKey(f"request-{seats[0]}", 1),
                index=index,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                stop=StopSpec(StopRules(()), eos_ids=frozenset({EOS})),
                max_output_tokens=max_output_tokens,
                context_tokens=CONTEXT_TOKENS,
                earlier=Earlier(tokens, len(tokens), len(tokens)),
            )
            for index, tokens in enumerate(earlier)
        ]
        siblings = tuple(Sibling(seat, spec) for seat, spec in zip(seats[1:], specs[1:], strict=True))
        command = OpenSeat(seats[0], specs[0], limits or Limits(), priority, True, prefill, self.now, siblings=siblings)
        self.tell(command)
        return seats

    def tell(self, *commands: Command) -> None:
        """Commands, as the inbox would give them."""
        self.scheduler.accept(commands, self.now)
        self.collect()

    def cancel(self, seat: int) -> None:
        """A client's cancel."""
        self.tell(EndSeat(seat, CANCEL, self.now))

    # the transfer thread and the writer

    def make_endpoint(self, writer: str = WRITER.incarnation) -> None:
        """Answer an AskEndpoint."""
        self.tell(EndpointMade(writer, endpoint_of(f"agent-of-{writer}", b"metadata", self.slabs)))

    def grant_of(self, seat: int) -> Grant:
        """The grant that a seat was told of."""
        grant = next(event.grant for event in self.events if isinstance(event, SeatGranted) and event.seat == seat)
        assert grant is not None
        return grant

    def notice(self, grant: Grant, part: int = 0, **changes: object) -> bytes:
        """A notice as the writer would send it."""
        fields: dict[str, object] = {
            "grant_id": grant.grant_id,
            "part": part,
            "parts": part_count(grant),
            "token_count": grant.token_count,
            "page_counts": sent_page_counts(grant),
            "layout_fingerprint": grant.layout_fingerprint,
        }
        return Notice(**{**fields, **changes}).to_bytes()  # type: ignore[arg-type]

    def fill(self, seat: int, writer: str = WRITER.incarnation) -> None:
        """The whole hand-over arrives."""
        grant = self.grant_of(seat)
        notices = tuple((writer, self.notice(grant, part)) for part in range(part_count(grant)))
        self.tell(NoticesArrived(notices))

    def granted_seat(self, prompt: int | Sequence[int] = 5, max_output_tokens: int = 8, **options: object) -> int:
        """A seat whose grant was offered."""
        seat = self.open(prompt, max_output_tokens, prefill=WRITER, **options)  # type: ignore[arg-type]
        if AskEndpoint(WRITER.incarnation) in self.errands:
            self.errands.remove(AskEndpoint(WRITER.incarnation))
            self.make_endpoint()
        return seat

    # steps

    def step(self, *during: Command, seconds: float = 1.0) -> Plan | None:
        """One turn; `during` arrive while the model runs. The books balance before and after."""
        self.check()
        plan = self.scheduler.next_batch(self.now)
        self.collect()
        self.clone(self.scheduler.families.take_clones())
        self.copy(self.scheduler.preemption.take_copies())
        if plan is None:
            return None
        self.scheduler.draft(plan)
        self.plans.append(plan)
        tokens = self.compute(plan)
        self.now += seconds
        self.scheduler.accept(during, self.now)
        self.scheduler.commit(plan, tokens, self.now)
        self.collect()
        self.check()
        return plan

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Run copies to and from host pages; this world has no bytes."""

    def clone(self, clones: Sequence[PageClone]) -> None:
        """Clone pages, before any other copy."""

    def compute(self, plan: Plan) -> list[int | None]:
        """The model's step: a token for each draw."""
        return [self.model(seat) for seat in plan.draws]

    def run(self, turns: int = 200) -> None:
        """Turns until nothing can run."""
        for _ in range(turns):
            if self.step() is None:
                return
        raise AssertionError(f"still running after {turns} turns")

    def collect(self) -> None:
        """Take what came out."""
        self.events += self.scheduler.take_events()
        self.errands += self.scheduler.take_errands()

    # reading

    def text(self, seat: int) -> bytes:
        """All text of a seat."""
        return b"".join(event.text for event in self.events if isinstance(event, OutputMade) and event.seat == seat)

    def selected(self, seat: int) -> list[int]:
        """All tokens chosen for a seat."""
        return [t for event in self.events if isinstance(event, OutputMade) and event.seat == seat for t in event.selected]

    def ended(self, seat: int) -> SeatEnded | None:
        """The end of a seat, when it has come: exactly one, and nothing of the seat after it."""
        mine = [event for event in self.events if event.seat == seat]
        ends = [event for event in mine if isinstance(event, SeatEnded)]
        assert len(ends) <= 1
        assert not ends or mine[-1] is ends[0]
        return ends[0] if ends else None

    def ending(self, seat: int) -> Ending:
        """How a seat ended."""
        end = self.ended(seat)
        assert end is not None
        return end.ending

    def refusal(self, seat: int) -> SeatRefused:
        """Why a seat was refused."""
        return next(event for event in self.events if isinstance(event, SeatRefused) and event.seat == seat)

    def ready(self, seat: int) -> bool:
        """Whether the first token of a seat was chosen."""
        return any(isinstance(event, PromptReady) and event.seat == seat for event in self.events)

    def drains(self) -> list[AskDrain]:
        """Drains asked for and not taken yet; takes them."""
        taken = [errand for errand in self.errands if isinstance(errand, AskDrain)]
        self.errands = [errand for errand in self.errands if not isinstance(errand, AskDrain)]
        return taken

    def fences(self) -> list[AskFence]:
        """Fences asked for; takes them."""
        taken = [errand for errand in self.errands if isinstance(errand, AskFence)]
        self.errands = [errand for errand in self.errands if not isinstance(errand, AskFence)]
        return taken

    def check(self) -> None:
        """The books balance."""
        assert self.scheduler.check() == []

    def assert_empty(self) -> None:
        """Nothing is held."""
        self.check()
        books = self.scheduler.books()
        held = {k: v for k, v in books.items() if k not in ("pages_total", "pages_free", "pages_cached") and v}
        assert held == {}
        assert books["pages_free"] + books["pages_cached"] == books["pages_total"]
