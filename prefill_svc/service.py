"""A prefill member put together: engine thread, transfer thread, gRPC edge."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from engine.landing import LandingRows
from engine.pages import PageCounts
from engine.prefix_index import PrefixChanges
from engine.prefixes import page_pools
from engine.runner import Runner
from kv_transfer.grants import WriterBook
from kv_transfer.offer import Slab
from kv_transfer.plan import SourceMemory
from kv_transfer.ports import Sender
from kv_transfer.pump import SendPump
from kv_transfer.sending import SendingEnd
from lifecycle.pages_by_state import PagesByState
from member.engine_thread import EngineThread, thread_for
from member.inbox import Inbox
from member.kv_layout import layout_view, registered
from member.prefix_feed import PrefixFeed
from member.prefix_gauges import identity_of, prefix_gauges
from member.watch import MemberInfo, MemberLoad, MemberRole
from prefill_svc import messages as m
from prefill_svc.config import PrefillSettings
from prefill_svc.plans import SchedulerStatistics
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.servicer import Identity, PrefillServicer
from prefill_svc.worker import PrefillWorker, StepReport, WorkerPorts
from rpc.admin import Books
from rpc.application import Frame
from tandem.pools.v1 import prefill_pb2_grpc
from telemetry.prefill_metrics import PrefillGauges, PrefillMetrics

SERVICE_NAME = "tandem.pools.v1.PrefillService"
ENGINE_STOP_S = 5.0
#: Longest wait for a recount: a step runs meanwhile.
CHECK_S = 30.0
#: As lifecycle.pages_by_state names them.
PAGE_STATES = ("free", "owned", "cached", "granted", "quarantined", "pinned")
_IDLE = SchedulerStatistics(0, 0, 0, 0, 0, 0, 0, 0, PageCounts(0, 0, 0, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a member is made of: how to load the model, how to make the sending end, and the model's name.

    The last three make what runs beside the event loop.
    """

    load_runner: Callable[[], Runner]
    make_sender: Callable[[str, Sequence[Slab]], Sender]
    model: str
    make_inbox: Callable[[int], Inbox[m.Command]] = Inbox
    make_engine: Callable[..., EngineThread] = thread_for
    make_pump: Callable[..., SendPump] = SendPump


class PrefillService:
    """See member.process.Service."""

    service_names = (SERVICE_NAME,)

    def __init__(self, frame: Frame, settings: PrefillSettings, parts: Parts) -> None:
        self._frame = frame
        self._settings = settings
        self._parts = parts
        self._inbox = parts.make_inbox(settings.inbox_messages)
        self._metrics = PrefillMetrics(frame.metrics)
        self._servicer = PrefillServicer(self._inbox, frame.tracing, self._observe)
        self.prefixes = PrefixFeed()
        self._askers = itertools.count()
        self._recounts: dict[int, asyncio.Future[m.Recounted]] = {}
        self._statistics = _IDLE
        self._idle = asyncio.Event()
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._engine: EngineThread | None = None
        self._sending: SendingEnd | None = None
        self._worker: PrefillWorker | None = None
        self._info: MemberInfo | None = None

    # ---- the frame's calls

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the gRPC edge."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load the model, register memory, start both threads."""
        runner = await asyncio.to_thread(self._parts.load_runner)
        context_tokens = min(runner.context_tokens, self._settings.context_tokens or runner.context_tokens)
        staging = LandingRows(self._settings.staging_rows, runner.vocabulary_size)
        slabs = [registered(slab) for slab in (*runner.slabs, staging.slab)]
        groups = runner.layout.groups
        source = SourceMemory(layout_view(runner.layout), tuple(slabs[:-1]), slabs[-1], self._settings.content)
        sending = SendingEnd(
            lambda: self._parts.make_sender(self._frame.name, slabs),
            self._inbox.put_always,
            lambda cause: self._metrics.push_failures.inc(1, cause),
            self._frame.crashed,
            self._parts.make_pump,
        )
        await asyncio.to_thread(sending.start)
        self._sending = sending
        pools = page_pools(runner.layout.groups, [slab.units for slab in runner.slabs])
        keys = runner.layout.prefix_keys if self._settings.prefix_cache else None
        limits = self._settings.scheduler_limits(context_tokens)
        scheduler = PrefillScheduler(limits, pools, groups, WriterBook(), keys)
        ports = WorkerPorts(sending.transfer, self._publish, self._report)
        self._worker = PrefillWorker(runner, staging, scheduler, self._inbox, ports)
        self._engine = self._parts.make_engine(self._worker, self._inbox, self._frame.crashed)
        self._statistics = scheduler.statistics()
        self._info = self._describe(runner, pools[0].usable_pages, context_tokens)
        me = Identity(self._frame.name, self._frame.incarnation, runner.layout.model_snapshot, runner.adapters)
        self._servicer.open(me, source)
        self._metrics.gauges_from(self._gauges)
        statistics = runner.statistics
        self._metrics.model_from(
            lambda: statistics().model_part_seconds, lambda: statistics().lent_steps, lambda: statistics().recalled_steps
        )
        self._engine.start()

    def info(self) -> MemberInfo:
        """What this member is."""
        assert self._info is not None, "asked before start has returned"
        return self._info

    def load(self) -> MemberLoad:
        """How busy it was after its last turn."""
        now, worker = self._statistics, self._worker
        return MemberLoad(
            free_pages=now.free_pages,
            running_sequences=now.computing_jobs + now.sending_jobs,
            waiting_sequences=now.waiting_jobs,
            waiting_tokens=now.waiting_tokens,
            draining=self._closing,
            steps=worker.steps if worker else 0,
            prefill_tokens_per_s=worker.tokens_per_s if worker else 0.0,
            pages=PagesByState(**{state: getattr(now.pages, state) for state in PAGE_STATES}),
            tokens=worker.computed_tokens if worker else 0,
        )

    def stalled(self, now: float) -> bool:
        """Whether a turn lasts too long."""
        return self._engine is not None and self._engine.stalled(now, self._settings.stall_after_s)

    async def check(self) -> Books:
        """Recount on the engine thread, where everything is owned."""
        asker = next(self._askers)
        answer = self._recounts[asker] = self._loop.create_future()
        try:
            self._inbox.put_always(m.Recount(asker))  # bounded by the calls that wait for an answer
            async with asyncio.timeout(CHECK_S):
                found = await answer
        finally:
            del self._recounts[asker]
        books = {**found.books, "calls": self._servicer.open_calls}
        return Books(books, found.faults)

    def begin_drain(self) -> None:
        """Refuse new prompts."""
        self._closing = True
        self._inbox.put_always(m.Close(expel=False))

    async def drained(self) -> None:
        """Until every job has ended, its writes included."""
        await self._until_idle()

    async def stop(self) -> None:
        """Give up what still runs, wait for its writes, stop the threads."""
        if self._engine is not None:
            self._inbox.put_always(m.Close(expel=True))
            await self._until_idle()
            await asyncio.to_thread(self._engine.stop, ENGINE_STOP_S)
        if self._sending is not None:
            await asyncio.to_thread(self._sending.close)

    async def _until_idle(self) -> None:
        """Ask for a recount as a marker: what it finds is true after every earlier command."""
        while (await self.check()).books["jobs"]:
            self._idle.clear()
            if self._statistics.jobs:  # what was told while the recount was on its way would not be told again
                await self._idle.wait()

    # ---- called on the engine thread

    def _publish(self, outputs: list[m.Output], statistics: SchedulerStatistics, prefixes: PrefixChanges) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs, statistics, prefixes)

    def _report(self, step: StepReport) -> None:
        self._metrics.step.observe(step.seconds)
        self._metrics.step_tokens.observe(step.scheduled_tokens)
        self._metrics.step_sequences.observe(step.scheduled_sequences)
        self._metrics.computed_tokens.inc(step.scheduled_tokens)

    # ---- called on the event loop

    def _deliver(self, outputs: list[m.Output], statistics: SchedulerStatistics, prefixes: PrefixChanges) -> None:
        self._statistics = statistics
        self.prefixes.put(prefixes)
        for output in outputs:
            if isinstance(output, m.Recounted):
                waiting = self._recounts.get(output.asker)
                if waiting is not None and not waiting.done():
                    waiting.set_result(output)
            else:
                self._servicer.deliver(output)
        if statistics.jobs == 0:
            self._idle.set()

    def _observe(self, output: m.Output, traceparent: str) -> None:
        metrics = self._metrics
        if isinstance(output, m.Drained):
            metrics.drains.inc(1, "committed" if output.committed else "drained")
        elif isinstance(output, m.Failed):
            metrics.prefills.inc(1, output.cause)
        elif isinstance(output, m.Committed):
            figures = output.figures
            metrics.prefills.inc(1, "committed")
            metrics.queue.observe(figures.queue_s, traceparent=traceparent)
            metrics.compute.observe(figures.compute_s, traceparent=traceparent)
            metrics.handover.observe(figures.handover_s, traceparent=traceparent)
            metrics.handover_exposed.observe(figures.exposed_s, traceparent=traceparent)
            hidden_s = max(0.0, figures.handover_s - figures.exposed_s)
            metrics.handover_hidden.observe(hidden_s / figures.handover_s if figures.handover_s > 0 else 1.0)
            metrics.handover_size.observe(figures.sent_bytes)
            metrics.post.observe(figures.post_s, traceparent=traceparent)

    def _gauges(self) -> PrefillGauges:
        now, pages = self._statistics, self._statistics.pages
        engine, sending = self._engine, self._sending
        return PrefillGauges(
            running_sequences=now.computing_jobs,
            waiting_sequences=now.waiting_jobs,
            waiting_tokens=now.waiting_tokens,
            pages={state: getattr(pages, state) for state in PAGE_STATES},
            kv_used_ratio=1 - (pages.free + pages.cached) / pages.total if pages.total else 0.0,
            open_grants=now.jobs,
            pushes_in_flight=now.pushes_in_flight,
            remote_agents=sending.statistics().peers if sending else 0,
            pushed_bytes=now.pushed_bytes,
            cached_tokens=now.prefixes.hit_tokens,
            prefix=prefix_gauges(now.prefixes),
            inbox_messages=self._inbox.statistics().waiting,
            engine_busy_ratio=engine.statistics().busy_ratio if engine else 0.0,
        )

    def _describe(self, runner: Runner, usable_pages: int, context_tokens: int) -> MemberInfo:
        return MemberInfo(
            member=self._frame.name,
            incarnation=self._frame.incarnation,
            address=self._frame.address,
            role=MemberRole.PREFILL,
            model=self._parts.model,
            model_snapshot=runner.layout.model_snapshot,
            layout_fingerprint=runner.layout.fingerprint,
            page_tokens=runner.layout.groups[0].page_tokens,
            total_pages=usable_pages,
            context_tokens=context_tokens,
            vocabulary_size=runner.vocabulary_size,
            max_sequences=self._settings.max_jobs,
            max_queued_tokens=self._settings.max_queued_tokens,
            adapters=runner.adapters,
            prefix_identity=identity_of(runner.layout.prefix_keys if self._settings.prefix_cache else None),
        )
