"""Two decode schedulers in virtual time over real pages, joined by the in-memory transport; the test is the router."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_svc.messages import (
    AskDrain,
    AskEndpoint,
    AskFence,
    DrainAnswer,
    DrainAnswered,
    DrainPush,
    EndpointMade,
    EndSeat,
    NoticesArrived,
    OutputMade,
    PauseSeat,
    PromptReady,
    PushDrained,
    PushSeat,
    SeatEvent,
    SeatPaused,
    SeatPushed,
    WriterFenced,
)
from engine.landing import LandingRows
from engine.sequence import Earlier
from kv_transfer.grant_writer import PushesEnded, Transfers
from kv_transfer.memory import MemoryFabric, MemoryReceiver, MemorySender
from kv_transfer.offer import Grant, LayoutView, Peer, Slab
from kv_transfer.plan import SourceMemory, plan
from kv_transfer.ports import CAUSE_WITHDRAWN, Push, PushResult, SendFailed
from lifecycle.deadlines import Limits
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.record import AttemptKey
from tests.unit.decode_world import PAGE_TOKENS, fresh_ids
from tests.unit.pressure_world import PressureWorld

MOVED = Ending(FinishReason.CANCELLED, Cause.MOVED)


class MovingWorld(PressureWorld):
    """One decode member with both ends of the transport, as its transfer threads would own them."""

    def __init__(self, fabric: MemoryFabric, name: str, grant_ids: object, *, pages: int = 41, **options: object) -> None:
        super().__init__(
            total_pages=pages,
            me=Peer(name, f"{name}-incarnation", f"{name}:1"),
            new_grant_id=grant_ids,
            **options,  # type: ignore[arg-type]
        )
        self.landing = LandingRows(self.memory.landing_rows, self.runner.vocabulary_size)
        self.slabs = tuple(
            Slab(slab.address, slab.size_bytes, slab.unit_bytes) for slab in (*self.runner.slabs, self.landing.slab)
        )
        groups = self.runner.layout.groups
        self.layout = LayoutView(self.fingerprint, (PAGE_TOKENS,) * len(groups), tuple(group.window for group in groups))
        self.receiver = MemoryReceiver(fabric, name, self.slabs)
        self.sender = MemorySender(fabric, name, self.slabs)
        self.queued: list[Push] = []  # given out and not posted

    def push_seat(self, seat: int, grant: Grant) -> None:
        """A router's PushSeat, as the edge reads it."""
        source = SourceMemory(self.layout, self.slabs[:-1], self.slabs[-1])
        self.tell(PushSeat(seat, plan(grant, source)))

    def take_orders(self) -> None:
        """What the engine wants of the sending thread; posting is left to `post`."""
        transfers = [errand for errand in self.errands if isinstance(errand, Transfers)]
        self.errands = [errand for errand in self.errands if not isinstance(errand, Transfers)]
        for one in transfers:
            for endpoint in one.connects:
                self.sender.connect(endpoint)
            self.queued += one.pushes
            dropped = [push for push in self.queued if push.push_id in one.withdrawals]
            self.queued = [push for push in self.queued if push.push_id not in one.withdrawals]
            self.end_pushes([PushResult(push.push_id, False, CAUSE_WITHDRAWN) for push in dropped])

    def post(self) -> None:
        """The sending thread posts what is queued."""
        queued, self.queued = self.queued, []
        for push in queued:
            try:
                self.sender.post(push)
            except SendFailed as failure:
                self.end_pushes([PushResult(push.push_id, False, failure.cause)])

    def poll(self) -> None:
        """Both transfer threads look once."""
        self.end_pushes(self.sender.poll())
        notices = self.receiver.poll()
        if notices:
            self.tell(NoticesArrived(tuple(notices)))

    def end_pushes(self, results: Sequence[PushResult]) -> None:
        """Writes have ended."""
        if results:
            self.tell(PushesEnded(tuple(results), 0.001, self.now))

    def last(self, kind: type[SeatEvent], seat: int) -> SeatEvent:
        """The newest event of a kind."""
        return next(event for event in reversed(self.events) if isinstance(event, kind) and event.seat == seat)

    def has(self, kind: type[SeatEvent], seat: int) -> bool:
        """Whether an event of a kind has come."""
        return any(isinstance(event, kind) and event.seat == seat for event in self.events)


@dataclass
class Move:
    """A request as its router sees it: where it began and where it goes on."""

    prompt: tuple[int, ...]
    most: int
    key: AttemptKey
    begins: int
    goes_on: int = 0
    told: list[int] = field(default_factory=list)


class Pair:
    """A source and a target. `seed`, `step_bytes`: of the transport, which is late, in pieces and out of order."""

    def __init__(self, seed: int = 0, step_bytes: int = 1 << 20, **options: object) -> None:
        self.fabric = MemoryFabric(seed, step_bytes)
        ids = fresh_ids()
        self.source = MovingWorld(self.fabric, "source", ids, **options)
        self.target = MovingWorld(self.fabric, "target", ids, **options)
        self._numbers = itertools.count(1)
        self._askers = itertools.count(1)
        self._drains: dict[int, tuple[MovingWorld, str]] = {}

    @property
    def worlds(self) -> tuple[MovingWorld, MovingWorld]:
        """Both."""
        return self.source, self.target

    def pass_time(self, seconds: float) -> None:
        """One clock for both."""
        now = max(world.now for world in self.worlds) + seconds
        for world in self.worlds:
            world.now = now

    def begin(self, prompt: int = 5, most: int = 12, steps: int = 4, limits: Limits | None = None, salt: bytes = b"") -> Move:
        """A request that has chosen `steps` tokens at the source."""
        number = next(self._numbers)
        ids = tuple((number * 7 + index) % 90 + 1 for index in range(prompt))
        key = AttemptKey(f"move-{number}", 1)
        move = Move(ids, most, key, self.source.open(ids, most, key=key, limits=limits, salt=salt))
        for _ in range(steps):
            self.source.step(seconds=0.01)
        return move

    def pause(self, move: Move) -> SeatPaused:
        """PauseSeat, and its answer at the next border."""
        self.source.tell(PauseSeat(move.begins))
        self.source.step(seconds=0.01)
        paused = self.source.last(SeatPaused, move.begins)
        assert isinstance(paused, SeatPaused)
        return paused

    def open_target(self, move: Move, **options: object) -> int:
        """The seat at the target, with everything that the source has told."""
        move.told = list(self.source.seat(move.begins).sequence.output_token_ids)
        move.key = AttemptKey(move.key.request_id, move.key.attempt + 1)
        move.goes_on = self.target.open(
            move.prompt,
            move.most,
            key=move.key,
            prefill=self.source.me,
            earlier=Earlier(tuple(move.told), len(move.told), len(move.told)),  # each token is a character
            last_token_at=self.source.now,
            moved=True,
            **options,  # type: ignore[arg-type]
        )
        self.serve(self.target)
        return move.goes_on

    def push(self, move: Move) -> Grant:
        """The target's grant goes to the source."""
        grant = self.target.grant_of(move.goes_on)
        self.source.push_seat(move.begins, grant)
        return grant

    def serve(self, world: MovingWorld) -> None:
        """Everything around one member but the wire: endpoints, fences, Drains and their answers."""
        world.take_orders()
        errands, world.errands = world.errands, []
        for errand in errands:
            if isinstance(errand, AskEndpoint):
                world.tell(EndpointMade(errand.writer, world.receiver.endpoint(errand.writer)))
            elif isinstance(errand, AskFence):
                world.tell(WriterFenced(errand.writer, world.receiver.fence(errand.writer)))
            elif isinstance(errand, AskDrain):
                asker = next(self._askers)
                self._drains[asker] = (world, errand.grant_id)
                writer = next(one for one in self.worlds if one.me == errand.writer)
                writer.tell(DrainPush(errand.grant_id, asker))
            elif isinstance(errand, PushDrained):
                asked, grant_id = self._drains.pop(errand.asker)
                asked.tell(DrainAnswered(grant_id, DrainAnswer.STOPPED))

    def carry(self, rounds: int = 60) -> None:
        """Let the wire and everything around it run until nothing moves."""
        for _ in range(rounds):
            for world in self.worlds:
                self.serve(world)
                world.post()
                world.poll()

    def leave(self, move: Move) -> None:
        """The source's seat is not needed any more."""
        self.source.tell(EndSeat(move.begins, MOVED, None))
        self.source.step()

    def joined(self, move: Move) -> tuple[list[int], bytes]:
        """All tokens and all text that a client gets."""
        tokens = [*move.told, *self.target.selected(move.goes_on)]
        return tokens, self.source.text(move.begins) + self.target.text(move.goes_on)

    def undisturbed(self, move: Move) -> tuple[list[int], bytes]:
        """What it would have been without a move."""
        tokens = self.source.runner.said(move.prompt, move.most)
        return tokens, bytes(tokens)

    def check(self) -> None:
        """The books of both balance."""
        for world in self.worlds:
            world.check()

    def assert_empty(self) -> None:
        """Nothing is held anywhere."""
        assert self.fabric.in_flight == 0
        for world in self.worlds:
            world.assert_empty()


def ready(world: MovingWorld, seat: int) -> bool:
    """Whether a seat was told that its hand-over is complete."""
    return world.has(PromptReady, seat)


def pushed(world: MovingWorld, seat: int) -> SeatPushed:
    """The newest end of a push."""
    found = world.last(SeatPushed, seat)
    assert isinstance(found, SeatPushed)
    return found


def outputs_after(world: MovingWorld, seat: int, kind: type[SeatEvent]) -> list[SeatEvent]:
    """Outputs of a seat after the first event of a kind."""
    mine = [event for event in world.events if event.seat == seat]
    first = next(index for index, event in enumerate(mine) if isinstance(event, kind))
    return [event for event in mine[first:] if isinstance(event, OutputMade)]
