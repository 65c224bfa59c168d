"""A decode member put together: engine thread, transfer thread, event loop."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc

from decode_svc import messages as m
from decode_svc.admission import Identity
from decode_svc.config import DecodeSettings
from decode_svc.drains import Drains
from decode_svc.gauges import gauges
from decode_svc.handover import Handovers
from decode_svc.memory import DecodeMemory
from decode_svc.record import Recorder
from decode_svc.scheduler import Scheduler
from decode_svc.servicer import DecodeServicer
from decode_svc.snapshot import Snapshot
from decode_svc.streams import Streams
from decode_svc.worker import DecodeWorker, Outbox, WorkerPorts
from engine.landing import LandingRows
from engine.runner import Runner
from engine.sequence import Sequence as TokenSequence
from engine.slab import SlabMemory
from kv_transfer.offer import Endpoint, Peer, Slab
from kv_transfer.ports import ReceiveFailed, Receiver
from kv_transfer.pump import PumpFull, PumpStopped, ReceivePump
from lifecycle.finish import Cause, Ending, FinishReason
from lifecycle.usage import Usage
from member.engine_thread import EngineThread
from member.inbox import Inbox
from member.watch import MemberInfo, MemberLoad, MemberRole
from rpc.admin import Books
from rpc.application import Frame, lasting
from rpc.channels import internal_channel
from tandem.pools.v1 import decode_pb2_grpc
from telemetry.decode_metrics import DecodeGauges, DecodeMetrics
from text.detokeniser import TextStream, Utf8Policy

SERVICE_NAME = "tandem.pools.v1.DecodeService"
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


class Tokenizer(Protocol):
    """What a decode member needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def detokeniser(self, policy: Utf8Policy = ...) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a member is made of: how to load model and tokenizer, how to make the receiving end, the model's name.

    `dial` opens a channel to a prefill member.
    """

    load_runner: Callable[[], Runner]
    load_tokenizer: Callable[[], Tokenizer]
    make_receiver: Callable[[str, Sequence[Slab]], Receiver]
    model: str
    dial: Callable[[str], grpc.aio.Channel] = internal_channel


class DecodeService:
    """See member.process.Service."""

    service_names = (SERVICE_NAME,)

    def __init__(self, frame: Frame, settings: DecodeSettings, parts: Parts) -> None:
        """A service for `frame`; made on the event loop, before its server starts."""
        self._frame = frame
        self._settings = settings
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self.inbox: Inbox[m.Command] = Inbox(settings.inbox_messages)
        self._metrics = DecodeMetrics(frame.metrics)
        self._recorder = Recorder(self._metrics, frame.tracing, frame.name)
        self.streams = Streams(settings.stream_bytes, self.inbox.put_always, time.monotonic)
        self._servicer = DecodeServicer(self.inbox, self.streams, self._recorder.refused)
        self._drains = Drains(parts.dial, self.inbox.put_always, self._metrics.drain.observe, settings.drain_call_s)
        self.snapshot: Snapshot | None = None
        self._info: MemberInfo | None = None
        self._engine: EngineThread | None = None
        self._pump: ReceivePump | None = None
        self._looking: asyncio.Task[None] | None = None
        self._broken = False

    # the frame's calls

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the gRPC edge."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load the model, register memory, start both threads."""
        parts, settings = self._parts, self._settings
        runner = await asyncio.to_thread(parts.load_runner)
        tokenizer = await asyncio.to_thread(parts.load_tokenizer)
        landing = await asyncio.to_thread(LandingRows, settings.landing_rows, runner.vocabulary_size)
        slabs = [_registered(slab) for slab in (*runner.slabs, landing.slab)]
        pump = ReceivePump(
            partial(parts.make_receiver, f"{self._frame.name}-{self._frame.incarnation}", slabs), self._arrived, self._crashed
        )
        await asyncio.to_thread(pump.start)
        self._pump = pump
        me = self._identity(runner)
        scheduler = self._scheduler(runner, tokenizer)
        ports = WorkerPorts(self._publish, partial(self._ask_endpoint, pump), partial(self._fence, pump), pump.armed)
        worker = DecodeWorker(runner, landing, scheduler, self.inbox, ports)
        self._engine = EngineThread(worker.turn, self.inbox, on_crash=self._crashed, next_wake=worker.next_wake)
        self._info = self._describe(runner, me, scheduler.memory.available())
        groups = tuple((group.page_tokens, group.page_bytes) for group in runner.layout.groups)
        self._recorder.open(groups, landing.slab.unit_bytes)
        self._servicer.open(me, tokenizer.eos_ids)
        self._metrics.gauges_from(self._gauges)
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
            waiting_sequences=now.load.waiting,
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
        streams = {
            "streams": len(self.streams),
            "stream_buffer_bytes": self.streams.buffer_bytes,
            "drain_calls": self._drains.open_tries,
        }
        return Books({**books, **streams}, faults)

    def begin_drain(self) -> None:
        """Refuse new seats; what runs goes on."""
        self.inbox.put_always(m.StopAdmitting())

    async def drained(self) -> None:
        """Until every stream has ended."""
        await self.streams.wait_until_none()

    async def stop(self) -> None:
        """End what still runs with a typed error, then stop the threads."""
        if self._engine is not None:
            self.inbox.put_always(m.EndAll(_SHUTTING_DOWN))
            try:
                async with asyncio.timeout(TELL_END_S):
                    await self.drained()
            except TimeoutError:
                _LOG.warning("%d streams did not take their end within %s s", len(self.streams), TELL_END_S)
            await asyncio.to_thread(self._engine.stop, ENGINE_STOP_S)
        if self._looking is not None:
            self._looking.cancel()
        await self._drains.close()
        if self._pump is not None:
            await asyncio.to_thread(self._pump.close)

    # called on the engine thread

    def _publish(self, outbox: Outbox) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outbox)

    def _ask_endpoint(self, pump: ReceivePump, writer: str) -> None:
        def made(answer: Endpoint | ReceiveFailed) -> None:
            if isinstance(answer, Endpoint):
                self.inbox.put_always(m.EndpointMade(writer, answer))
            else:
                self.inbox.put_always(m.EndpointMade(writer, None, str(answer)))

        try:
            pump.request_endpoint(writer, made)
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
        now = time.monotonic()
        self._broken = True
        for stream in self.streams.open():
            report = m.SeatReport.unknown(stream.origin.opened_at, now)
            self._take(m.SeatEnded(stream.number, _CRASHED, Usage(prompt_tokens=stream.origin.prompt_tokens), report), now)

    def _deliver(self, outbox: Outbox) -> None:
        if self._broken:
            return  # the streams were told already
        now = time.monotonic()
        try:
            for event in outbox.events:
                self._take(event, now)
        except Exception as wrong:  # noqa: BLE001  (top of a callback: a broken stream log must end the process, not be lost)
            self._crashed(wrong)
            return
        for order in outbox.drains:
            self._drains.ask(order)
        if outbox.step is not None:
            self._recorder.step(outbox.step)
        if outbox.snapshot is not None:
            self.snapshot = outbox.snapshot

    def _take(self, event: m.SeatEvent, now: float) -> None:
        stream = self.streams.deliver(event, now)
        if isinstance(event, m.SeatRefused):
            self._recorder.refused(event.reason)
        elif stream is not None:
            self._recorder.event(event, stream.origin)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            self.streams.look_after(time.monotonic(), self._settings.linger_s)

    # making

    def _scheduler(self, runner: Runner, tokenizer: Tokenizer) -> Scheduler:
        settings, frame = self._settings, self._frame
        memory = DecodeMemory(runner.layout, min(slab.units for slab in runner.slabs), settings.landing_rows)
        handovers = Handovers(
            memory,
            Peer(frame.name, frame.incarnation, frame.address),
            runner.layout.fingerprint,
            settings.handover_limits(),
            lambda: secrets.token_hex(16),
        )
        make_sequence = partial(TokenSequence, streams=tokenizer.detokeniser)
        return Scheduler(settings.scheduler_limits(), memory, handovers, make_sequence)

    def _identity(self, runner: Runner) -> Identity:
        return Identity(
            member=self._frame.name,
            incarnation=self._frame.incarnation,
            address=self._frame.address,
            model_snapshot=runner.layout.model_snapshot,
            context_tokens=min(runner.context_tokens, self._settings.context_tokens or runner.context_tokens),
            vocabulary_size=runner.vocabulary_size,
            computes_prompts=self._settings.computes_prompts,
        )

    def _describe(self, runner: Runner, me: Identity, usable_pages: int) -> MemberInfo:
        return MemberInfo(
            member=me.member,
            incarnation=me.incarnation,
            address=me.address,
            role=MemberRole.DECODE,
            model=self._parts.model,
            model_snapshot=me.model_snapshot,
            layout_fingerprint=runner.layout.fingerprint,
            page_tokens=runner.layout.groups[0].page_tokens,
            total_pages=usable_pages,
            context_tokens=me.context_tokens,
            vocabulary_size=me.vocabulary_size,
            max_sequences=self._settings.max_sequences,
            computes_prompts=me.computes_prompts,
        )

    def _gauges(self) -> DecodeGauges:
        engine, pump = self._engine, self._pump
        return gauges(
            self.snapshot,
            stream_buffer_bytes=self.streams.buffer_bytes,
            slow_readers=self.streams.slow_readers,
            receiving_agents=pump.statistics().writers if pump is not None else 0,
            inbox_messages=self.inbox.statistics().waiting,
            engine_busy_ratio=engine.statistics().busy_ratio if engine is not None else 0.0,
        )


def _registered(slab: SlabMemory) -> Slab:
    return Slab(slab.address, slab.size_bytes, slab.unit_bytes)
