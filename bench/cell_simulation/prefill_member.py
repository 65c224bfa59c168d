"""A simulated prefill member: the real scheduler and writer; steps and writes cost a modelled time."""

from collections.abc import Callable

from bench.cell_simulation.decode_member import PAGE_BYTES, ROW_BYTES, DecodeMember
from bench.cell_simulation.events import Events
from bench.cell_simulation.known import Known, News
from bench.cell_simulation.settings import CellSettings
from decode_svc.messages import NoticesArrived
from engine.layout import GroupKind, GroupLayout
from engine.pages import PagePool
from kv_transfer.grant_writer import PushesEnded
from kv_transfer.grants import WriterBook
from kv_transfer.offer import Grant, LayoutView, Peer, Slab
from kv_transfer.plan import Notice, SourceMemory, plan
from kv_transfer.ports import Push, PushResult
from prefill_svc import messages as m
from prefill_svc.plans import SchedulerLimits, StepPlan
from prefill_svc.scheduler import PrefillScheduler
from router.member_facts import MemberInfo, MemberLoad, Role

STAGING_ROWS = 32
RATE_WEIGHT = 0.2


class PrefillMember:
    """`tell` gets what its calls would be told."""

    def __init__(self, number: int, settings: CellSettings, events: Events, tell: Callable[[m.Output], None]) -> None:
        self.peer = Peer(f"prefill-{number}", f"prefill-{number}", "prefill:1")
        self._settings = settings
        self._events = events
        self._tell = tell
        pages = settings.service.kv_tokens // settings.page_tokens + 1
        self._slabs = (Slab(1 << 41, pages * PAGE_BYTES, PAGE_BYTES),)
        self._rows = Slab(1 << 51, STAGING_ROWS * ROW_BYTES, ROW_BYTES)
        limits = SchedulerLimits(
            step_tokens=settings.prefill_step_tokens,
            step_sequences=settings.prefill_step_sequences,
            max_queued_tokens=settings.prefill_queued_tokens,
            staging_rows=STAGING_ROWS,
            context_tokens=settings.service.model.context_tokens,
        )
        group = GroupLayout(GroupKind.FULL, 1, 1, 1, settings.page_tokens, "bfloat16")
        self.scheduler = PrefillScheduler(limits, [PagePool(pages)], [group], WriterBook())
        self.info = _info(self.peer, settings, pages - 1)
        self.known = Known(self.info, MemberLoad(free_pages=pages - 1))
        self.news = News(self.known, events, settings.news_s, self._load)
        self.busy_s = 0.0
        self._targets: dict[str, DecodeMember] = {}
        self._network_free_at = 0.0
        self._tokens_per_s = 0.0
        self._inbox: list[m.Command] = []
        self._running = False

    def prefill(self, grant: Grant, prompt: tuple[int, ...], target: DecodeMember) -> None:
        """A call with a grant arrives."""
        layout = LayoutView(grant.layout_fingerprint, (self._settings.page_tokens,))
        self._targets[grant.grant_id] = target
        source = SourceMemory(layout, self._slabs, self._rows)
        self.send(m.Submit(grant.key, plan(grant, source), prompt, 0, None))

    def send(self, command: m.Command) -> None:
        """A command arrives."""
        self._inbox.append(command)
        if not self._running:
            self._running = True
            self._events.after(0.0, self._turn)

    def _load(self) -> MemberLoad:
        now = self.scheduler.statistics()
        return MemberLoad(
            free_pages=now.free_pages,
            running_sequences=now.computing_jobs + now.sending_jobs,
            waiting_sequences=now.waiting_jobs,
            waiting_tokens=now.waiting_tokens,
            prefill_tokens_per_s=self._tokens_per_s,
        )

    def _turn(self) -> None:
        now = self._events.now
        commands, self._inbox = self._inbox, []
        self.scheduler.accept(commands, now)
        step = self.scheduler.next_batch(now)
        self._publish()
        if step is None:
            self._running = False
            return
        seconds = self._settings.service.step_s(step.batch.rows)
        self._events.after(seconds, self._ran, step, seconds)

    def _ran(self, step: StepPlan, seconds: float) -> None:
        self.scheduler.commit(step, self._events.now)
        self.scheduler.send(step, self._events.now)
        self.busy_s += seconds
        rate = step.batch.scheduled_tokens / seconds
        self._tokens_per_s += (RATE_WEIGHT if self._tokens_per_s else 1.0) * (rate - self._tokens_per_s)
        self._publish()
        self._turn()

    def _publish(self) -> None:
        for output in self.scheduler.take_outputs():
            self._tell(output)
            if isinstance(output, m.Committed | m.Failed):
                self._targets.pop(output.grant_id, None)
        for push in self.scheduler.take_transfers().pushes:
            self._write(push)
        self.news.changed()

    def _write(self, push: Push) -> None:
        """One write after the other leaves a member, and one after the other comes in at one."""
        target = self._targets[Notice.from_bytes(push.notice).grant_id]
        tokens = push.size_bytes / PAGE_BYTES * self._settings.page_tokens
        begun_at = max(self._events.now, self._network_free_at, target.network_free_at)
        done_at = begun_at + self._settings.service.send_s(tokens)
        self._network_free_at = target.network_free_at = done_at
        self._events.at(done_at, self._written, push, target)

    def _written(self, push: Push, target: DecodeMember) -> None:
        self.send(PushesEnded((PushResult(push.push_id, True),), 0.0, self._events.now))
        target.send(NoticesArrived(((self.peer.incarnation, push.notice),)))


def _info(peer: Peer, settings: CellSettings, pages: int) -> MemberInfo:
    return MemberInfo(
        name=peer.member,
        incarnation=peer.incarnation,
        address=peer.address,
        role=Role.PREFILL,
        model_snapshot="simulated",
        page_tokens=settings.page_tokens,
        total_pages=pages,
        context_tokens=settings.service.model.context_tokens,
        max_sequences=settings.prefill_step_sequences,
        max_queued_tokens=settings.prefill_queued_tokens,
        computes_prompts=True,
    )
