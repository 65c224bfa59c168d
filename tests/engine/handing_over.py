"""Members that fill grants of others without any thread: the writing end of a transport, and a prefill member over a runner."""

from collections.abc import Callable, Sequence

from engine.landing import LandingRows
from engine.layout import Layout
from engine.prefixes import page_pools
from engine.runner import Runner
from kv_transfer.grant_writer import PushesEnded, Transfers
from kv_transfer.grants import WriterBook
from kv_transfer.memory import MemoryFabric, MemorySender
from kv_transfer.offer import Grant, Peer, Slab
from kv_transfer.plan import HandoverPlan, SourceMemory, plan
from member.inbox import Inbox
from member.kv_layout import layout_view, registered
from prefill_svc import messages as m
from prefill_svc.plans import SchedulerLimits
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.worker import PrefillWorker, WorkerPorts
from rpc import clocks


class WritingEnd:
    """Posts what an engine thread wants written, and tells it what has ended, when it is polled.

    slabs: one for each KV group of the layout, then that of the landing rows.
    """

    def __init__(
        self, fabric: MemoryFabric, name: str, layout: Layout, slabs: Sequence[Slab], deliver: Callable[[PushesEnded], None]
    ) -> None:
        self._sender = MemorySender(fabric, name, slabs)
        self._source = SourceMemory(layout_view(layout), tuple(slabs[:-1]), slabs[-1])
        self._deliver = deliver

    def plan(self, grant: Grant) -> HandoverPlan:
        """How a grant is filled from here."""
        return plan(grant, self._source)

    def transfer(self, transfers: Transfers) -> None:
        """Connects and posts. Nothing is withdrawn: writes here are never stale."""
        for endpoint in transfers.connects:
            self._sender.connect(endpoint)
        for push in transfers.pushes:
            self._sender.post(push)

    def poll(self) -> None:
        """Move bytes, and deliver what has ended."""
        results = self._sender.poll()
        if results:
            self._deliver(PushesEnded(tuple(results), 0.0, clocks.monotonic()))


class PrefillMember:
    """Whoever holds it takes its turns. step_tokens: most tokens of one step."""

    def __init__(self, runner: Runner, fabric: MemoryFabric, step_tokens: int, *, prefix_cache: bool = False) -> None:
        self.peer = Peer("prefill-0", "prefill-1", "127.0.0.1:1")
        limits = SchedulerLimits(step_tokens=step_tokens, context_tokens=runner.context_tokens)
        staging = LandingRows(limits.staging_rows, runner.vocabulary_size)
        pools = page_pools(runner.layout.groups, [slab.units for slab in runner.slabs])
        keys = runner.layout.prefix_keys if prefix_cache else None
        self.scheduler = PrefillScheduler(limits, pools, runner.layout.groups, WriterBook(), keys)
        self.inbox: Inbox[m.Command] = Inbox(64)
        self.committed = 0
        self.steps = 0
        slabs = [registered(slab) for slab in (*runner.slabs, staging.slab)]
        self._writing = WritingEnd(fabric, "prefill-0", runner.layout, slabs, self.inbox.put_always)
        ports = WorkerPorts(self._writing.transfer, lambda outputs, *_: self._note(outputs), lambda report: None)
        self._worker = PrefillWorker(runner, staging, self.scheduler, self.inbox, ports)

    def _note(self, outputs: Sequence[m.Output]) -> None:
        assert not [output for output in outputs if isinstance(output, m.Failed)]
        self.committed += sum(isinstance(output, m.Committed) for output in outputs)

    def fill(self, grant: Grant, prompt: Sequence[int], salt: bytes = b"", adapter: str = "") -> None:
        """Compute a prompt into a grant."""
        self.inbox.put_nowait(m.Submit(grant.key, self._writing.plan(grant), tuple(prompt), 0, None, salt, adapter))

    def turn(self) -> None:
        """One turn, with what has arrived by then; the books balance after it."""
        self._writing.poll()
        self.steps += self._worker.turn()
        assert self.scheduler.check() == []
