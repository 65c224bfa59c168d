"""A decode member put together: engine thread, transfer thread, event loop."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import grpc

from decode_svc import messages as m
from decode_svc.admission import Identity
from decode_svc.config import DecodeSettings
from decode_svc.description import copier, describe
from decode_svc.draft_loading import DraftModel, drafts_for
from decode_svc.draft_model import ModelDrafts
from decode_svc.drafts import DraftSource
from decode_svc.drains import Drains
from decode_svc.gauges import gauges
from decode_svc.grammar_compiler import ChildCompiler
from decode_svc.grammars import Grammars, MakeCompiler, member_grammars
from decode_svc.handover import Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.move_door import MoveDoor
from decode_svc.opening import Opener, Tokenizer
from decode_svc.record import Recorder
from decode_svc.scheduler import Scheduler
from decode_svc.servicer import DecodeServicer
from decode_svc.snapshot import Snapshot
from decode_svc.streams import Streams
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.landing import LandingRows
from engine.runner import Runner
from engine.sequence import Sequence as TokenSequence
from kv_transfer.content import content_check
from kv_transfer.nixl import NixlSender
from kv_transfer.offer import Endpoint, Peer, Slab
from kv_transfer.plan import SourceMemory
from kv_transfer.ports import ReceiveFailed, Receiver, Sender
from kv_transfer.pump import PumpFull, PumpStopped, ReceivePump, SendPump
from kv_transfer.sending import SendingEnd
from lifecycle.finish import Cause, Ending, FinishReason
from member.engine_thread import EngineThread, thread_for
from member.inbox import Inbox
from member.kv_layout import layout_view, registered
from member.prefix_feed import PrefixFeed
from member.watch import MemberInfo, MemberLoad
from rpc import clocks
from rpc.admin import Books
from rpc.application import Frame, lasting
from tandem.pools.v1 import decode_pb2_grpc, prefill_pb2_grpc
from telemetry.decode_metrics import DecodeGauges, DecodeMetrics

SERVICE_NAME = "tandem.pools.v1.DecodeService"
#: For the grants that its own moving sequences fill.
WRITER_SERVICE_NAME = "tandem.pools.v1.PrefillService"
#: Seconds between two looks at readers that do not take their output.
LOOK_AFTER_S = 0.25
#: Seconds for the last turn of the engine, and for streams to be told the end, when the member stops.
ENGINE_STOP_S = 5.0
TELL_END_S = 1.0
#: Seconds within which the engine answers a recount: a step may be running.
CHECK_S = 30.0

_SHUTTING_DOWN = Ending(FinishReason.TRANSPORT_ERROR, Cause.SHUTTING_DOWN)
_CRASHED = Ending(FinishReason.MODEL_ERROR, Cause.MODEL_FAILED)

_LOG = logging.getLogger("decode")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a member is made of: how to load model and tokenizer, how to make both ends of the transport, the model's name.

    `dial` opens a channel to a writer of grants, None: as the member's process does. `load_drafts`: where drafts come from,
    None leaves it to the settings; `load_draft_model`: the model that these may name.
    `make_inbox` to `make_send_pump` make what runs beside the event loop.
    """

    load_runner: Callable[[], Runner]
    load_tokenizer: Callable[[], Tokenizer]
    make_receiver: Callable[[str, Sequence[Slab]], Receiver]
    model: str
    dial: Callable[[str], grpc.aio.Channel] | None = None
    make_inbox: Callable[[int], Inbox[m.Command]] = Inbox
    make_engine: Callable[..., EngineThread] = thread_for
    make_pump: Callable[..., ReceivePump] = ReceivePump
    make_send_pump: Callable[..., SendPump] = SendPump
    make_sender: Callable[[str, Sequence[Slab]], Sender] = NixlSender
    load_drafts: Callable[[], DraftSource | None] = lambda: None
    load_draft_model: Callable[[], DraftModel | None] = lambda: None
    make_compiler: MakeCompiler = ChildCompiler


class DecodeService:
    """See member.process.Service."""

    service_names = (SERVICE_NAME, WRITER_SERVICE_NAME)

    def __init__(self, frame: Frame, settings: DecodeSettings, parts: Parts) -> None:
        """A service for `frame`; made on the event loop, before its server starts."""
        self._frame = frame
        self._settings = settings
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self.inbox = parts.make_inbox(settings.inbox_messages)
        self._metrics = DecodeMetrics(frame.metrics)
        self._recorder = Recorder(self._metrics, frame.tracing, frame.name)
        self.streams = Streams(settings.stream_limits(), self.inbox.put_always, clocks.monotonic)
        self._moves = MoveDoor(self.inbox, lambda event: self._take(event, clocks.monotonic()))
        self._servicer = DecodeServicer(
            self.inbox, self.streams, self._moves, self._recorder.refused, self._metrics.adoptions.inc
        )
        self._drains = Drains(parts.dial or frame.dial, self.inbox.put_always, self._metrics.drain.observe, settings.drain_call_s)
        self.snapshot: Snapshot | None = None
        self.prefixes = PrefixFeed()
        self._info: MemberInfo | None = None
        self._engine: EngineThread | None = None
        self._worker: DecodeWorker | None = None
        self._grammars: Grammars | None = None
        self._pump: ReceivePump | None = None
        self._sending: SendingEnd | None = None
        self._looking: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        self._broken = False

    # the frame's calls

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the gRPC edge."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self._servicer, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._moves, server)

    async def start(self) -> None:
        """Load the model, register memory, start both threads."""
        parts, settings = self._parts, self._settings
        runner = await asyncio.to_thread(parts.load_runner)
        tokenizer = await asyncio.to_thread(parts.load_tokenizer)
        landing = await asyncio.to_thread(LandingRows, settings.landing_rows, runner.vocabulary_size)
        slabs = [registered(slab) for slab in (*runner.slabs, landing.slab)]
        pump = parts.make_pump(
            partial(parts.make_receiver, f"{self._frame.name}-{self._frame.incarnation}", slabs), self._arrived, self._crashed
        )
        await asyncio.to_thread(pump.start)
        self._pump = pump
        self._sending = sending = self._sending_end(slabs)
        me = self._identity(runner)
        drafts = await asyncio.to_thread(parts.load_drafts)
        loaded = await asyncio.to_thread(parts.load_draft_model)
        draft_model = drafts_for(loaded, parts.model, runner, tokenizer, settings.draft_step_tokens)
        scheduler = self._scheduler(runner, tokenizer, drafts, draft_model)
        copy_pages = await asyncio.to_thread(copier, runner, settings.host_pages)
        ports = WorkerPorts(
            publish=self._publish,
            endpoint=partial(self._ask_endpoint, pump),
            fence=partial(self._fence, pump),
            armed=pump.armed,
            copy_pages=copy_pages,
            push=sending.transfer,
        )
        worker = DecodeWorker(runner, landing, scheduler, self.inbox, ports)
        self._engine = parts.make_engine(worker, self.inbox, self._crashed)
        self._info = describe(self._parts.model, me, runner, settings, scheduler.memory)
        self._recorder.open(landing.slab.unit_bytes)
        source = SourceMemory(layout_view(runner.layout), tuple(slabs[:-1]), slabs[-1], settings.content)
        self._moves.open(me.member, me.incarnation, source, sending)
        self._worker = worker
        limits, size = settings.grammar_limits(), runner.vocabulary_size
        self._grammars = member_grammars(parts.make_compiler, tokenizer, size, limits, self._metrics)
        self._servicer.open(Opener(me, tokenizer, self._grammars))
        self._metrics.gauges_from(self._gauges)
        statistics = runner.statistics
        self._metrics.model_from(
            lambda: statistics().model_part_seconds, lambda: statistics().lent_steps, lambda: statistics().recalled_steps
        )
        self._looking = lasting(asyncio.create_task(self._look_after(), name="decode-look-after"), self._crashed)
        self._engine.start()

    def info(self) -> MemberInfo:
        """What this member is."""
        assert self._info is not None, "asked before start has returned"
        return self._info

    def load(self) -> MemberLoad:
        """How busy it was after its last turn."""
        now = self.snapshot
        if now is None:
            return MemberLoad(free_pages=self._info.total_pages if self._info is not None else 0)
        return MemberLoad(
            free_pages=now.load.free_pages,
            running_sequences=now.load.running,
            waiting_sequences=now.load.waiting + now.load.preempted,
            preempted_sequences=now.load.preempted,
            expected_output_tokens=now.load.expected_output_tokens or 0,
            waiting_tokens=now.load.waiting_tokens,
            quarantined_pages=now.pages["quarantined"],
            draining=now.load.draining,
            steps=now.load.steps,
            prefill_tokens_per_s=now.prompt_tokens_per_s,
            decode_step_s=now.decode_step_s,
        )

    def stalled(self, now: float) -> bool:
        """Whether a turn lasts too long."""
        return self._engine is not None and self._engine.stalled(now, self._settings.stall_after_s)

    async def check(self) -> Books:
        """Recount on the engine thread, where everything is owned, and add what the event loop holds."""
        answer: asyncio.Future[tuple[dict[str, int], tuple[str, ...]]] = self._loop.create_future()

        def reply(books: Mapping[str, int], faults: Sequence[str]) -> None:
            found = (dict(books), tuple(faults))
            self._loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))

        self.inbox.put_nowait(m.Examine(reply))
        async with asyncio.timeout(CHECK_S):
            books, faults = await answer
        return Books({**books, **self.streams.books(), "drain_calls": self._drains.open_tries}, faults)

    def begin_drain(self) -> None:
        """Refuse new seats; what runs goes on."""
        self.inbox.put_always(m.StopAdmitting())

    async def drained(self) -> None:
        """Until every stream and every write from pages here has ended. Ends kept while a client reads are not waited for."""
        await self.streams.wait_until_idle()
        while self.snapshot is not None and self.snapshot.pushes_in_flight:
            self._told.clear()
            await self._told.wait()

    async def stop(self) -> None:
        """End what still runs with a typed error, then stop the threads."""
        self.streams.stop_holding()
        if self._engine is not None:
            self.inbox.put_always(m.EndAll(_SHUTTING_DOWN))
            try:
                async with asyncio.timeout(TELL_END_S):
                    await self.drained()
            except TimeoutError:
                _LOG.warning("%d streams did not take their end within %s s", len(self.streams), TELL_END_S)
            await asyncio.to_thread(self._engine.stop, ENGINE_STOP_S)
        if self._worker is not None and self._grammars is not None:
            self._worker.close()
            await self._grammars.close()
        if self._looking is not None:
            self._looking.cancel()
        await self._drains.close()
        for end in (self._sending, self._pump):
            if end is not None:
                await asyncio.to_thread(end.close)

    # called on the engine thread

    def _publish(self, outbox: Outbox) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outbox)

    def _ask_endpoint(self, pump: ReceivePump, writer: str) -> None:
        def made(answer: Endpoint | ReceiveFailed) -> None:
            endpoint, problem = (answer, "") if isinstance(answer, Endpoint) else (None, str(answer))
            self.inbox.put_always(m.EndpointMade(writer, endpoint, problem))

        def displaced(other: str) -> None:
            self.inbox.put_always(m.WriterFenced(other, proven=True))

        try:
            pump.request_endpoint(writer, made, displaced)
        except (PumpFull, PumpStopped) as refused:
            self.inbox.put_always(m.EndpointMade(writer, None, str(refused)))

    def _fence(self, pump: ReceivePump, writer: str) -> None:
        try:
            pump.fence(writer, lambda proven: self.inbox.put_always(m.WriterFenced(writer, proven)))
        except (PumpFull, PumpStopped):
            self.inbox.put_always(m.WriterFenced(writer, proven=False))

    # called on any thread

    def _arrived(self, notices: list[tuple[str, bytes]]) -> None:
        self.inbox.put_always(m.NoticesArrived(tuple(notices)))

    def _crashed(self, crash: BaseException) -> None:
        """The engine or the transfer thread broke: tell the streams, then end the process."""
        self._loop.call_soon_threadsafe(self._tell_crash)
        self._frame.crashed(crash)

    # called on the event loop

    def _tell_crash(self) -> None:
        now = clocks.monotonic()
        self._broken = True
        for stream in self.streams.open():
            report = m.SeatReport.unknown(stream.origin.opened_at, now)
            for seat in stream.unended:
                self._take(m.SeatEnded(seat, _CRASHED, stream.origin_of(seat).usage(), report), now)

    def _deliver(self, outbox: Outbox) -> None:
        if self._broken:
            return  # the streams were told already
        now = clocks.monotonic()
        try:
            for event in outbox.events:
                self._take(event, now)
        except Exception as wrong:  # noqa: BLE001  (top of a callback: a broken stream log must end the process, not be lost)
            self._crashed(wrong)
            return
        for order in outbox.drains:
            self._drains.ask(order)
        for answer in outbox.drained:
            self._moves.drained(answer)
        if outbox.step is not None:
            self._recorder.step(outbox.step)
        if outbox.snapshot is not None:
            self.snapshot = outbox.snapshot
            self.prefixes.put(outbox.prefixes)
            self._told.set()

    def _take(self, event: m.SeatEvent, now: float) -> None:
        stream = self.streams.deliver(event, now)
        if isinstance(event, m.SeatRefused):
            self._recorder.refused(event.reason)
        elif stream is not None:
            self._recorder.event(event, stream.origin_of(event.seat))

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            self.streams.look_after(clocks.monotonic(), self._settings.linger_s)

    # making

    def _sending_end(self, slabs: Sequence[Slab]) -> SendingEnd:
        """For sequences that move away; its agent is made when the first one does."""
        return SendingEnd(
            partial(self._parts.make_sender, self._frame.name, slabs),
            self.inbox.put_always,
            lambda cause: self._metrics.push_failures.inc(1, cause),
            self._crashed,
            self._parts.make_send_pump,
        )

    def _scheduler(
        self, runner: Runner, tokenizer: Tokenizer, drafts: DraftSource | None, draft_model: ModelDrafts | None
    ) -> Scheduler:
        settings, frame = self._settings, self._frame
        limits, totals = settings.scheduler_limits(), [slab.units for slab in runner.slabs]
        memory = DecodeMemory(
            runner.layout,
            totals,
            settings.landing_rows,
            settings.host_pages,
            limits.step.tokens,
            prefix_cache=settings.prefix_cache,
        )
        handovers = Handovers(
            memory,
            Peer(frame.name, frame.incarnation, frame.address),
            runner.layout.fingerprint,
            settings.handover_limits(),
            lambda: secrets.token_hex(16),
            content_check(runner.layout.fingerprint, memory.page_tokens) if settings.handover_checksums else None,
        )
        make_sequence = partial(TokenSequence, streams=tokenizer.detokeniser)
        return Scheduler(limits, memory, handovers, make_sequence, drafts, draft_model)

    def _identity(self, runner: Runner) -> Identity:
        return Identity(
            member=self._frame.name,
            incarnation=self._frame.incarnation,
            address=self._frame.address,
            model_snapshot=runner.layout.model_snapshot,
            context_tokens=min(runner.context_tokens, self._settings.context_tokens or runner.context_tokens),
            vocabulary_size=runner.vocabulary_size,
            computes_prompts=self._settings.computes_prompts,
            adapters=runner.adapters,
        )

    def _gauges(self) -> DecodeGauges:
        engine, pump = self._engine, self._pump
        return gauges(
            self.snapshot,
            stream_buffer_bytes=self.streams.buffer_bytes,
            slow_readers=self.streams.slow_readers,
            seats_held=self.streams.held,
            replay_bytes=self.streams.replay_bytes,
            receiving_agents=pump.statistics().writers if pump is not None else 0,
            remote_agents=self._sending.statistics().peers if self._sending is not None else 0,
            inbox_messages=self.inbox.statistics().waiting,
            grammars=(len(self._grammars), self._grammars.kept_bytes) if self._grammars is not None else (0, 0),
            engine_busy_ratio=engine.statistics().busy_ratio if engine is not None else 0.0,
        )
